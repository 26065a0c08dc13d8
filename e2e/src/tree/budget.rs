//! Choosing a node budget after the drafter has spoken.
//!
//! A best-first tree's nodes come in falling order of joint probability and every prefix of that order is a tree,
//! so `auto` may build once with its largest budget, look at the probabilities and keep a prefix
//! ([`CandidateTree::truncate`]).

use super::CandidateTree;

/// Expected tokens of a round for every budget `0..=tree.budget()`: the bonus token plus each kept node's joint
/// probability, which is the drafter's own chance that the node is accepted. `trust` scales the probability of
/// a node by its depth (depth d by `trust[d - 1]`, beyond its end by its last entry, 1 when empty), for drafters
/// whose deep guesses hold less often than they claim.
pub fn expected_tokens(tree: &CandidateTree, trust: &[f64]) -> Vec<f64> {
    let mut expected = vec![1.0];
    for (node, &joint) in tree.joint_log_probs().iter().enumerate().skip(1) {
        let depth = tree.tree().depths()[node] as usize;
        let trust = trust.get(depth - 1).or(trust.last()).copied().unwrap_or(1.0);
        expected.push(expected[node - 1] + trust * joint.exp());
    }
    expected
}

/// The budget with the most expected tokens per unit of `cost`, the smaller one on a tie. `expected[n]` belongs
/// to budget n, `cost(n)` is a whole round's cost with n drafted nodes. Budgets whose cost is not positive and
/// finite, or whose expectation is not finite, are passed over; 0 when none is left.
pub fn best_budget(expected: &[f64], cost: impl Fn(usize) -> f64) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (budget, &tokens) in expected.iter().enumerate() {
        let cost = cost(budget);
        let rate = tokens / cost;
        if cost > 0.0 && cost.is_finite() && rate.is_finite() && rate > best.1 {
            best = (budget, rate);
        }
    }
    best.0
}
