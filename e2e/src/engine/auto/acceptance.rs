//! How often the target accepts what the drafter gives a probability to, by depth and rank.
//!
//! A node whose parent was accepted is one trial: the drafter expected it with its marginal probability, and it was
//! accepted or not. The ratio of accepted to expected, per depth and rank, corrects the probabilities of later trees.

use crate::tree::{CandidateTree, Marginals};

/// Depths with statistics of their own; deeper nodes share the last.
const DEPTHS: usize = 16;
/// Ranks with statistics of their own; worse candidates share the last.
const RANKS: usize = 4;
/// Expected acceptances that the coarser statistic weighs against a finer one.
const PRIOR: f64 = 6.0;
/// What a round keeps of the rounds before it.
const KEEP: f64 = 0.98;
/// No node is taken to be accepted more surely than this.
const MOST: f64 = 0.98;
/// What the drafter's probabilities are worth behind a sibling, before anything was observed: its rows are conditioned on its own best tokens.
const BEHIND: f64 = 0.5;

fn cell(depth: usize, rank: u32) -> (usize, usize) {
    (depth.clamp(1, DEPTHS) - 1, (rank as usize).min(RANKS - 1))
}

/// Accepted over expected per depth and rank.
#[derive(Clone, Debug)]
pub(super) struct Ratios {
    of: [[f64; RANKS]; DEPTHS],
    /// Further factor of a node with another than a best token before it in its path.
    behind: f64,
}

impl Default for Ratios {
    /// The drafter's own probabilities.
    fn default() -> Self {
        Self { of: [[1.0; RANKS]; DEPTHS], behind: 1.0 }
    }
}

impl Ratios {
    /// The probability of acceptance where the drafter says `log_prob`.
    fn accepted(&self, depth: usize, rank: u32, log_prob: f64) -> f64 {
        let (row, column) = cell(depth, rank);
        (log_prob.exp() * self.of[row][column]).clamp(0.0, MOST)
    }

    /// The drafter's own probabilities, with what is thought of siblings before anything was observed.
    pub fn apart() -> Self {
        Self { behind: BEHIND, ..Self::default() }
    }

    /// See [`Self::behind`]'s field, as a log.
    pub fn behind(&self) -> f64 {
        self.behind.min(1.0).ln()
    }

    /// The drafter's marginals corrected: a tree built from them is the best one by what is accepted.
    pub fn correct(&self, marginals: &Marginals) -> Marginals {
        marginals.map(|depth, rank, log_prob| self.accepted(depth, rank as u32, log_prob).ln())
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Trials {
    expected: f64,
    accepted: f64,
}

impl Trials {
    fn add(&mut self, other: &Self) {
        self.expected += other.expected;
        self.accepted += other.accepted;
    }

    fn ratio(self, prior: f64) -> f64 {
        (self.accepted + PRIOR * prior) / (self.expected + PRIOR)
    }
}

/// Running counts of one stream, or of all.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    of: [[Trials; RANKS]; DEPTHS],
    /// Nodes with another than a best token before them, where they are counted apart.
    behind: Trials,
}

impl Acceptance {
    /// Takes in which nodes of a verified tree were accepted (`path`, root first), when `ratios` of the drafter's
    /// probabilities were expected to be. Where nodes behind siblings are counted `apart`, a chain says nothing about siblings.
    pub fn observe(&mut self, tree: &CandidateTree, path: &[usize], ratios: &Ratios, apart: bool) {
        let seen = if apart && tree.tree().is_chain() { 1 } else { RANKS };
        let of = self.of.iter_mut().flat_map(|ranks| &mut ranks[..seen]);
        for trials in of.chain((seen == RANKS).then_some(&mut self.behind)) {
            trials.expected *= KEEP;
            trials.accepted *= KEEP;
        }
        let behind = path.iter().position(|&node| tree.ranks()[node] > 0).unwrap_or(path.len());
        for node in 1..tree.tokens().len() {
            let Some(parent) = tree.tree().parent(node) else { continue };
            let depth = tree.tree().depths()[node] as usize;
            if path.get(depth - 1) != Some(&parent) {
                continue;
            }
            let rank = tree.ranks()[node];
            let mut expected = ratios.accepted(depth, rank, tree.log_probs()[node]);
            let (row, column) = cell(depth, rank);
            let trials = match apart && depth > behind {
                true => {
                    expected *= ratios.behind;
                    &mut self.behind
                }
                false => &mut self.of[row][column],
            };
            trials.expected += expected;
            trials.accepted += f64::from(u8::from(path.get(depth) == Some(&node)));
        }
    }

    /// `expected` (what the counts were observed against) corrected by the counts; where they are few each cell leans on
    /// its rank over all depths, and each rank on everything.
    pub fn corrected(&self, expected: &Ratios) -> Ratios {
        let mut of_rank = [Trials::default(); RANKS];
        for (rank, trials) in self.of.iter().flat_map(|ranks| ranks.iter().enumerate()) {
            of_rank[rank].add(trials);
        }
        let mut all = Trials::default();
        of_rank.iter().for_each(|trials| all.add(trials));
        let of_rank = of_rank.map(|trials| trials.ratio(all.ratio(1.0)));
        let mut ratios = expected.clone();
        ratios.behind *= self.behind.ratio(1.0);
        for (row, cells) in ratios.of.iter_mut().zip(&self.of) {
            for (rank, (ratio, trials)) in row.iter_mut().zip(cells).enumerate() {
                *ratio *= trials.ratio(of_rank[rank]);
            }
        }
        ratios
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{BuildOptions, ddtree_from};

    const OPTIONS: BuildOptions = BuildOptions { budget: 4, top_k: 4 };

    /// Two depths over four tokens; each depth's best token has probability about 0.64, the next 0.24.
    fn marginals() -> Marginals {
        let logits = [2.0f32, 1.0, 0.0, -1.0, 2.0, 1.0, 0.0, -1.0];
        Marginals::from_logits(&logits, 4, OPTIONS).unwrap()
    }

    /// The corrected probabilities of ranks 0 and 1 at depth 1, after 60 rounds with the accepted path `path`.
    fn after(path: impl Fn(&CandidateTree) -> Vec<usize>) -> [f64; 2] {
        let tree = ddtree_from(&marginals(), 0, OPTIONS).unwrap();
        let mut acceptance = Acceptance::default();
        for _ in 0..60 {
            acceptance.observe(&tree, &path(&tree), &Ratios::default(), false);
        }
        let corrected = acceptance.corrected(&Ratios::default()).correct(&marginals());
        [0, 1].map(|rank: usize| corrected.depth(1)[rank].1.exp())
    }

    #[test]
    fn without_observations_the_drafter_is_believed() {
        let corrected = Acceptance::default().corrected(&Ratios::default()).correct(&marginals());
        for depth in 1..=2 {
            for (new, old) in corrected.depth(depth).iter().zip(marginals().depth(depth)) {
                assert!((new.1 - old.1).abs() < 1e-9 && new.0 == old.0);
            }
        }
    }

    #[test]
    fn a_drafter_that_is_always_wrong_loses_its_credit() {
        let [best, next] = after(|_| vec![0]);
        assert!(best < 0.15 && next < 0.1, "{best} {next}");
    }

    #[test]
    fn a_modest_drafter_that_is_always_right_gains_credit_at_the_rank_that_is_right() {
        let [best, next] = after(|tree| vec![0, tree.child(0, 0).unwrap()]);
        assert!(best > 0.85 && next < 0.12, "{best} {next}");
    }
}
