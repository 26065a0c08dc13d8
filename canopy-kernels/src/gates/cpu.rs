//! CPU forward.

use crate::error::expect_len;
use crate::{Error, Result};

/// `ab` `[N, 2, Hv]` (plane 0 = a, plane 1 = b), `a_log`, `dt_bias` `[Hv]` -> `out` `[N, 2, Hv]` (g, beta). f32
/// in memory, float64 inside: the product `exp(A_log) * softplus` has factors beyond f32 where its value is not.
///
/// # Errors
/// When `v_heads` is 0 or a buffer has another size.
pub fn forward(v_heads: usize, ab: &[f32], a_log: &[f32], dt_bias: &[f32], out: &mut [f32]) -> Result<()> {
    const OP: &str = "gates";
    if v_heads == 0 {
        return Err(Error::Value { op: OP, arg: "v_heads", expected: "at least 1".into(), got: "0".into() });
    }
    expect_len(OP, "a_log", &[v_heads], a_log.len())?;
    expect_len(OP, "dt_bias", &[v_heads], dt_bias.len())?;
    expect_len(OP, "ab", &[ab.len().div_ceil(2 * v_heads), 2, v_heads], ab.len())?;
    expect_len(OP, "out", &[ab.len() / (2 * v_heads), 2, v_heads], out.len())?;
    for (head, (&a_log, &dt_bias)) in a_log.iter().zip(dt_bias).enumerate() {
        let (a_log, dt_bias) = (a_log as f64, dt_bias as f64);
        let rate = a_log.exp();
        for (ab, out) in ab.chunks_exact(2 * v_heads).zip(out.chunks_exact_mut(2 * v_heads)) {
            let (a, b) = (ab[head] as f64, ab[v_heads + head] as f64);
            let x = a + dt_bias;
            // Far below zero softplus(x) is e^x, and adding exponents cannot give infinity times zero.
            let minus_g = if x < -40.0 { (a_log + x).exp() } else { rate * softplus(x) };
            out[head] = -minus_g as f32;
            out[v_heads + head] = sigmoid(b) as f32;
        }
    }
    Ok(())
}

/// `ln(1 + e^x)` without overflow for large x or cancellation for small x.
fn softplus(x: f64) -> f64 {
    if x.is_nan() { x } else { x.max(0.0) + (-x.abs()).exp().ln_1p() }
}

/// `1 / (1 + e^-x)`, full relative accuracy on both sides.
fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
}
