//! Named tree shapes: for tests, examples and benches.

use super::DraftTree;
use crate::error::{Error, Result};

/// A small seeded generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so
/// that a seed names the same tree in every build.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator from a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; `bound` is at least 1.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Uniform in (0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
}

fn value<T>(op: &'static str, arg: &'static str, expected: impl Into<String>, got: usize) -> Result<T> {
    Err(Error::Value { op, arg, expected: expected.into(), got: got.to_string() })
}

impl DraftTree {
    /// A chain of `nodes` nodes: plain decode for 1, a prefill chunk or a drafted block for more.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn chain(nodes: usize) -> Result<Self> {
        if nodes > Self::MAX_NODES {
            return Err(Error::TooManyNodes { nodes, max: Self::MAX_NODES });
        }
        Self::new((0..nodes as i32).map(|i| i - 1).collect())
    }

    /// Every node down to `depth - 1` has `k` children; nodes in level order.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// assert_eq!(DraftTree::balanced(2, 2)?.parents(), [-1, 0, 0, 1, 1, 2, 2]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for `k` = 0, [`Error::TooManyNodes`] when the tree would not fit.
    pub fn balanced(k: usize, depth: usize) -> Result<Self> {
        if k == 0 {
            return value("balanced tree", "k", "at least 1", k);
        }
        let mut parents = vec![-1];
        let mut level = 0..1;
        for _ in 0..depth {
            let nodes = level.len().saturating_mul(k).saturating_add(parents.len());
            if nodes > Self::MAX_NODES {
                return Err(Error::TooManyNodes { nodes, max: Self::MAX_NODES });
            }
            let first = parents.len();
            parents.extend(level.flat_map(|node| std::iter::repeat_n(node as i32, k)));
            level = first..nodes;
        }
        Self::new(parents)
    }

    /// A spine down to `depth` whose every node has `k` children, of which only the first goes on: `1 + k depth`
    /// nodes in level order.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// assert_eq!(DraftTree::skewed(3, 2)?.parents(), [-1, 0, 0, 0, 1, 1, 1]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for `k` = 0, [`Error::TooManyNodes`] when the tree would not fit.
    pub fn skewed(k: usize, depth: usize) -> Result<Self> {
        if k == 0 {
            return value("skewed tree", "k", "at least 1", k);
        }
        let nodes = k.saturating_mul(depth).saturating_add(1);
        if nodes > Self::MAX_NODES {
            return Err(Error::TooManyNodes { nodes, max: Self::MAX_NODES });
        }
        let spine = |level: usize| if level == 0 { 0 } else { (level - 1) * k + 1 };
        let children = (0..depth).flat_map(|level| std::iter::repeat_n(spine(level) as i32, k));
        Self::new(std::iter::once(-1).chain(children).collect())
    }

    /// A spine down to `depth`, at whose end all other nodes are siblings: of all trees of `nodes` nodes that are no deeper the one whose root
    /// paths are longest. With no more than `depth` nodes a chain.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// assert_eq!(DraftTree::broom(5, 2)?.parents(), [-1, 0, 1, 1, 1]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for `depth` = 0; those of [`Self::new`] on the number of nodes.
    pub fn broom(nodes: usize, depth: usize) -> Result<Self> {
        if depth == 0 {
            return value("broom", "depth", "at least 1", depth);
        }
        if nodes > Self::MAX_NODES {
            return Err(Error::TooManyNodes { nodes, max: Self::MAX_NODES });
        }
        Self::new((0..nodes).map(|node| node.min(depth) as i32 - 1).collect())
    }

    /// `nodes` nodes, every parent uniform among the nodes before its child.
    ///
    /// # Errors
    /// Those of [`Self::new`] on the number of nodes.
    pub fn random(nodes: usize, seed: u64) -> Result<Self> {
        if nodes > Self::MAX_NODES {
            return Err(Error::TooManyNodes { nodes, max: Self::MAX_NODES });
        }
        let mut random = SplitMix64::new(seed);
        Self::new((0..nodes).map(|i| if i == 0 { -1 } else { random.below(i) as i32 }).collect())
    }

    /// Deepest node of [`Self::bole`]'s trees.
    pub const BOLE_DEPTH: usize = 8;
    /// Children per node of [`Self::bole`]'s trees before pruning.
    pub const BOLE_TOP_K: usize = 4;

    /// A tree of the kind that Bole (arXiv 2608.01651) measures: top-4 candidates down to depth 8, pruned to the
    /// `nodes` likeliest (root included), whose candidate probabilities are drawn from `seed`.
    ///
    /// # Errors
    /// [`Error::Value`] when `nodes` is outside 8..=256.
    pub fn bole(nodes: usize, seed: u64) -> Result<Self> {
        if !(8..=Self::MAX_NODES).contains(&nodes) {
            return value("bole tree", "nodes", "8 to 256", nodes);
        }
        best_first(vec![-1], Limits { nodes, k: Self::BOLE_TOP_K, depth: Self::BOLE_DEPTH }, seed)
    }

    /// A tree of the kind that SpecLA (arXiv 2607.16673) measures: top-`k` (2 or 4) candidates down to `depth`
    /// (4, 12 or 24), `nodes` nodes (16 or 32, root included). A likeliest chain reaches down to `depth`, or as
    /// deep as `nodes` allows; the other nodes are the likeliest ones, with probabilities drawn from `seed`.
    ///
    /// # Errors
    /// [`Error::Value`] for other sizes, and for top-2 to depth 4 with 32 nodes: such a tree ends at 31.
    pub fn specla(k: usize, depth: usize, nodes: usize, seed: u64) -> Result<Self> {
        const OP: &str = "specla tree";
        if k != 2 && k != 4 {
            return value(OP, "k", "2 or 4", k);
        }
        if ![4, 12, 24].contains(&depth) {
            return value(OP, "depth", "4, 12 or 24", depth);
        }
        if nodes != 16 && nodes != 32 {
            return value(OP, "nodes", "16 or 32", nodes);
        }
        if (k, depth, nodes) == (2, 4, 32) {
            return value(OP, "nodes", "16 for top-2 to depth 4, which ends at 31", nodes);
        }
        let spine = depth.min(nodes - 1) as i32;
        best_first((-1..spine).collect(), Limits { nodes, k, depth }, seed)
    }
}

