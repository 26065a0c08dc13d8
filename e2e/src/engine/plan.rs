//! The first half of a round: who reads how much of its prompt, who drafts, and which trees are verified.

use candle_core::Tensor;
use canopy_candle::TreeDraft;
use canopy_kernels::DraftTree;

use super::auto::{Bucket, Candidate, Choice, Fixed, Lookup, draft_load};
use super::drafts::Draft;
use super::prefill::short_parts;
use super::{Engine, Mode, Reason, StageTimes, Stream};
use crate::Result;
use crate::target::{LogitRows, VerifyStream};
use crate::tree::{BuildOptions, CandidateTree, Marginals, chain_from};

/// What one stream verifies in a round.
pub(super) enum Rows {
    /// A chunk of its prompt.
    Prompt(usize),
    /// A draft tree, possibly the root alone.
    Tree { tree: CandidateTree, source: Source },
}

/// Where a tree's nodes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// There are none but the root.
    Plain,
    /// The stream's own text, after a match of so many tokens.
    Lookup { matched: usize },
    /// The drafter, in a block of so many rows of which so many depths were wanted.
    Drafter { block_rows: usize, horizon: usize },
}

/// One stream's part of a round.
pub(super) struct Work {
    /// Index in the running streams.
    pub index: usize,
    pub rows: Rows,
    /// The first row of [`Plan::unseen`] that its nodes' tokens, or the whole tree, come from.
    pub unseen: Option<usize>,
    /// Why it has these nodes.
    pub reason: Reason,
}

impl Work {
    /// A chunk of a prompt.
    pub fn prompt(index: usize, rows: usize) -> Self {
        Self { index, rows: Rows::Prompt(rows), unseen: None, reason: Reason::Asked }
    }

    /// Rows that it adds to the pass.
    pub(super) fn rows(&self) -> usize {
        match &self.rows {
            Rows::Prompt(count) => *count,
            Rows::Tree { tree, .. } => tree.tokens().len(),
        }
    }

    /// Its draft tree, if it is none of a prompt's chunks.
    pub fn tree(&self) -> Option<&CandidateTree> {
        match &self.rows {
            Rows::Prompt(_) => None,
            Rows::Tree { tree, .. } => Some(tree),
        }
    }

    /// What its tree is built from, if the draft's device builds it.
    pub fn built(&self) -> Option<TreeDraft> {
        let depths = self.tree().filter(|tree| !tree.tree().is_chain())?.tree().max_depth();
        self.unseen.map(|first| TreeDraft { first, depths })
    }

    /// True when the drafter has drawn its tree.
    pub fn drafted(&self) -> bool {
        matches!(self.rows, Rows::Tree { source: Source::Drafter { .. }, .. })
    }

    /// The stream's entry of the verify pass.
    pub fn verify(&self, stream: &Stream) -> Result<VerifyStream> {
        let slot = stream.slot;
        match &self.rows {
            Rows::Prompt(count) => {
                let tokens = stream.prompt[stream.prefilled..][..*count].to_vec();
                let logits = match &stream.prompt_logprobs {
                    Some(_) => LogitRows::All,
                    None if *count == stream.unread() => LogitRows::Last,
                    None => LogitRows::None,
                };
                Ok(VerifyStream { slot, tokens, tree: DraftTree::chain(*count)?, logits })
            }
            Rows::Tree { tree, .. } => {
                let (tokens, tree) = (tree.tokens().to_vec(), tree.tree().clone());
                Ok(VerifyStream { slot, tokens, tree, logits: LogitRows::All })
            }
        }
    }
}

/// A planned round.
#[derive(Default)]
pub(super) struct Plan {
    pub work: Vec<Work>,
    /// Load of the round's draft call, 0 without one.
    pub draft_load: usize,
    /// Its seconds, tree building included; `None` when a prompt's features were taken in with it.
    pub draft_seconds: Option<f64>,
    /// Drafts that the host does not wait for.
    pub unseen: Option<Unseen>,
    /// Set when `auto` chose the nodes before the draft.
    pub ahead: Option<AheadOf>,
}

/// What is learned of a round that was planned ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct AheadOf {
    /// What its time is the time of.
    pub bucket: Option<Bucket>,
    /// Whether the trees that the device built are to be read.
    pub reads: bool,
}

/// What drafts hold that stay with their device.
pub(super) struct Unseen {
    /// The best tokens of their rows.
    pub best: Tensor,
    /// How many a row.
    pub k: usize,
}

/// A stream that drafts nothing, or a chain that is looked up.
struct Undrafted {
    index: usize,
    root: u32,
    lookup: Option<Lookup>,
    reason: Reason,
}

