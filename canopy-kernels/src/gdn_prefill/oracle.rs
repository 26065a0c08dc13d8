//! The slow truth: float64, row after row. Frozen.
#![allow(clippy::needless_range_loop)] // the sums are written as the formula has them

use crate::GdnDims;

/// One sequence's inputs in float64.
#[derive(Clone, Copy, Debug)]
pub struct OracleInput<'a> {
    /// `[rows, 2 Hk Dk + Hv Dv]`.
    pub qkv: &'a [f64],
    /// `[rows, 2, Hv]`: plane 0 = g, plane 1 = beta.
    pub gates: &'a [f64],
    /// `[Hv, Dv, Dk]`: the state before the first row.
    pub state: &'a [f64],
}

/// Outputs `[rows, Hv, Dv]` and the state `[Hv, Dv, Dk]` after the last row. Panics when a size does not fit.
pub fn forward(dims: GdnDims, rows: usize, input: OracleInput<'_>) -> (Vec<f64>, Vec<f64>) {
    let GdnDims { k_heads, v_heads, dk, dv } = dims;
    let width = 2 * k_heads * dk + v_heads * dv;
    let mut state = input.state[..v_heads * dv * dk].to_vec();
    let mut o = vec![0.0; rows * v_heads * dv];
    for t in 0..rows {
        let row = &input.qkv[t * width..(t + 1) * width];
        for h in 0..v_heads {
            let k_head = h / (v_heads / k_heads);
            let q = unit(&row[k_head * dk..(k_head + 1) * dk]);
            let k = unit(&row[(k_heads + k_head) * dk..(k_heads + k_head + 1) * dk]);
            let v = &row[2 * k_heads * dk + h * dv..][..dv];
            let decay = input.gates[2 * t * v_heads + h].exp();
            let beta = input.gates[(2 * t + 1) * v_heads + h];
            for j in 0..dv {
                let s = &mut state[(h * dv + j) * dk..(h * dv + j + 1) * dk];
                let mut recalled = 0.0;
                for i in 0..dk {
                    s[i] *= decay;
                    recalled += s[i] * k[i];
                }
                let u = beta * (v[j] - recalled);
                let mut out = 0.0;
                for i in 0..dk {
                    s[i] += u * k[i];
                    out += s[i] * q[i];
                }
                o[(t * v_heads + h) * dv + j] = out / (dk as f64).sqrt();
            }
        }
    }
    (o, state)
}

/// `x / sqrt(x . x + 1e-6)`.
fn unit(x: &[f64]) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}
