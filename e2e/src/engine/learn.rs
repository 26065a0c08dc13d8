//! What `auto` learns of a round.

use canopy_candle::stated_parts;

use super::auto::{StreamTuning, Tuner, Walked};
use super::plan::{AheadOf, Plan, Rows, Source, Work};
use super::round::Outcome;
use super::{Engine, Mode, StageTimes};
use crate::tree::CandidateTree;

impl Engine {
    /// Tells `auto` what the round cost and brought.
    pub(super) fn learn(
        &mut self,
        plan: &Plan,
        outcomes: &[Outcome],
        times: &StageTimes,
    ) -> crate::Result<()> {
        if let Some(ahead) = plan.ahead {
            return self.learn_ahead(ahead, plan, outcomes, times);
        }
        // Of a round whose draft nobody waited for only the sum is known, and nobody in it is tuned.
        if plan.unseen.is_some() {
            return Ok(());
        }
        let (mut rows, mut chains) = (Some(0), true);
        for (work, outcome) in plan.work.iter().zip(outcomes) {
            let Rows::Tree { tree, source } = &work.rows else {
                // A prompt chunk's rows want no logits: they say little about a round's.
                rows = None;
                continue;
            };
            rows = rows.map(|rows| rows + tree.tokens().len());
            chains &= tree.tree().is_chain();
            let stream = &mut self.running[work.index];
            // The other modes' trees are as large as they were asked to be: they say nothing about what pays.
            if stream.speculation.mode != Mode::Auto {
                continue;
            }
            let tuning = &mut stream.tuning;
            match (source, &outcome.walked) {
                (&Source::Drafter { block_rows, horizon }, Some((path, _))) => {
                    self.tuner.observe_draft(tuning, (block_rows, horizon), tree, path);
                }
                _ => observe_undrafted(&mut self.tuner, tuning, (tree, source), outcome, times),
            }
        }
        if let Some(rows) = rows {
            let seconds = times.verify + times.accept + times.commit;
            self.tuner.observe_verify(rows, outcomes.len(), chains, seconds);
            if let Some(seconds) = plan.draft_seconds {
                self.tuner.draft.observe(plan.draft_load, seconds);
            }
        }
        Ok(())
    }

    /// [`Self::learn`] of a round whose nodes were chosen ahead.
    fn learn_ahead(
        &mut self,
        ahead: AheadOf,
        plan: &Plan,
        outcomes: &[Outcome],
        times: &StageTimes,
    ) -> crate::Result<()> {
        let built = if ahead.reads && plan.unseen.is_some() { self.target.walked_nodes()? } else { None };
        // A tree whose candidates ran out has fewer nodes than its rows.
        let rows = plan.work.iter().map(Work::rows).sum::<usize>();
        let built = built.filter(|nodes| nodes.len() == rows);
        let mut first = 0;
        for (work, outcome) in plan.work.iter().zip(outcomes) {
            let own = first..first + work.rows();
            first = own.end;
            let stream = &mut self.running[work.index];
            let Rows::Tree { tree, source } = &work.rows else { continue };
            if stream.speculation.mode != Mode::Auto {
                continue;
            }
            let tuning = &mut stream.tuning;
            match (source, &outcome.walked) {
                (&Source::Drafter { horizon, .. }, Some((path, _))) => {
                    let gain = path.len() - 1;
                    match (tree.tree().is_chain(), work.unseen, &built) {
                        (true, _, _) => self.tuner.observe_chain(tuning, tree.budget(), gain),
                        (false, None, _) => {
                            let (ranks, depths) = (tree.ranks(), tree.tree().depths());
                            self.tuner.observe_tree(tuning, Walked { ranks, depths, path, horizon });
                        }
                        (false, Some(_), Some(nodes)) => {
                            let (ranks, depths): (Vec<u32>, Vec<u32>) =
                                nodes[own].iter().map(|&node| stated_parts(node)).unzip();
                            let walked = Walked { ranks: &ranks, depths: &depths, path, horizon };
                            self.tuner.observe_tree(tuning, walked);
                        }
                        (false, Some(_), None) => {}
                    }
                    self.tuner.observe_planned(tuning, ahead.bucket, gain);
                }
                _ => observe_undrafted(&mut self.tuner, tuning, (tree, source), outcome, times),
            }
        }
        let prompts = plan.work.iter().any(|work| work.tree().is_none());
        if let Some(bucket) = ahead.bucket.filter(|_| !prompts && !self.config.settle_stages) {
            self.tuner.observe_round(bucket, times.total());
        }
        Ok(())
    }
}

/// A round in which an `auto` stream drafted nothing: what a lookup brought, and that it is longer without a draft.
fn observe_undrafted(
    tuner: &mut Tuner,
    tuning: &mut StreamTuning,
    (tree, source): (&CandidateTree, &Source),
    outcome: &Outcome,
    times: &StageTimes,
) {
    if let (&Source::Lookup { matched }, Some((path, _))) = (source, &outcome.walked) {
        tuner.observe_lookup(tuning, matched, tree.budget(), path.len() - 1);
    }
    Tuner::observe_plain(tuning, times.total());
}
