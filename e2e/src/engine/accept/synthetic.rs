//! Acceptance by a stated model instead of the target's choice, so that a pair with random weights can be timed.
//!
//! The model. Let the walk stand on a node of depth `d - 1`. The target's token there is the drafter's candidate of rank
//! `r` for depth `d` with probability `chance(d, r)`:
//! ```text
//! chance(d, 0) = curve[d]                                    deeper than the curve: its last entry
//! chance(d, r) = min((1 - curve[d]) * shares[r - 1], chance(d, r - 1))     no shares left: 0
//! ```
//! times `off_spine` when a node of the path has a rank above 0: the drafter's rows are conditioned on its own best
//! tokens, so they fit worse behind a sibling. With the rest of the probability the target's token is none of the drafter's.
//! A chain holds rank 0 alone, a tree goes on with every rank that it has a node for: both meet the same target. The rank
//! is drawn at one uniform number keyed by (seed, stream, position), so runs repeat exactly.
//!
//! The drafter's tokens stay its own; its probabilities become the model's, from which trees are built. They are the same in
//! every round: a real drafter also knows where it is sure, so a real tree gains more at the same mean.

use crate::sampling::uniform;
use crate::tree::{CandidateTree, Marginals};
use crate::{Error, Result};

/// What the drafter claims for a candidate that the model never accepts.
const LEAST: f64 = 1e-9;

/// A stated model of acceptance.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticAcceptance {
    curve: Vec<f64>,
    shares: Vec<f64>,
    off_spine: f64,
    seed: u64,
}

fn refuse(field: &'static str, expected: &str, got: impl std::fmt::Debug) -> Error {
    Error::Request { field, expected: expected.into(), got: format!("{got:?}") }
}

impl SyntheticAcceptance {
    /// What siblings hold of the target's tokens that the best candidate misses, rank 1 first, unless stated otherwise.
    pub const SHARES: [f64; 4] = [0.35, 0.15, 0.08, 0.05];
    /// How much less sure the drafter is behind a sibling, unless stated otherwise: vLLM's DDTree port saw 22 % of the
    /// tokens after a sibling accepted where 65 to 84 % of the spine's were.
    pub const OFF_SPINE: f64 = 0.3;

    /// The probability, by depth from 1, that the best candidate is the target's token once its parent was accepted.
    ///
    /// # Errors
    /// [`Error::Request`] for no entry or one outside 0 to 1.
    pub fn from_curve(curve: Vec<f64>) -> Result<Self> {
        if curve.is_empty() || curve.iter().any(|p| !(0.0..=1.0).contains(p)) {
            return Err(refuse("synthetic curve", "probabilities from 0 to 1, at least one", curve));
        }
        Ok(Self { curve, shares: Self::SHARES.to_vec(), off_spine: Self::OFF_SPINE, seed: 0 })
    }

