//! Launches of norm and rotation of heads, alone and with the append to the pools.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use super::pool::{Destinations, PoolElement};
use super::{Norm, Rows, rows_of};
use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{AttnDims, Error, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    half: u32,
    q_head_stride: u32,
    q_stride: u32,
    k_stride: u32,
    v_stride: u32,
    q_eps: f32,
    k_eps: f32,
    q_offset: f32,
    k_offset: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for RopeArgs {}

/// How projected queries and keys become attention inputs; as [`super::super::cpu::QkNormRope`].
#[derive(Clone, Copy)]
pub struct QkNormRope<'a> {
    /// Heads; a head is at most 256 wide.
    pub dims: AttnDims,
    /// Each query head is followed by its output gate.
    pub gated: bool,
    /// Norm of every query head, `[D]`.
    pub q_norm: Norm<'a>,
    /// Norm of every key head, `[D]`.
    pub k_norm: Norm<'a>,
    /// `[rotary_dim / 2]`.
    pub inv_freq: &'a CudaView<'a, f32>,
    /// `[N]` absolute positions, from 0 to 2^22.
    pub positions: &'a CudaView<'a, i32>,
}

impl QkNormRope<'_> {
    const OP: &'static str = "qk-norm-rope";
    const MOST_WIDE: usize = 256;
    const WARPS: u32 = 4;

    fn q_head_stride(&self) -> usize {
        self.dims.head_dim * if self.gated { 2 } else { 1 }
    }

    /// Checks every argument; returns N.
    fn check(&self, q_proj: Rows<'_>, k_proj: Rows<'_>, q: usize) -> Result<usize> {
        let (op, dims, rows) = (Self::OP, self.dims, self.positions.len());
        let d = dims.head_dim;
        if d > Self::MOST_WIDE {
            let wanted = format!("heads of {d} values");
            return Err(Error::Unsupported { op, wanted, built: "heads of at most 256 values" });
        }
        expect_len(op, "q_norm.weight", &[d], self.q_norm.weight.len())?;
        expect_len(op, "k_norm.weight", &[d], self.k_norm.weight.len())?;
        if 2 * self.inv_freq.len() > d {
            let expected = format!("at most head_dim / 2 = {}", d / 2);
            let got = self.inv_freq.len().to_string();
            return Err(Error::Value { op, arg: "inv_freq length", expected, got });
        }
        q_proj.check(op, "q_proj", rows, dims.q_heads * self.q_head_stride())?;
        k_proj.check(op, "k_proj", rows, dims.kv_width())?;
        expect_len(op, "q", &[rows, dims.q_heads, d], q)?;
        rows_of(op, "q", q, dims.q_width())
    }

    fn args(&self, q_proj: Rows<'_>, k_proj: Rows<'_>, v_stride: usize) -> RopeArgs {
        RopeArgs {
            q_heads: self.dims.q_heads as u32,
            kv_heads: self.dims.kv_heads as u32,
            head_dim: self.dims.head_dim as u32,
            half: self.inv_freq.len() as u32,
            q_head_stride: self.q_head_stride() as u32,
            q_stride: q_proj.stride as u32,
            k_stride: k_proj.stride as u32,
            v_stride: v_stride as u32,
            q_eps: self.q_norm.eps,
            k_eps: self.k_norm.eps,
            q_offset: self.q_norm.offset(),
            k_offset: self.k_norm.offset(),
        }
    }

    /// A warp a head.
    fn grid(&self, rows: usize, heads: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (rows as u32, (heads as u32).div_ceil(Self::WARPS), 1),
            block_dim: (32 * Self::WARPS, 1, 1),
            shared_mem_bytes: 0,
        }
    }
}

/// `q_proj` rows of `[Hq, D]` (`[Hq, 2 D]` if gated), `k_proj` rows of `[Hkv, D]` -> `q` `[N, Hq, D]`, `k` `[N, Hkv, D]`.
///
/// # Errors
/// Any wrong length, or a head wider than 256, before the launch.
pub fn qk_norm_rope(
    stream: &Arc<CudaStream>,
    op: QkNormRope<'_>,
    [q_proj, k_proj]: [Rows<'_>; 2],
    [q, k]: [&mut CudaViewMut<'_, f32>; 2],
) -> Result<()> {
    const OP: &str = QkNormRope::OP;
    let rows = op.check(q_proj, k_proj, q.len())?;
    expect_len(OP, "k", &[rows, op.dims.kv_heads, op.dims.head_dim], k.len())?;
    if rows == 0 {
        return Ok(());
    }
    let args = op.args(q_proj, k_proj, 0);
    let mut launch = Launch::new(stream, OP, "glue/rope", "glue_qk_norm_rope")?;
    launch.value(&args).read(q_proj.data).read(k_proj.data).read(op.q_norm.weight).read(op.k_norm.weight);
    launch.read(op.inv_freq).read(op.positions).write(q).write(k);
    // SAFETY: lengths checked above; every element of q and k is written.
    unsafe { launch.launch(op.grid(rows, op.dims.q_heads + op.dims.kv_heads)) }
}

/// [`qk_norm_rope`] with queries rounded to the pools' type, and keys and values (`v_proj` rows of `[Hkv, D]`) written to their
/// rows of `keys` and `values` `[rows, Hkv, D]`, as [`super::kv_append_pair`] writes them.
///
/// # Errors
/// As [`qk_norm_rope`] and [`super::kv_append`].
pub fn qk_norm_rope_append<T: PoolElement>(
    stream: &Arc<CudaStream>,
    op: QkNormRope<'_>,
    [q_proj, k_proj, v_proj]: [Rows<'_>; 3],
    to: Destinations<'_>,
    q: &mut CudaViewMut<'_, T>,
    [keys, values]: [&mut CudaViewMut<'_, T>; 2],
) -> Result<()> {
    const OP: &str = QkNormRope::OP;
    let (rows, width) = (op.check(q_proj, k_proj, q.len())?, op.dims.kv_width());
    expect_len(OP, "destinations", &[rows], to.host.len())?;
    to.check(("k_proj", "keys"), width, k_proj, keys.len())?;
    to.check(("v_proj", "values"), width, v_proj, values.len())?;
    if rows == 0 {
        return Ok(());
    }
    let args = op.args(q_proj, k_proj, v_proj.stride);
    let mut launch = Launch::new(stream, OP, "glue/rope", T::ROPE_APPEND)?;
    launch.value(&args).read(q_proj.data).read(k_proj.data).read(v_proj.data);
    launch.read(op.q_norm.weight).read(op.k_norm.weight).read(op.inv_freq).read(op.positions);
    launch.read(to.on_device).write(q).write(keys).write(values);
    // SAFETY: lengths and destinations checked above; every element of q is written.
    unsafe { launch.launch(op.grid(rows, op.dims.q_heads + 2 * op.dims.kv_heads)) }
}