struct Limits {
    nodes: usize,
    k: usize,
    depth: usize,
}

struct Candidate {
    parent: usize,
    depth: usize,
    log_prob: f64,
}

/// Grows a tree, given its spine, by the likeliest open candidate until it has `limits.nodes` nodes.
fn best_first(mut parents: Vec<i32>, limits: Limits, seed: u64) -> Result<DraftTree> {
    let mut random = SplitMix64::new(seed);
    let mut open: Vec<Candidate> = Vec::new();
    let mut expand = |open: &mut Vec<Candidate>, parent, depth, log_prob: f64, from: usize| {
        // Geometric-like conditional probabilities: what a trained drafter's sorted candidates look like.
        let (mut rest, keep) = (1.0f64, 0.4 + 0.5 * random.unit());
        for rank in 0..limits.k {
            let share = rest * keep;
            rest -= share;
            if rank >= from && depth < limits.depth {
                open.push(Candidate { parent, depth: depth + 1, log_prob: log_prob + share.ln() });
            }
        }
        log_prob + keep.ln()
    };
    let mut log_prob = 0.0;
    let spine = parents.len();
    for node in 0..spine {
        let from = usize::from(node + 1 < spine);
        log_prob = expand(&mut open, node, node, log_prob, from);
    }
    while parents.len() < limits.nodes {
        let better = |a: &usize, b: &usize| open[*a].log_prob.total_cmp(&open[*b].log_prob).then(b.cmp(a));
        let Some(best) = (0..open.len()).max_by(better) else { break };
        let Candidate { parent, depth, log_prob } = open.remove(best);
        parents.push(parent as i32);
        expand(&mut open, parents.len() - 1, depth, log_prob, 0);
    }
    DraftTree::new(parents)
}
