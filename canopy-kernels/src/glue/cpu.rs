//! CPU forward. Every function works row by row, so a row's bits depend on that row alone.

use crate::{AttnDims, Result};

/// An RMSNorm's weight and how it multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[width]`.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Multiply by `1 + weight` (Qwen3.5's norms) instead of `weight`.
    pub unit_offset: bool,
}

/// `out[r] = x[r] * rsqrt(mean x[r]^2 + eps) * (weight or 1 + weight)`; `x`, `out` `[N, width]`.
pub fn rms_norm(norm: Norm<'_>, x: &[f32], out: &mut [f32]) -> Result<()> {
    let _ = (norm, x, out);
    unimplemented!()
}

/// `sum = x + residual`, `out = rms_norm(sum)`; all `[N, width]`.
pub fn add_rms_norm(
    norm: Norm<'_>,
    x: &[f32],
    residual: &[f32],
    sum: &mut [f32],
    out: &mut [f32],
) -> Result<()> {
    let _ = (norm, x, residual, sum, out);
    unimplemented!()
}

/// `out = rms_norm(o) * silu(z)`, the norm over each head of `norm.weight.len()` values; all `[N, Hv Dv]`.
pub fn gated_rms_norm(norm: Norm<'_>, o: &[f32], z: &[f32], out: &mut [f32]) -> Result<()> {
    let _ = (norm, o, z, out);
    unimplemented!()
}

/// `out = silu(gate) * up`; all `[N, width]`.
pub fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<()> {
    let _ = (gate, up, out);
    unimplemented!()
}

/// How projected queries and keys become attention inputs.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// Heads.
    pub dims: AttnDims,
    /// Each query head is followed by its output gate: `[q | gate]` per head, 2 D wide.
    pub gated: bool,
    /// Norm of every query head, `[D]`.
    pub q_norm: Norm<'a>,
    /// Norm of every key head, `[D]`.
    pub k_norm: Norm<'a>,
    /// `[rotary_dim / 2]`; rotate-half over the first `rotary_dim` values, the rest pass through.
    pub inv_freq: &'a [f32],
    /// `[N]` absolute positions.
    pub positions: &'a [i32],
}

/// `q_proj` `[N, Hq D]` or `[N, Hq 2 D]`, `k_proj` `[N, Hkv D]` -> `q` `[N, Hq, D]`, `k` `[N, Hkv, D]`: RMSNorm per
/// head, then RoPE.
pub fn qk_norm_rope(
    args: QkNormRope<'_>,
    q_proj: &[f32],
    k_proj: &[f32],
    q: &mut [f32],
    k: &mut [f32],
) -> Result<()> {
    let _ = (args, q_proj, k_proj, q, k);
    unimplemented!()
}

/// `out = attn * sigmoid(gate)`, the gate taken from `q_proj` `[N, Hq, 2 D]` as [`QkNormRope::gated`] lays it.
pub fn attn_gate(dims: AttnDims, attn: &[f32], q_proj: &[f32], out: &mut [f32]) -> Result<()> {
    let _ = (dims, attn, q_proj, out);
    unimplemented!()
}
