//! The slow truth, frozen: the two formulas as they are written, float64.

/// What `cpu::forward` computes, `[N, 2, Hv]`.
pub fn forward(v_heads: usize, ab: &[f32], a_log: &[f32], dt_bias: &[f32]) -> Vec<f64> {
    let mut out = Vec::new();
    for row in ab.chunks(2 * v_heads) {
        for head in 0..v_heads {
            let x = row[head] as f64 + dt_bias[head] as f64;
            // Beyond 700 e^x overflows and softplus(x) is x.
            let softplus = if x > 700.0 { x } else { x.exp().ln_1p() };
            out.push(-(a_log[head] as f64).exp() * softplus);
        }
        for head in 0..v_heads {
            out.push(1.0 / (1.0 + (-row[v_heads + head] as f64).exp()));
        }
    }
    out
}
