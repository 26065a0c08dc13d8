//! Rounds that the target walks and commits itself, where its logits are: the host hears of the accepted tokens in one small copy, while the
//! commit runs.

use canopy_candle::{WalkedTree, drafted_source, stated_node};

use super::accept::{Accepted, Failure};
use super::choose::Fault;
use super::drafts::Draft;
use super::plan::{Plan, Rows, Unseen, Work};
use super::round::Outcome;
use super::stream::Stream;
use super::{EmittedToken, Engine, Mode, SyntheticAcceptance, TokenOrigin};
use crate::Result;
use crate::target::{DraftedTokens, DraftedTrees, StatedRanks, Verified};
use crate::tree::CandidateTree;

impl Engine {
    /// The outcomes of a round of draft trees alone, of streams that look at nothing but best tokens; what they accepted is committed. `None`
    /// when the round is not one, or the walk is the caller's.
    ///
    /// A path is committed whole, beyond a token that ends its text too: the stream's slot is emptied then.
    pub(super) fn walk_where_verified(
        &mut self,
        work: &[Work],
        verified: &Verified,
    ) -> Result<Option<Vec<Outcome>>> {
        let tree = |work: &Work| match &work.rows {
            Rows::Tree { .. } => self.running[work.index].only_best(),
            Rows::Prompt(_) => false,
        };
        if !self.walks() || verified.logits.is_none() || !work.iter().all(tree) {
            return Ok(None);
        }
        let stated = self.config.synthetic.as_ref().map(|model| self.stated(model, work));
        let found = self.target.walk_and_commit(verified, stated.as_ref())?;
        Ok(Some(work.iter().zip(found).map(|(work, found)| self.take_in(work, found)).collect()))
    }

    pub(super) fn walks(&self) -> bool {
        self.target.walks() && !self.config.host_walk
    }

    /// Whether a round of these drafts, beside `others`, can be verified, walked and committed without the host having seen them: in a round that
    /// [`Self::walk_where_verified`] takes and nobody else wants to look at.
    pub(super) fn drafts_stay(&self, drafts: &[Draft], others: &[Work]) -> bool {
        let is_blind = |stream: &Stream| {
            let looks = stream.speculation.mode == Mode::Auto && !self.tuner.plans_ahead();
            stream.only_best() && !stream.report_rounds && !looks
        };
        self.walks()
            && drafts.iter().all(|draft| draft.can_stay(self.config.host_build))
            && others.iter().all(|work| work.tree().is_some())
            && self.running.iter().all(is_blind)
    }

    /// Verifies the round's trees.
    pub(super) fn verify(&mut self, plan: &Plan) -> Result<Verified> {
        let streams = plan.work.iter().map(|work| work.verify(&self.running[work.index]));
        let streams = streams.collect::<Result<Vec<_>>>()?;
        let Some(Unseen { best, k }) = &plan.unseen else { return self.target.verify(&streams) };
        let sources = |work: &Work| {
            let depths = work.tree().map_or(&[][..], |tree| tree.tree().depths());
            let first = work.unseen.filter(|_| work.built().is_none());
            let source = move |&depth: &u32| match (first, depth) {
                (None, _) | (_, 0) => -1,
                (Some(first), depth) => drafted_source(first + depth as usize - 1, 0, *k),
            };
            depths.iter().map(source).collect::<Vec<_>>()
        };
        let sources = plan.work.iter().flat_map(sources).collect();
        let drafts: Vec<_> = plan.work.iter().map(Work::built).collect();
        let depths = drafts.iter().flatten().map(|draft| draft.depths).max();
        let trees = depths.map(|depths| DraftedTrees {
            nodes: ranked(&plan.work),
            stated: self.config.synthetic.as_ref().map(|model| model.log_probs(depths, *k)),
            drafts,
        });
        self.counters.unseen_rounds += 1;
        self.target.verify_drafted(&streams, &DraftedTokens { best: best.clone(), sources, trees })
    }

    /// What the model of acceptance wants in this round.
    fn stated(&self, model: &SyntheticAcceptance, work: &[Work]) -> StatedRanks {
        let trees = || work.iter().filter_map(|work| Some((&self.running[work.index], work.tree()?)));
        let most = trees().map(|(_, tree)| tree.tree().max_depth() + 1).max().unwrap_or(1);
        StatedRanks {
            nodes: ranked(work),
            wanted: trees()
                .flat_map(|(stream, _)| model.wanted(stream.picker.sampling.seed, stream.start(), most))
                .collect(),
        }
    }

    fn take_in(&mut self, work: &Work, found: WalkedTree) -> Outcome {
        let stream = &mut self.running[work.index];
        let WalkedTree { path, tokens, failed } = found;
        if failed {
            let position = stream.start() + path.len() - 1;
            return Outcome::failed(Failure { position, fault: Fault::NonFinite });
        }
        let bonus = tokens.len() - 1;
        let token = |(at, id): (usize, u32)| {
            let origin = if at < bonus { TokenOrigin::Drafted } else { TokenOrigin::Bonus };
            EmittedToken { id, origin, logprob: None, top: Vec::new() }
        };
        let tokens = tokens.into_iter().enumerate().map(token).collect();
        Outcome::accepted(stream, Accepted { path, tokens })
    }
}

/// Ranks and depths of all nodes, of those that are built as of what stands for them.
fn ranked(work: &[Work]) -> Vec<u32> {
    let words = |tree: &CandidateTree| {
        let nodes = tree.ranks().iter().zip(tree.tree().depths());
        nodes.map(|(&rank, &depth)| stated_node(rank, depth)).collect::<Vec<_>>()
    };
    work.iter().filter_map(Work::tree).flat_map(words).collect()
}
