//! Row-wise steps as ops.

use candle_core::{Result, Tensor};
use canopy_kernels::AttnDims;

/// How an RMSNorm's weight multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By the weight.
    Plain,
    /// By one plus the weight.
    UnitOffset,
}

/// RMSNorm over the last dimension of `x` `[N, width]`; `weight` `[width]` f32.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32, kind: NormKind) -> Result<Tensor> {
    let _ = (x, weight, eps, kind);
    unimplemented!()
}

/// `(x + residual, rms_norm(x + residual))`.
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f32,
    kind: NormKind,
) -> Result<(Tensor, Tensor)> {
    let _ = (x, residual, weight, eps, kind);
    unimplemented!()
}

/// `rms_norm(o) * silu(z)` per head, plain weight `[Dv]`; `o` `[N, Hv, Dv]`, `z` `[N, Hv Dv]` -> `[N, Hv Dv]`.
pub fn gated_rms_norm(o: &Tensor, z: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let _ = (o, z, weight, eps);
    unimplemented!()
}

/// `silu(gate) * up`.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let _ = (gate, up);
    unimplemented!()
}

/// Norm and rotary embedding of projected queries and keys; see `canopy_kernels::glue::cpu::QkNormRope`.
#[derive(Clone, Debug)]
pub struct QkNormRope {
    /// Heads.
    pub dims: AttnDims,
    /// Each query head is followed by its output gate.
    pub gated: bool,
    /// `[D]` f32.
    pub q_norm: Tensor,
    /// `[D]` f32.
    pub k_norm: Tensor,
    /// Norm epsilon.
    pub eps: f32,
    /// How both norm weights multiply.
    pub kind: NormKind,
    /// `[rotary_dim / 2]` f32.
    pub inv_freq: Tensor,
}

/// `q_proj` `[N, Hq D (x 2 if gated)]`, `k_proj` `[N, Hkv D]`, absolute positions `[N]` -> (`[N, Hq, D]`, `[N, Hkv, D]`).
pub fn qk_norm_rope(
    op: &QkNormRope,
    q_proj: &Tensor,
    k_proj: &Tensor,
    positions: &[i32],
) -> Result<(Tensor, Tensor)> {
    let _ = (op, q_proj, k_proj, positions);
    unimplemented!()
}

/// `attn * sigmoid(gate)` with the gate taken from a gated `q_proj`; `attn` `[N, Hq, D]` -> `[N, Hq D]`.
pub fn attn_gate(dims: AttnDims, attn: &Tensor, q_proj: &Tensor) -> Result<Tensor> {
    let _ = (dims, attn, q_proj);
    unimplemented!()
}
