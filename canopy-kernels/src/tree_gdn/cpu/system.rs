//! The unit lower triangular system of a tree, `(I + G) X = R`, and the seven ways to solve it.
//!
//! Row `i` of G holds one coefficient per strict ancestor of node `i`, from the root down, and nothing else: a zero
//! coefficient never multiplies another branch's value. Forward, Blocked, Level and Chains subtract a row's terms
//! in the same order, from the root down, so their bits agree.

use crate::DraftTree;
use crate::numeric::{LANES, Lanes, Real, Simd};
use crate::tree_gdn::Solve;

/// The strict ancestors of every node, from the root down: entry `a` is the ancestor at depth `a`.
#[derive(Clone, Debug)]
pub(in crate::tree_gdn) struct Ancestors {
    starts: Vec<usize>,
    nodes: Vec<usize>,
}

impl Ancestors {
    pub(in crate::tree_gdn) fn new(tree: &DraftTree) -> Self {
        let (mut starts, mut nodes) = (vec![0], Vec::new());
        for node in 0..tree.len() {
            if let Some(parent) = tree.parent(node) {
                nodes.extend_from_within(starts[parent]..starts[parent + 1]);
                nodes.push(parent);
            }
            starts.push(nodes.len());
        }
        Self { starts, nodes }
    }

    /// One node's ancestors.
    pub(in crate::tree_gdn) fn of(&self, node: usize) -> &[usize] {
        &self.nodes[self.range(node)]
    }

    /// Where a node's coefficients lie.
    pub(in crate::tree_gdn) fn range(&self, node: usize) -> std::ops::Range<usize> {
        self.starts[node]..self.starts[node + 1]
    }

    /// Coefficients of the whole tree: the sum of its depths.
    pub(in crate::tree_gdn) fn len(&self) -> usize {
        self.nodes.len()
    }
}

/// `out += sum of factor * row` over the terms, in their order, each element rounded once per term.
#[inline(always)]
pub(super) fn add_rows<S: Simd, T: Real>(out: &mut [T], terms: &[(T, &[T])]) {
    const TILE: usize = 8;
    let width = out.len();
    let whole = width / (TILE * LANES) * (TILE * LANES);
    let (tiles, rest) = out.split_at_mut(whole);
    for (t, tile) in tiles.as_chunks_mut::<LANES>().0.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
        let mut sums: [T::Lanes<S>; TILE] = std::array::from_fn(|i| Lanes::load(&tile[i]));
        for (factor, row) in terms {
            let factor = T::Lanes::<S>::splat(*factor);
            let row = &row[t * TILE * LANES..(t + 1) * TILE * LANES].as_chunks::<LANES>().0;
            for (sum, x) in sums.iter_mut().zip(row.iter()) {
                *sum = T::Lanes::<S>::load(x).fma(factor, *sum);
            }
        }
        for (sum, out) in sums.into_iter().zip(tile) {
            sum.store(out);
        }
    }
    for (factor, row) in terms {
        for (out, &x) in rest.iter_mut().zip(&row[whole..width]) {
            *out = x.fma(*factor, *out);
        }
    }
}

/// The system of one value head.
pub(in crate::tree_gdn) struct TriangularSystem<'a, T> {
    pub(in crate::tree_gdn) tree: &'a DraftTree,
    pub(in crate::tree_gdn) ancestors: &'a Ancestors,
    /// G, laid out as [`Ancestors::range`] says.
    pub(in crate::tree_gdn) g: &'a [T],
}