    /// The flat curve with which whole chains of `horizon` drafted tokens have the mean acceptance length `length`, the bonus
    /// included.
    ///
    /// # Errors
    /// [`Error::Request`] for a length outside 1 to `horizon + 1`.
    pub fn from_length(length: f64, horizon: usize) -> Result<Self> {
        if !(1.0..=(horizon + 1) as f64).contains(&length) {
            let expected = format!("1 to block_size = {}", horizon + 1);
            return Err(refuse("synthetic acceptance", &expected, length));
        }
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            let reached = Self::from_curve(vec![middle])?.chain_length(horizon) >= length;
            *if reached { &mut high } else { &mut low } = middle;
        }
        Self::from_curve(vec![high])
    }

    /// With other siblings: `shares` of the target's tokens that the best candidate misses, rank 1 first, and the factor
    /// behind a sibling.
    ///
    /// # Errors
    /// [`Error::Request`] when the shares are negative or exceed 1 together, or the factor is outside 0 to 1.
    pub fn with_siblings(self, shares: Vec<f64>, off_spine: f64) -> Result<Self> {
        if shares.iter().any(|share| !(0.0..=1.0).contains(share)) || shares.iter().sum::<f64>() > 1.0 + 1e-9
        {
            return Err(refuse("synthetic siblings", "shares from 0 to 1 of together at most 1", shares));
        }
        if !(0.0..=1.0).contains(&off_spine) {
            return Err(refuse("synthetic off-spine factor", "0 to 1", off_spine));
        }
        Ok(Self { shares, off_spine, ..self })
    }

    /// With another seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Probabilities of the best candidate by depth; deeper ones are the last.
    pub fn curve(&self) -> &[f64] {
        &self.curve
    }

    /// Shares of the other ranks.
    pub fn shares(&self) -> &[f64] {
        &self.shares
    }

    /// The factor behind a sibling.
    pub fn off_spine(&self) -> f64 {
        self.off_spine
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Mean acceptance length of whole chains of `horizon` drafted tokens, the bonus included.
    pub fn chain_length(&self, horizon: usize) -> f64 {
        let mut reached = 1.0;
        1.0 + (1..=horizon)
            .map(|depth| {
                reached *= self.chance(depth, 0);
                reached
            })
            .sum::<f64>()
    }

    /// Mean acceptance length of `tree`, the bonus included.
    pub fn tree_length(&self, tree: &CandidateTree) -> f64 {
        let (shape, ranks) = (tree.tree(), tree.ranks());
        let mut reached = vec![1.0; ranks.len()];
        let mut on_spine = vec![true; ranks.len()];
        for node in 1..ranks.len() {
            let parent = shape.parent(node).unwrap_or(0);
            let factor = if on_spine[parent] { 1.0 } else { self.off_spine };
            on_spine[node] = on_spine[parent] && ranks[node] == 0;
            reached[node] =
                reached[parent] * factor * self.chance(shape.depths()[node] as usize, ranks[node]);
        }
        reached.iter().sum()
    }

    /// The probability that the candidate of `rank` is the target's token at `depth`, on the drafter's spine.
    fn chance(&self, depth: usize, rank: u32) -> f64 {
        let best = self.curve[depth.clamp(1, self.curve.len()) - 1];
        (0..rank as usize).fold(best, |before, rank| {
            let share = self.shares.get(rank).copied().unwrap_or(0.0);
            before.min((1.0 - best) * share)
        })
    }

    /// The same candidates with the model's probabilities.
    pub(in super::super) fn marginals(&self, drafted: &Marginals) -> Marginals {
        drafted.map(|depth, rank, _| self.log_prob(depth, rank))
    }

    /// [`Self::marginals`] of drafts with so many depths and candidates, `[depths, ranks]`.
    pub(in super::super) fn log_probs(&self, depths: usize, ranks: usize) -> Vec<f64> {
        let of_depth = |depth| (0..ranks).map(move |rank| self.log_prob(depth, rank));
        (1..=depths).flat_map(of_depth).collect()
    }

    fn log_prob(&self, depth: usize, rank: usize) -> f64 {
        self.chance(depth, rank as u32).max(LEAST).ln()
    }

    /// The rank of the target's token behind a path to depth `depth - 1`; `None` when it is none of the drafter's.
    fn rank(&self, stream: u64, position: usize, depth: usize, on_spine: bool) -> Option<u32> {
        let key = self.seed ^ stream.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut left = uniform(key, position);
        let factor = if on_spine { 1.0 } else { self.off_spine };
        (0..=self.shares.len() as u32).find(|&rank| {
            left -= factor * self.chance(depth, rank);
            left < 0.0
        })
    }

    /// The ranks that [`Self::next`] looks for in a round of `stream` whose root is at `start`: at depths 1 to `most` behind nodes of rank 0
    /// alone, then behind others; -1 for none.
    pub(in super::super) fn wanted(&self, stream: u64, start: usize, most: usize) -> Vec<i32> {
        let at = |on_spine| {
            let rank = move |depth| self.rank(stream, start + depth, depth, on_spine);
            (1..=most).map(move |depth| rank(depth).map_or(-1, |rank| rank as i32))
        };
        at(true).chain(at(false)).collect()
    }

    /// The child of the end of `path` to which the walk of `stream` goes on; `position` is that child's.
    pub(in super::super) fn next(
        &self,
        stream: u64,
        tree: &CandidateTree,
        path: &[usize],
        position: usize,
    ) -> Option<usize> {
        let last = *path.last()?;
        let on_spine = path.iter().all(|&node| tree.ranks()[node] == 0);
        let rank = self.rank(stream, position, path.len(), on_spine)?;
        let carries = |&node: &usize| tree.tree().parent(node) == Some(last) && tree.ranks()[node] == rank;
        (last + 1..tree.tokens().len()).find(carries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{BuildOptions, chain_from, ddtree_from};

    const HORIZON: usize = 15;
    const VOCAB: usize = 40;

    /// Flat marginals, as a random drafter's, with the model's probabilities.
    fn drafted(model: &SyntheticAcceptance, budget: usize) -> (Marginals, BuildOptions) {
        let options = BuildOptions { budget, ..BuildOptions::default() };
        let logits: Vec<f32> = (0..HORIZON * VOCAB).map(|i| (i * 7919 % 997) as f32 * 1e-3).collect();
        (model.marginals(&Marginals::from_logits(&logits, VOCAB, options).unwrap()), options)
    }

    /// Mean acceptance length of `rounds` walks, each at new positions.
    fn measured(model: &SyntheticAcceptance, tree: &CandidateTree, rounds: usize, stream: u64) -> f64 {
        let (mut start, mut tokens) = (100, 0);
        for _ in 0..rounds {
            let mut path = vec![0];
            while let Some(next) = model.next(stream, tree, &path, start + path.len()) {
                path.push(next);
            }
            (start, tokens) = (start + path.len(), tokens + path.len());
        }
        tokens as f64 / rounds as f64
    }

    #[test]
    fn a_chain_has_the_stated_mean() {
        for length in [1.0, 2.0, 4.3, 6.5, 12.0, 16.0] {
            let model = SyntheticAcceptance::from_length(length, HORIZON).unwrap();
            assert!((model.chain_length(HORIZON) - length).abs() < 1e-6, "{length}");
            let (marginals, options) = drafted(&model, HORIZON);
            let chain = chain_from(&marginals, 0, options).unwrap();
            assert!((model.tree_length(&chain) - length).abs() < 1e-6, "{length}");
            let got = measured(&model, &chain, 20_000, 3);
            // Five standard errors of a mean whose values lie in 1 to 16.
            assert!((got - length).abs() < 0.2, "{length}: {got}");
        }
    }

    #[test]
    fn a_tree_has_the_mean_of_its_nodes_and_at_least_its_chains() {
        for curve in [vec![0.9, 0.8, 0.7, 0.6, 0.5], vec![0.4], vec![0.87]] {
            for off_spine in [0.3, 1.0] {
                let model = SyntheticAcceptance::from_curve(curve.clone()).unwrap();
                let model = model.with_siblings(vec![0.4, 0.2], off_spine).unwrap();
                let (marginals, options) = drafted(&model, 63);
                let tree = ddtree_from(&marginals, 0, options).unwrap();
                let (stated, got) = (model.tree_length(&tree), measured(&model, &tree, 20_000, 0));
                assert!((got - stated).abs() < 0.2, "{curve:?} {off_spine}: {got}, stated {stated}");
                let depth = tree.tree().max_depth();
                assert!(stated > model.chain_length(depth), "{curve:?} {off_spine}: {stated}");
            }
        }
    }

    #[test]
    fn chain_and_tree_meet_the_same_target() {
        let model = SyntheticAcceptance::from_length(4.0, HORIZON).unwrap();
        let (marginals, options) = drafted(&model, 63);
        let (tree, chain) =
            (ddtree_from(&marginals, 0, options).unwrap(), chain_from(&marginals, 0, options).unwrap());
        let spine_nodes = 1 + tree
            .tree()
            .depths()
            .iter()
            .enumerate()
            .filter(|&(node, &depth)| {
                depth > 0 && tree.tree().path(node).iter().all(|&above| tree.ranks()[above] == 0)
            })
            .count();
        let mut siblings = 0;
        for start in (0..40_000).step_by(20) {
            let walk = |tree: &CandidateTree| {
                let mut path = vec![0];
                while let Some(next) = model.next(7, tree, &path, start + path.len()) {
                    path.push(next);
                }
                path.iter().map(|&node| tree.ranks()[node]).collect::<Vec<_>>()
            };
            let (through_tree, through_chain) = (walk(&tree), walk(&chain));
            let spine = through_tree.iter().take_while(|&&rank| rank == 0).count();
            assert_eq!(spine, through_chain.len().min(spine_nodes));
            siblings += usize::from(spine < through_tree.len());
        }
        assert!(siblings > 200, "{siblings}");
    }

    #[test]
    fn seeds_repeat_and_differ() {
        let model = SyntheticAcceptance::from_length(6.5, HORIZON).unwrap();
        let (marginals, options) = drafted(&model, HORIZON);
        let chain = chain_from(&marginals, 0, options).unwrap();
        let mean = |model: &SyntheticAcceptance, stream| measured(model, &chain, 300, stream).to_bits();
        assert_eq!(mean(&model, 1), mean(&model, 1));
        assert_ne!(mean(&model, 1), mean(&model, 2));
        assert_ne!(mean(&model, 1), mean(&model.clone().with_seed(5), 1));
    }

    #[test]
    fn impossible_models_are_refused() {
        for curve in [vec![], vec![1.1], vec![0.5, -0.1], vec![f64::NAN]] {
            assert!(SyntheticAcceptance::from_curve(curve).is_err());
        }
        for length in [0.9, 16.1, f64::NAN] {
            assert!(SyntheticAcceptance::from_length(length, HORIZON).is_err());
        }
        let model = SyntheticAcceptance::from_curve(vec![0.5]).unwrap();
        assert!(model.clone().with_siblings(vec![0.6, 0.5], 1.0).is_err());
        assert!(model.with_siblings(vec![0.6], 1.5).is_err());
    }
}
