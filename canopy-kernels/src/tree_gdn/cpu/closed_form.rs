//! The tree closed form: one triangular solve for all nodes.

use super::system::{Ancestors, TriangularSystem, add_rows};
use super::{Head, HeadCommit, gate};
use crate::numeric::{Real, Simd, row_dots};
use crate::tree_gdn::Solve;

/// Rows of the state that meet all keys and queries while they are in the first-level cache.
const ROWS: usize = 20;

/// The coefficients of one value head, without beta: one per node and strict ancestor, as [`Ancestors`] lays them.
struct Couplings<T> {
    /// `exp(sum of g) (k_i . k_j)`.
    keys: Vec<T>,
    /// `exp(sum of g) (q_i . k_j)`.
    queries: Vec<T>,
}

/// One value head of one tree: fills `u` and `o`, both `[nodes][Dv]`.
#[inline(always)]
pub(super) fn verify<S: Simd, T: Real>(
    head: Head<'_, T>,
    solve: Solve,
    state: &[T],
    o: &mut [&mut [T]],
    u: &mut [&mut [T]],
) {
    let (tree, dv) = (head.tree, head.dims.dv);
    let ancestors = Ancestors::new(tree);
    let couplings = couple::<S, T>(&head, &ancestors);
    let mut x = vec![T::ZERO; tree.len() * dv];
    against_state::<S, T>(&head, state, &mut x, o);

    let mut g = couplings.keys;
    for node in 0..tree.len() {
        let (_, beta) = gate(head.dims, head.gates, head.first + node, head.v_head);
        for g in &mut g[ancestors.range(node)] {
            *g *= beta;
        }
    }
    TriangularSystem { tree, ancestors: &ancestors, g: &g }.solve::<S>(solve, &mut x);

    for node in 0..tree.len() {
        let row = |node: usize| &x[node * dv..(node + 1) * dv];
        let above = ancestors.of(node).iter().zip(&couplings.queries[ancestors.range(node)]);
        let mut terms: Vec<(T, &[T])> = above.map(|(&at, &c)| (c, row(at))).collect();
        terms.push((head.unit(node).2, row(node)));
        add_rows::<S, T>(o[node], &terms);
        u[node].copy_from_slice(row(node));
    }
}

/// Right side `beta (v - exp(g_cum) S0 k)` into `x` and `exp(g_cum) S0 q` into `o`, reading the state once.
#[inline(always)]
fn against_state<S: Simd, T: Real>(head: &Head<'_, T>, state: &[T], x: &mut [T], o: &mut [&mut [T]]) {
    let dims = head.dims;
    let mut g_cum = vec![0.0; head.tree.len()];
    let decays: Vec<T> = (0..head.tree.len())
        .map(|node| {
            let above = head.tree.parent(node).map_or(0.0, |parent| g_cum[parent]);
            g_cum[node] = above + gate(dims, head.gates, head.first + node, head.v_head).0.to_f64();
            T::from_f64(g_cum[node]).exp()
        })
        .collect();
    let mut sums = [[T::ZERO; 2]; ROWS];
    for (block, state) in state.chunks(ROWS * dims.dk).enumerate() {
        let rows = block * ROWS..(block * ROWS + ROWS).min(dims.dv);
        for (node, &decay) in decays.iter().enumerate() {
            let (k, q, _) = head.unit(node);
            let (_, beta) = gate(dims, head.gates, head.first + node, head.v_head);
            row_dots::<S, T>(state, k, q, &mut sums[..rows.len()]);
            let x = &mut x[node * dims.dv..][rows.clone()];
            let (o, v) = (&mut o[node][rows.clone()], &head.v(node)[rows.clone()]);
            for (((x, o), &v), &[sk, sq]) in x.iter_mut().zip(o).zip(v).zip(&sums) {
                *x = beta * (-decay).fma(sk, v);
                *o = decay * sq;
            }
        }
    }
}

/// Couples every node with its ancestors. Walks in pre-order, so that a path's keys lie one after another.
#[inline(always)]
fn couple<S: Simd, T: Real>(head: &Head<'_, T>, ancestors: &Ancestors) -> Couplings<T> {
    let (tree, dk) = (head.tree, head.dims.dk);
    let depth = tree.max_depth();
    let mut path_keys = vec![T::ZERO; (depth + 1) * dk];
    let mut path_g = vec![0.0; depth + 1];
    let mut products = vec![[T::ZERO; 2]; depth];
    let mut out = Couplings { keys: vec![T::ZERO; ancestors.len()], queries: vec![T::ZERO; ancestors.len()] };
    for node in tree.dfs_preorder() {
        let depth = tree.depths()[node] as usize;
        let (k, q, _) = head.unit(node);
        row_dots::<S, T>(&path_keys[..depth * dk], k, q, &mut products[..depth]);
        path_g[depth] = gate(head.dims, head.gates, head.first + node, head.v_head).0.to_f64();
        path_keys[depth * dk..][..dk].copy_from_slice(k);
        let range = ancestors.range(node);
        let mut g = 0.0;
        for above in (0..depth).rev() {
            // g_cum[node] - g_cum[ancestor], added up along the path: nothing cancels, and -inf above is not met.
            g += path_g[above + 1];
            let decay = T::from_f64(g).exp();
            out.keys[range.start + above] = decay * products[above][0];
            out.queries[range.start + above] = decay * products[above][1];
        }
    }
    out
}

/// `S = exp(g_cum_a) S0 + sum over the path of exp(g_cum_a - g_cum_j) u_j k_j^T` on one value head's state.
#[inline(always)]
pub(super) fn commit<S: Simd, T: Real>(head: HeadCommit<'_, T>) {
    let mut g = 0.0;
    let mut factors = vec![T::ZERO; head.rows.len()];
    for (factor, &row) in factors.iter_mut().zip(head.rows).rev() {
        *factor = T::from_f64(g).exp();
        g += gate(head.dims, head.gates, row as usize, head.v_head).0.to_f64();
    }
    let decay = T::from_f64(g).exp();
    let k_head = head.dims.key_head(head.v_head);
    let mut terms: Vec<(T, &[T])> =
        head.rows.iter().map(|&row| (T::ZERO, head.units.row(k_head, row as usize).0)).collect();
    let us: Vec<&[T]> = head.rows.iter().map(|&row| head.u(row as usize)).collect();
    for (at, state) in head.state.chunks_exact_mut(head.dims.dk).enumerate() {
        for ((term, &factor), u) in terms.iter_mut().zip(&factors).zip(&us) {
            term.0 = factor * u[at];
        }
        for s in state.iter_mut() {
            *s *= decay;
        }
        add_rows::<S, T>(state, &terms);
    }
}