impl<T: Real> TriangularSystem<'_, T> {
    /// Solves in place: `x` `[nodes, width]` holds R and receives X.
    #[inline(always)]
    pub(in crate::tree_gdn) fn solve<S: Simd>(&self, solve: Solve, x: &mut [T]) {
        match solve {
            Solve::Dense => self.dense::<S>(x),
            Solve::Forward => self.blocked::<S>(self.tree.len(), x),
            Solve::Blocked(tile) => self.blocked::<S>(tile, x),
            Solve::Neumann => self.neumann::<S>(x),
            Solve::Squaring => self.squaring::<S>(x),
            Solve::Level => self.level(x),
            Solve::Chains => self.chains::<S>(x),
        }
    }

    /// `x_node -= sum of G x` over the node's ancestors at the given depths.
    #[inline(always)]
    fn subtract<S: Simd>(&self, node: usize, depths: std::ops::Range<usize>, x: &mut [T]) {
        let width = x.len() / self.tree.len();
        let (before, own) = x.split_at_mut(node * width);
        let ancestors = self.ancestors.of(node)[depths.clone()].iter();
        let g = &self.g[self.ancestors.range(node)][depths];
        let terms: Vec<(T, &[T])> =
            ancestors.zip(g).map(|(&at, &g)| (-g, &before[at * width..][..width])).collect();
        add_rows::<S, T>(&mut own[..width], &terms);
    }

    /// Tiles of nodes in order: first the products with the solved tiles, then substitution inside the tile.
    #[inline(always)]
    fn blocked<S: Simd>(&self, tile: usize, x: &mut [T]) {
        let nodes = self.tree.len();
        for first in (0..nodes).step_by(tile) {
            let end = (first + tile).min(nodes);
            let split = |node: usize| self.ancestors.of(node).partition_point(|&at| at < first);
            for solved in (0..first).step_by(tile) {
                for node in first..end {
                    let at = |limit: usize| self.ancestors.of(node).partition_point(|&at| at < limit);
                    let depths = at(solved)..at(solved + tile);
                    if !depths.is_empty() {
                        self.subtract::<S>(node, depths, x);
                    }
                }
            }
            for node in first..end {
                self.subtract::<S>(node, split(node)..self.tree.depths()[node] as usize, x);
            }
        }
    }

    /// Level by level, looking down: a solved node is taken off all its descendants.
    #[inline(always)]
    fn level(&self, x: &mut [T]) {
        let width = x.len() / self.tree.len();
        for depth in 0..self.tree.max_depth() {
            for node in 0..self.tree.len() {
                let Some(&ancestor) = self.ancestors.of(node).get(depth) else { continue };
                let g = self.g[self.ancestors.range(node)][depth];
                let (before, own) = x.split_at_mut(node * width);
                for (out, &x) in own[..width].iter_mut().zip(&before[ancestor * width..]) {
                    *out = x.fma(-g, *out);
                }
            }
        }
    }

    /// Heavy chains in dependency order: what lies above the chain's top first, then down the chain.
    #[inline(always)]
    fn chains<S: Simd>(&self, x: &mut [T]) {
        for chain in self.tree.heavy_chains().chains() {
            let above = self.tree.depths()[chain[0]] as usize;
            for &node in chain {
                self.subtract::<S>(node, 0..above, x);
            }
            for &node in chain {
                self.subtract::<S>(node, above..self.tree.depths()[node] as usize, x);
            }
        }
    }

    /// `X = R - G R + G^2 R - ...`, one more term per level of depth.
    #[inline(always)]
    fn neumann<S: Simd>(&self, x: &mut [T]) {
        let width = x.len() / self.tree.len();
        let (mut term, mut next) = (x.to_vec(), vec![T::ZERO; x.len()]);
        for power in 1..=self.tree.max_depth() {
            for node in 0..self.tree.len() {
                // The term before is zero above depth `power - 1`.
                let depths = power - 1..self.tree.depths()[node] as usize;
                if depths.is_empty() {
                    continue;
                }
                let g = &self.g[self.ancestors.range(node)][depths.clone()];
                let ancestors = self.ancestors.of(node)[depths].iter();
                let terms: Vec<(T, &[T])> =
                    ancestors.zip(g).map(|(&at, &g)| (-g, &term[at * width..][..width])).collect();
                let out = &mut next[node * width..][..width];
                out.fill(T::ZERO);
                add_rows::<S, T>(out, &terms);
                for (x, &out) in x[node * width..].iter_mut().zip(&*out) {
                    *x += out;
                }
            }
            std::mem::swap(&mut term, &mut next);
        }
    }

    /// `X = ... (I + G^4)(I + G^2)(I - G) R`.
    #[inline(always)]
    fn squaring<S: Simd>(&self, x: &mut [T]) {
        let width = x.len() / self.tree.len();
        let mut power: Vec<T> = self.g.iter().map(|&g| -g).collect();
        let mut exponent = 1;
        while exponent <= self.tree.max_depth() {
            if exponent > 1 {
                power = self.product(&power, &power);
            }
            // From the last node up, so that a row still finds its ancestors as they were.
            for node in (0..self.tree.len()).rev() {
                let Some(reach) = (self.tree.depths()[node] as usize + 1).checked_sub(exponent) else {
                    continue;
                };
                let (before, own) = x.split_at_mut(node * width);
                let factors = &power[self.ancestors.range(node)][..reach];
                let ancestors = self.ancestors.of(node).iter();
                let terms: Vec<(T, &[T])> =
                    ancestors.zip(factors).map(|(&at, &p)| (p, &before[at * width..][..width])).collect();
                add_rows::<S, T>(&mut own[..width], &terms);
            }
            exponent *= 2;
        }
    }

    /// The product of two strictly lower matrices of this tree.
    pub(in crate::tree_gdn) fn product(&self, left: &[T], right: &[T]) -> Vec<T> {
        let mut out = vec![T::ZERO; left.len()];
        for node in 0..self.tree.len() {
            let row = self.ancestors.range(node);
            for (depth, &middle) in self.ancestors.of(node).iter().enumerate() {
                let factor = left[row.start + depth];
                for (out, &x) in out[row.clone()].iter_mut().zip(&right[self.ancestors.range(middle)]) {
                    *out = x.fma(factor, *out);
                }
            }
        }
        out
    }

    /// Inverts `I + G` by elimination, then multiplies.
    #[inline(always)]
    fn dense<S: Simd>(&self, x: &mut [T]) {
        let nodes = self.tree.len();
        let width = x.len() / nodes;
        let mut inverse = vec![T::ZERO; nodes * nodes];
        for node in 0..nodes {
            inverse[node * nodes + node] = T::ONE;
        }
        for pivot in 0..nodes {
            let depth = self.tree.depths()[pivot] as usize;
            for node in pivot + 1..nodes {
                if self.ancestors.of(node).get(depth) != Some(&pivot) {
                    continue;
                }
                let factor = self.g[self.ancestors.range(node)][depth];
                let (before, own) = inverse.split_at_mut(node * nodes);
                for (out, &p) in own[..=pivot].iter_mut().zip(&before[pivot * nodes..]) {
                    *out = p.fma(-factor, *out);
                }
            }
        }
        // From the last node up: the right side of a node's ancestors is still there.
        for node in (0..nodes).rev() {
            let (before, own) = x.split_at_mut(node * width);
            let ancestors = self.ancestors.of(node).iter();
            let terms: Vec<(T, &[T])> =
                ancestors.map(|&at| (inverse[node * nodes + at], &before[at * width..][..width])).collect();
            add_rows::<S, T>(&mut own[..width], &terms);
        }
    }
}
