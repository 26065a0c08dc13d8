//! What a node budget is worth, known after the drafter has spoken.
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
