//! The best-first builder of DDTree (arXiv 2604.12989, algorithm 1) and the plain chain.
//!
//! Under the drafter's product of marginals the most probable set of `budget` prefixes is found by taking, again
//! and again, the best entry of a heap that holds every taken node's next sibling and first child.

use canopy_kernels::DraftTree;

use super::heap::Heap;
use super::{BuildOptions, CandidateTree, Marginals};
use crate::Result;

/// The nodes taken so far.
struct Taken {
    parents: Vec<i32>,
    tokens: Vec<u32>,
    ranks: Vec<u32>,
    joint: Vec<f64>,
    log_probs: Vec<f64>,
    /// Whether the path to a node has best tokens only.
    on_spine: Vec<bool>,
}

impl Taken {
    fn new(root: u32, nodes: usize) -> Self {
        let mut taken = Self {
            parents: Vec::with_capacity(nodes),
            tokens: Vec::with_capacity(nodes),
            ranks: Vec::with_capacity(nodes),
            joint: Vec::with_capacity(nodes),
            log_probs: Vec::with_capacity(nodes),
            on_spine: Vec::with_capacity(nodes),
        };
        taken.push(-1, 0, (root, 0.0), 0.0);
        taken
    }

    fn push(&mut self, parent: i32, rank: u32, candidate: (u32, f64), joint: f64) -> usize {
        self.parents.push(parent);
        self.tokens.push(candidate.0);
        self.ranks.push(rank);
        self.joint.push(joint);
        self.log_probs.push(candidate.1);
        let behind_best = usize::try_from(parent).map_or(true, |parent| self.on_spine[parent]);
        self.on_spine.push(rank == 0 && behind_best);
        self.tokens.len() - 1
    }

    /// The ranks along the path of a child of `parent`, root left out.
    fn rank_path(&self, parent: usize, rank: u32) -> Vec<u32> {
        let mut path = vec![rank];
        let mut node = parent;
        while node > 0 {
            path.push(self.ranks[node]);
            node = self.parents[node] as usize;
        }
        path.reverse();
        path
    }

    fn finish(self) -> Result<CandidateTree> {
        Ok(CandidateTree {
            tree: DraftTree::new(self.parents)?,
            tokens: self.tokens,
            ranks: self.ranks,
            joint: self.joint,
            log_probs: self.log_probs,
        })
    }
}

/// A candidate whose parent is taken.
#[derive(Debug)]
struct Entry {
    joint: f64,
    parent: usize,
    depth: usize,
    rank: u32,
}

impl Entry {
    /// Higher joint log-prob first; equal ones by the tuple of ranks along the path.
    fn before(&self, other: &Self, taken: &Taken) -> bool {
        if self.joint != other.joint {
            return self.joint > other.joint;
        }
        taken.rank_path(self.parent, self.rank) < taken.rank_path(other.parent, other.rank)
    }
}

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
    let mut taken = Taken::new(root, options.budget.min(DraftTree::MAX_NODES) + 1);
    let mut heap = Heap::new();
    let entry = |taken: &Taken, parent: usize, depth: usize, rank: u32| {
        let candidates = marginals.depth(depth);
        let candidates = &candidates[..candidates.len().min(options.top_k)];
        let entry = candidates.get(rank as usize).map(|&(_, log_prob)| {
            // The parent's sum plus one log-prob: rounding keeps the order of siblings and of generations.
            let log_prob = if taken.on_spine[parent] { log_prob } else { log_prob + behind };
            Entry { joint: taken.joint[parent] + log_prob, parent, depth, rank }
        });
        // What comes below or after an entry is no more probable.
        entry.filter(|entry| entry.joint >= least)
    };
    if let Some(first) = entry(&taken, 0, 1, 0) {
        heap.push(first, |_, _| false);
    }
    while taken.tokens.len() <= options.budget {
        let Some(best) = heap.pop(|a: &Entry, b: &Entry| a.before(b, &taken)) else { break };
        let candidate = marginals.depth(best.depth)[best.rank as usize];
        let node = taken.push(best.parent as i32, best.rank, candidate, best.joint);
        let sibling = entry(&taken, best.parent, best.depth, best.rank + 1);
        let child = entry(&taken, node, best.depth + 1, 0);
        for next in [sibling, child].into_iter().flatten() {
            heap.push(next, |a, b| a.before(b, &taken));
        }
    }
    taken.finish()
}

/// The chain of every depth's best token, at most `options.budget` of them.
///
/// # Errors
/// When the budget is beyond a draft tree's limit.
pub fn chain_from(marginals: &Marginals, root: u32, options: BuildOptions) -> Result<CandidateTree> {
    let mut taken = Taken::new(root, marginals.horizon().min(options.budget) + 1);
    let depths = options.budget.min(if options.top_k == 0 { 0 } else { marginals.horizon() });
    for depth in 1..=depths {
        let Some(&candidate) = marginals.depth(depth).first() else { break };
        let joint = taken.joint[depth - 1] + candidate.1;
        taken.push(depth as i32 - 1, 0, candidate, joint);
    }
    taken.finish()
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