impl Undrafted {
    fn rows(self) -> Result<Rows> {
        let Some(Lookup { matched, tokens, .. }) = self.lookup else {
            return Ok(Rows::Tree { tree: CandidateTree::root_only(self.root)?, source: Source::Plain });
        };
        let options = BuildOptions { budget: tokens.len(), top_k: 1 };
        let tree = chain_from(&Marginals::chain(tokens), self.root, options)?;
        Ok(Rows::Tree { tree, source: Source::Lookup { matched } })
    }
}

impl Engine {
    /// Plans a round: prompt chunks, drafts and trees.
    pub(super) fn plan(&mut self, times: &mut StageTimes) -> Result<Plan> {
        let mut plan = Plan { work: self.prompt_chunks(), ..Plan::default() };
        let (drafts, undrafted) = self.wanted_drafts(&mut plan.ahead);
        for stream in undrafted {
            let (index, reason) = (stream.index, stream.reason);
            plan.work.push(Work { index, rows: stream.rows()?, unseen: None, reason });
        }
        if !drafts.is_empty() {
            self.draft(drafts, &mut plan, times)?;
        }
        plan.work.sort_by_key(|work| work.index);
        Ok(plan)
    }

    /// Prompt rows of this round, at most a chunk over all streams and shared out fairly among those that read.
    fn prompt_chunks(&self) -> Vec<Work> {
        let short = |stream: &Stream| if stream.long_rows() > 0 { 0 } else { stream.readable() };
        let readable: Vec<usize> = self.running.iter().map(short).collect();
        let shares = match self.config.reads_long() {
            true => short_parts(&readable),
            false => fair_shares(&readable, self.config.prefill_chunk),
        };
        let chunk = |(index, count): (usize, usize)| Work::prompt(index, count);
        shares.into_iter().enumerate().filter(|&(_, count)| count > 0).map(chunk).collect()
    }

    /// The drafts of this round, and the streams without one; `ahead` is set when they were chosen ahead.
    fn wanted_drafts(&mut self, ahead: &mut Option<AheadOf>) -> (Vec<Draft>, Vec<Undrafted>) {
        let (mut drafts, mut auto, mut undrafted) = (Vec::new(), Vec::new(), Vec::new());
        let block_rows = self.drafter.as_ref().map_or(1, |drafter| drafter.block_size());
        for (index, stream) in self.running.iter().enumerate() {
            let Some(root) = stream.root else { continue };
            let Speculated { mode, horizon, budget } = self.speculated(stream, block_rows);
            let reason = Reason::Asked;
            let draft = Draft { index, root, horizon, budget, mode, block_rows, reason };
            match horizon.min(budget) {
                _ if mode == Mode::Auto => auto.push(draft),
                0 => undrafted.push(Undrafted { index, root, lookup: None, reason }),
                _ => drafts.push(draft),
            }
        }
        if !auto.is_empty() {
            match self.plans_ahead() {
                true => *ahead = self.choose_ahead(auto, &mut drafts, &mut undrafted),
                false => self.choose(auto, &mut drafts, &mut undrafted),
            }
        }
        (drafts, undrafted)
    }

    /// Spreads the auto streams over `drafts` and `undrafted`.
    fn choose(&mut self, auto: Vec<Draft>, drafts: &mut Vec<Draft>, undrafted: &mut Vec<Undrafted>) {
        let fixed = Fixed {
            rows: undrafted.len() + auto.len() + drafts.iter().map(|d| d.budget + 1).sum::<usize>(),
            tokens: (undrafted.len() + auto.len() + drafts.len()) as f64,
            draft_load: drafts.iter().map(|d| draft_load(d.block_rows, d.horizon)).sum(),
        };
        self.tuner.set_streams(fixed.tokens as usize);
        let looks_up = self.config.synthetic.is_none();
        let mut candidates = candidates(&mut self.running, &auto, looks_up);
        let choices = self.tuner.choose(&mut candidates, fixed);
        for (draft, choice) in auto.into_iter().zip(choices.streams) {
            let block_rows = choices.block_rows;
            let drawn = Draft { horizon: draft.horizon.min(block_rows - 1), block_rows, ..draft };
            place(drawn, choice, drafts, undrafted);
        }
    }

    /// Whether `auto`'s nodes are chosen before the draft: where nobody has to look at it.
    fn plans_ahead(&self) -> bool {
        let is_blind = |stream: &Stream| stream.only_best() && !stream.report_rounds;
        self.tuner.plans_ahead() && self.running.iter().all(is_blind)
    }

