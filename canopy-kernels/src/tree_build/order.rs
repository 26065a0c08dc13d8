//! The order in which the nodes of the most probable tree are taken.

use super::heap::Heap;

/// A tree's nodes in the order in which they were taken; node 0 is the root.
#[derive(Clone, Debug, PartialEq)]
pub struct BestFirst {
    /// -1 for the root.
    pub parents: Vec<i32>,
    /// Each node's place in its depth's order of candidates; 0 for the root.
    pub ranks: Vec<u32>,
    /// The f64 sums of the log-probabilities in path order; 0 for the root.
    pub joint: Vec<f64>,
    depths: Vec<usize>,
    /// Whether the path to a node has best candidates only.
    on_spine: Vec<bool>,
}

/// A candidate whose parent is taken.
#[derive(Debug)]
struct Entry {
    joint: f64,
    parent: usize,
    rank: u32,
}

impl Entry {
    /// Higher joint log-probability first; equal ones by the tuple of ranks along the path.
    fn before(&self, other: &Self, taken: &BestFirst) -> bool {
        if self.joint != other.joint {
            return self.joint > other.joint;
        }
        taken.rank_path(self.parent, self.rank) < taken.rank_path(other.parent, other.rank)
    }
}

impl BestFirst {
    fn push(&mut self, entry: &Entry) -> usize {
        self.parents.push(entry.parent as i32);
        self.ranks.push(entry.rank);
        self.joint.push(entry.joint);
        self.depths.push(self.depths[entry.parent] + 1);
        self.on_spine.push(entry.rank == 0 && self.on_spine[entry.parent]);
        self.parents.len() - 1
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

    /// Each node's depth.
    pub fn depths(&self) -> &[usize] {
        &self.depths
    }
}

/// The `budget` most probable prefixes, fewer where there are no more, in falling order of their joint log-probabilities, those below
/// `least` left out. `log_prob(depth, rank, on_spine)` is the log-probability, at most 0, of the candidate of `rank` at `depth` (from 1), of
/// which `on_spine` says whether the path before it has best candidates only; it may not rise with the rank, and is `None` behind the last
/// candidate.
///
/// ```
/// use canopy_kernels::tree_build::best_first;
/// let log_probs = [[-0.1f64, -2.5], [-0.5, -1.0]];
/// let candidate = |depth: usize, rank: usize, _| log_probs.get(depth - 1)?.get(rank).copied();
/// let tree = best_first(4, f64::NEG_INFINITY, candidate);
/// assert_eq!((tree.parents, tree.ranks), (vec![-1, 0, 1, 1, 0], vec![0, 0, 0, 1, 1]));
/// ```
pub fn best_first(
    budget: usize,
    least: f64,
    log_prob: impl Fn(usize, usize, bool) -> Option<f64>,
) -> BestFirst {
    let mut taken = BestFirst {
        parents: vec![-1],
        ranks: vec![0],
        joint: vec![0.0],
        depths: vec![0],
        on_spine: vec![true],
    };
    let mut heap = Heap::new();
    let entry = |taken: &BestFirst, parent: usize, rank: u32| {
        let log_prob = log_prob(taken.depths[parent] + 1, rank as usize, taken.on_spine[parent])?;
        // The parent's sum plus one log-prob: rounding keeps the order of siblings and of generations.
        let joint = taken.joint[parent] + log_prob;
        // What comes below or after an entry is no more probable.
        (joint >= least).then_some(Entry { joint, parent, rank })
    };
    if let Some(first) = entry(&taken, 0, 0) {
        heap.push(first, |_, _| false);
    }
    while taken.parents.len() <= budget {
        let Some(best) = heap.pop(|a: &Entry, b: &Entry| a.before(b, &taken)) else { break };
        let node = taken.push(&best);
        let sibling = entry(&taken, best.parent, best.rank + 1);
        let child = entry(&taken, node, 0);
        for next in [sibling, child].into_iter().flatten() {
            heap.push(next, |a, b| a.before(b, &taken));
        }
    }
    taken
}
