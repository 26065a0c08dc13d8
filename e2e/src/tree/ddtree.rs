//! The best-first builder of DDTree (arXiv 2604.12989, algorithm 1) over a drafter's marginals, and the plain chain.

use canopy_kernels::DraftTree;
use canopy_kernels::tree_build::best_first;

use super::{BuildOptions, CandidateTree, Marginals};
use crate::Result;

/// The `options.budget` most probable prefixes as a tree under `root`. Its joint log-probs are f64 sums of the
/// marginals' in path order, and fall or stay equal from node to node.
///
/// # Errors
/// When the budget is beyond a draft tree's limit.
pub fn ddtree_from(marginals: &Marginals, root: u32, options: BuildOptions) -> Result<CandidateTree> {
    ddtree_above((f64::NEG_INFINITY, 0.0), marginals, root, options)
}

/// The beginning of [`ddtree_from`] whose nodes' joint log-probs are at least `least`, when a node with another than a depth's best token
/// before it in its path is less probable by the factor e^`behind`, at most 1.
///
/// # Errors
/// When the budget is beyond a draft tree's limit.
pub fn ddtree_above(
    (least, behind): (f64, f64),
    marginals: &Marginals,
    root: u32,
    options: BuildOptions,
) -> Result<CandidateTree> {
    let behind = behind.min(0.0);
    let log_prob = |depth: usize, rank: usize, on_spine: bool| {
        let candidates = marginals.depth(depth);
        let &(_, log_prob) = candidates[..candidates.len().min(options.top_k)].get(rank)?;
        Some(if on_spine { log_prob } else { log_prob + behind })
    };
    let taken = best_first(options.budget.min(DraftTree::MAX_NODES), least, log_prob);
    let candidate = |(&depth, &rank): (&usize, &u32)| {
        marginals.depth(depth).get(rank as usize).copied().unwrap_or_default()
    };
    let named = taken.depths().iter().zip(&taken.ranks).skip(1).map(candidate);
    let (tokens, log_probs) = std::iter::once((root, 0.0)).chain(named).unzip();
    Ok(CandidateTree {
        tokens,
        log_probs,
        tree: DraftTree::new(taken.parents)?,
        ranks: taken.ranks,
        joint: taken.joint,
    })
}

/// The chain of every depth's best token, at most `options.budget` of them.
///
/// # Errors
/// When the budget is beyond a draft tree's limit.
pub fn chain_from(marginals: &Marginals, root: u32, options: BuildOptions) -> Result<CandidateTree> {
    let depths = options.budget.min(if options.top_k == 0 { 0 } else { marginals.horizon() });
    let best = (1..=depths).map_while(|depth| marginals.depth(depth).first().copied());
    let (tokens, log_probs): (Vec<u32>, Vec<f64>) = std::iter::once((root, 0.0)).chain(best).unzip();
    let sum = |joint: &mut f64, &log_prob: &f64| {
        *joint += log_prob;
        Some(*joint)
    };
    Ok(CandidateTree {
        tree: DraftTree::chain(tokens.len())?,
        ranks: vec![0; tokens.len()],
        joint: log_probs.iter().scan(0.0, sum).collect(),
        tokens,
        log_probs,
    })
}

/// [`ddtree_from`] over logits `[horizon, vocab]`; no logits, or a budget or `top_k` of 0, give the root alone.
///
/// # Errors
/// Those of [`Marginals::from_logits`].
pub fn build_ddtree(logits: &[f32], vocab: usize, root: u32, options: BuildOptions) -> Result<CandidateTree> {
    ddtree_from(&Marginals::from_logits(logits, vocab, options)?, root, options)
}

/// [`chain_from`] over logits `[horizon, vocab]`.
///
/// # Errors
/// Those of [`Marginals::from_logits`].
pub fn build_chain(logits: &[f32], vocab: usize, root: u32, budget: usize) -> Result<CandidateTree> {
    let options = BuildOptions { budget, top_k: 1 };
    chain_from(&Marginals::from_logits(logits, vocab, options)?, root, options)
}