    /// [`Self::choose`] of streams that draft what `chain` and `tree` draft.
    fn choose_ahead(
        &mut self,
        auto: Vec<Draft>,
        drafts: &mut Vec<Draft>,
        undrafted: &mut Vec<Undrafted>,
    ) -> Option<AheadOf> {
        let streams = undrafted.len() + auto.len() + drafts.len();
        self.tuner.set_streams(streams);
        let looks_up = self.config.synthetic.is_none();
        let mut candidates = candidates(&mut self.running, &auto, looks_up);
        let planned = self.tuner.choose_ahead(&mut candidates, (streams, drafts.len()))?;
        for (draft, choice) in auto.into_iter().zip(planned.streams) {
            let drawn = match planned.shape {
                Some(shape) => Draft {
                    mode: if shape.is_tree { Mode::Tree } else { Mode::Chain },
                    horizon: draft.horizon.min(shape.horizon()),
                    budget: draft.budget.min(shape.nodes),
                    block_rows: shape.block_rows,
                    ..draft
                },
                None => draft,
            };
            place(drawn, choice, drafts, undrafted);
        }
        Some(AheadOf { bucket: planned.bucket, reads: planned.reads })
    }

    /// A stream's mode, depths to draft and most nodes in its next round.
    fn speculated(&self, stream: &Stream, block_size: usize) -> Speculated {
        let (mode, budget) = (stream.speculation.mode, stream.speculation.budget);
        let depth = if stream.features.is_some() { stream.useful_depth(block_size) } else { 0 };
        let (horizon, budget) = match mode {
            Mode::Ar => (0, 0),
            Mode::Chain => (depth, budget.unwrap_or(depth)),
            Mode::Tree => (depth, budget.unwrap_or(self.config.default_budget)),
            Mode::Auto => (depth, budget.unwrap_or(self.config.auto_budget)),
        };
        Speculated { mode, horizon: horizon.min(budget), budget }
    }
}

/// What `auto` looks at of its streams, which are in the order of `running`.
fn candidates<'a>(running: &'a mut [Stream], auto: &[Draft], looks_up: bool) -> Vec<Candidate<'a>> {
    let mut wanted = auto.iter().peekable();
    let candidate = |(index, stream): (usize, &'a mut Stream)| {
        let draft = wanted.next_if(|draft| draft.index == index)?;
        // What a stated model accepts says nothing about a stream's own text.
        let depth = if looks_up { stream.left().saturating_sub(1) } else { 0 };
        Some(Candidate {
            tuning: &stream.tuning,
            history: &mut stream.history,
            horizon: draft.horizon.min(draft.budget),
            depth,
            budget: draft.budget,
        })
    };
    running.iter_mut().enumerate().filter_map(candidate).collect()
}

/// Puts a stream of `auto` where its choice belongs.
fn place(draft: Draft, choice: Choice, drafts: &mut Vec<Draft>, undrafted: &mut Vec<Undrafted>) {
    let Draft { index, root, .. } = draft;
    let reason = Reason::Best;
    match choice {
        Choice::Plain => undrafted.push(Undrafted { index, root, lookup: None, reason }),
        Choice::Lookup(lookup) => undrafted.push(Undrafted { index, root, lookup: Some(lookup), reason }),
        Choice::Draft => drafts.push(Draft { reason, ..draft }),
        Choice::Trial => drafts.push(Draft { reason: Reason::Trial, ..draft }),
    }
}

/// `total` shared out among `wanted`, the smallest first: nobody gets more than it wants, and whoever gets less than that
/// gets no less than anybody else, but for the rounding. What is left over goes to the ones that came first. A short
/// prompt is thereby read in a number of rounds that depends on the number of streams and not on their prompts.
pub(super) fn fair_shares(wanted: &[usize], total: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index] > 0).collect();
    // With less than one for everybody the first ones go first, so that nobody waits for ever.
    order.truncate(total);
    order.sort_by_key(|&index| wanted[index]);
    let (mut shares, mut left, mut takers) = (vec![0; wanted.len()], total, order.len());
    for &index in &order {
        shares[index] = wanted[index].min(left / takers);
        left -= shares[index];
        takers -= 1;
    }
    for (share, &wanted) in shares.iter_mut().zip(wanted) {
        let more = left.min(wanted - *share);
        *share += more;
        left -= more;
    }
    shares
}

struct Speculated {
    mode: Mode,
    horizon: usize,
    budget: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::fair_shares;

    #[test]
    fn a_short_prompt_is_not_held_up_by_a_long_one() {
        assert_eq!(fair_shares(&[1900, 5], 128), [123, 5]);
        assert_eq!(fair_shares(&[1900, 0, 1000, 30], 128), [49, 0, 49, 30]);
        assert_eq!(fair_shares(&[9, 9, 9], 2), [1, 1, 0]);
        assert_eq!(fair_shares(&[], 4), [] as [usize; 0]);
    }

    proptest! {
        /// All of the total is used while anybody wants more, and nobody waits behind one who gets more.
        #[test]
        fn shares_are_fair(wanted in prop::collection::vec(0usize..300, 0..9), total in 1usize..200) {
            let shares = fair_shares(&wanted, total);
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(wanted.iter().sum()));
            let least = total / wanted.iter().filter(|&&w| w > 0).count().max(1);
            for (share, wanted) in shares.iter().zip(&wanted) {
                prop_assert!(share <= wanted && *share >= least.min(*wanted));
            }
        }
    }
}
