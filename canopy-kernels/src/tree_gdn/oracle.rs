//! The slow truth: float64, one serial recurrence along every node's own root path. Frozen.
#![allow(clippy::needless_range_loop)] // the sums are written as the formula has them

use crate::{DraftTree, GdnDims};

/// One tree's inputs in float64.
#[derive(Clone, Copy, Debug)]
pub struct OracleInput<'a> {
    /// `[nodes, 2 Hk Dk + Hv Dv]`.
    pub qkv: &'a [f64],
    /// `[nodes, 2, Hv]`: plane 0 = g, plane 1 = beta.
    pub gates: &'a [f64],
    /// `[Hv, Dv, Dk]`: the committed state.
    pub state: &'a [f64],
}

/// What every node of the tree gives.
#[derive(Clone, Debug, PartialEq)]
pub struct OracleOutput {
    /// `[nodes, Hv, Dv]`.
    pub o: Vec<f64>,
    /// `[nodes, Hv, Dv]`.
    pub u: Vec<f64>,
    /// `[nodes, Hv]`.
    pub g_cum: Vec<f64>,
}

/// Evaluates every node along its own root path. Panics when a size does not fit.
pub fn verify(dims: GdnDims, tree: &DraftTree, input: OracleInput<'_>) -> OracleOutput {
    let mut out = OracleOutput { o: Vec::new(), u: Vec::new(), g_cum: Vec::new() };
    for node in 0..tree.len() {
        for v_head in 0..dims.v_heads {
            let end = follow(dims, &tree.path(node), v_head, input);
            out.o.extend(end.o);
            out.u.extend(end.u);
            out.g_cum.push(end.g_cum);
        }
    }
    out
}

/// The state `[Hv, Dv, Dk]` after the path from the root to `node`. Panics when a size does not fit.
pub fn commit(dims: GdnDims, tree: &DraftTree, node: usize, input: OracleInput<'_>) -> Vec<f64> {
    let mut state = Vec::new();
    for v_head in 0..dims.v_heads {
        let end = follow(dims, &tree.path(node), v_head, input);
        for j in 0..dims.dv {
            state.extend((0..dims.dk).map(|i| end.state[i * dims.dv + j]));
        }
    }
    state
}

struct PathEnd {
    /// `[Dk, Dv]`.
    state: Vec<f64>,
    u: Vec<f64>,
    o: Vec<f64>,
    g_cum: f64,
}

fn follow(dims: GdnDims, path: &[usize], v_head: usize, input: OracleInput<'_>) -> PathEnd {
    let GdnDims { k_heads, v_heads, dk, dv } = dims;
    let (width, k_head) = (2 * k_heads * dk + v_heads * dv, v_head / (v_heads / k_heads));
    let before = &input.state[v_head * dv * dk..(v_head + 1) * dv * dk];
    let state = (0..dk * dv).map(|at| before[at % dv * dk + at / dv]).collect();
    let mut end = PathEnd { state, u: vec![0.0; dv], o: vec![0.0; dv], g_cum: 0.0 };
    let mut q = vec![0.0; dk];
    for &node in path {
        let row = &input.qkv[node * width..(node + 1) * width];
        q = unit(&row[k_head * dk..(k_head + 1) * dk]);
        let k = unit(&row[(k_heads + k_head) * dk..(k_heads + k_head + 1) * dk]);
        let v = &row[2 * k_heads * dk + v_head * dv..][..dv];
        let (g, beta) =
            (input.gates[node * 2 * v_heads + v_head], input.gates[(node * 2 + 1) * v_heads + v_head]);
        let decay = g.exp();
        let mut recalled = vec![0.0; dv];
        for (s, k) in end.state.chunks_exact_mut(dv).zip(&k) {
            for j in 0..dv {
                s[j] *= decay;
                recalled[j] += s[j] * k;
            }
        }
        for j in 0..dv {
            end.u[j] = beta * (v[j] - recalled[j]);
        }
        for (s, k) in end.state.chunks_exact_mut(dv).zip(&k) {
            for j in 0..dv {
                s[j] += k * end.u[j];
            }
        }
        end.g_cum += g;
    }
    for (s, q) in end.state.chunks_exact(dv).zip(q) {
        let q = q / (dk as f64).sqrt();
        for j in 0..dv {
            end.o[j] += s[j] * q;
        }
    }
    end
}

/// `x / sqrt(x . x + 1e-6)`.
fn unit(x: &[f64]) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}
