//! Launches of the steps around attention: norm and rotation of heads, appending to a pool, the output gate.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};

use super::{Norm, Rows, launched, quads, rows_of};
use crate::cuda::Kernels;
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
    fn check(&self, q_proj: Rows<'_>, k_proj: Rows<'_>, q: usize, k: usize) -> Result<usize> {
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
        expect_len(op, "k", &[rows, dims.kv_heads, d], k)?;
        rows_of(op, "q", q, dims.q_width())
    }

    fn args(&self, q_proj: Rows<'_>, k_proj: Rows<'_>) -> RopeArgs {
        RopeArgs {
            q_heads: self.dims.q_heads as u32,
            kv_heads: self.dims.kv_heads as u32,
            head_dim: self.dims.head_dim as u32,
            half: self.inv_freq.len() as u32,
            q_head_stride: self.q_head_stride() as u32,
            q_stride: q_proj.stride as u32,
            k_stride: k_proj.stride as u32,
            q_eps: self.q_norm.eps,
            k_eps: self.k_norm.eps,
            q_offset: self.q_norm.offset(),
            k_offset: self.k_norm.offset(),
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
    let rows = op.check(q_proj, k_proj, q.len(), k.len())?;
    if rows == 0 {
        return Ok(());
    }
    let function = Kernels::on(stream.context())?.function(OP, "glue/rope", "glue_qk_norm_rope")?;
    let args = op.args(q_proj, k_proj);
    let heads = (op.dims.q_heads + op.dims.kv_heads) as u32;
    let config = LaunchConfig {
        grid_dim: (rows as u32, heads.div_ceil(QkNormRope::WARPS), 1),
        block_dim: (32 * QkNormRope::WARPS, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(&function);
    launch.arg(&args).arg(q_proj.data).arg(k_proj.data).arg(op.q_norm.weight).arg(op.k_norm.weight);
    launch.arg(op.inv_freq).arg(op.positions).arg(q).arg(k);
    // SAFETY: lengths checked above; every element of q and k is written.
    launched(OP, unsafe { launch.launch(config) })
}

/// An element type that a pool may have.
pub trait PoolElement: DeviceRepr {
    /// The appending kernel's symbol.
    const SYMBOL: &'static str;
}

impl PoolElement for f32 {
    const SYMBOL: &'static str = "glue_kv_append_f32";
}

impl PoolElement for half::bf16 {
    const SYMBOL: &'static str = "glue_kv_append_bf16";
}

/// Where in a pool of rows every packed row goes: `slot * capacity + position`, or -1 for nowhere.
#[derive(Clone, Copy)]
pub struct Destinations<'a> {
    /// The list itself.
    pub host: &'a [i32],
    /// The same list on the device.
    pub on_device: &'a CudaView<'a, i32>,
}

impl Destinations<'_> {
    /// Checks the rows and their pool; returns N.
    fn check(
        self,
        (arg, pool_arg): (&'static str, &'static str),
        width: usize,
        rows: Rows<'_>,
        pool: usize,
    ) -> Result<usize> {
        const OP: &str = "kv-append";
        let n = self.host.len();
        expect_len(OP, "destinations on the device", &[n], self.on_device.len())?;
        rows.check(OP, arg, n, width)?;
        let pool_rows = rows_of(OP, pool_arg, pool, width)?;
        match self.host.iter().find(|&&to| to < -1 || to >= pool_rows as i32) {
            None => Ok(n),
            Some(to) => {
                let expected = format!("rows of {pool_arg} below {pool_rows}, or -1");
                Err(Error::Value { op: OP, arg: "destinations", expected, got: to.to_string() })
            }
        }
    }
}

/// Writes packed rows of `width` values, narrowed to the pool's type, to their rows of `pool` `[rows, width]`. Two rows of
/// one call must not go to one place.
///
/// # Errors
/// Any wrong length, or a destination outside the pool, before the launch.
pub fn kv_append<T: PoolElement>(
    stream: &Arc<CudaStream>,
    width: usize,
    to: Destinations<'_>,
    rows: Rows<'_>,
    pool: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "kv-append";
    let n = to.check(("rows", "cache"), width, rows, pool.len())?;
    if n == 0 || width == 0 {
        return Ok(());
    }
    let function = Kernels::on(stream.context())?.function(OP, "glue/append", T::SYMBOL)?;
    let (columns, stride, none) = (width as u32, rows.stride as u32, 0u64);
    let mut launch = stream.launch_builder(&function);
    launch
        .arg(&columns)
        .arg(&stride)
        .arg(&stride)
        .arg(rows.data)
        .arg(&none)
        .arg(to.on_device)
        .arg(pool)
        .arg(&none);
    // SAFETY: lengths and destinations checked above; one plane, so the null pointers are not read.
    launched(OP, unsafe { launch.launch(quads(n, width.div_ceil(4), 1)) })
}

/// [`kv_append`] of keys and values in one launch.
///
/// # Errors
/// As [`kv_append`].
pub fn kv_append_pair<T: PoolElement>(
    stream: &Arc<CudaStream>,
    width: usize,
    to: Destinations<'_>,
    [k, v]: [Rows<'_>; 2],
    [keys, values]: [&mut CudaViewMut<'_, T>; 2],
) -> Result<()> {
    const OP: &str = "kv-append";
    let n = to.check(("k", "keys"), width, k, keys.len())?;
    to.check(("v", "values"), width, v, values.len())?;
    if n == 0 || width == 0 {
        return Ok(());
    }
    let function = Kernels::on(stream.context())?.function(OP, "glue/append", T::SYMBOL)?;
    let (columns, k_stride, v_stride) = (width as u32, k.stride as u32, v.stride as u32);
    let mut launch = stream.launch_builder(&function);
    launch.arg(&columns).arg(&k_stride).arg(&v_stride).arg(k.data).arg(v.data).arg(to.on_device);
    launch.arg(keys).arg(values);
    // SAFETY: lengths and destinations checked above.
    launched(OP, unsafe { launch.launch(quads(n, width.div_ceil(4), 2)) })
}

/// As [`super::super::cpu::attn_gate`]; `attn`, `out` `[N, Hq, D]`, `q_proj` rows of `[Hq, 2 D]`.
///
/// # Errors
/// Any wrong length, before the launch.
pub fn attn_gate(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    attn: &CudaView<'_, f32>,
    q_proj: Rows<'_>,
    out: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "attn-gate";
    let rows = rows_of(OP, "attn", attn.len(), dims.q_width())?;
    q_proj.check(OP, "q_proj", rows, 2 * dims.q_width())?;
    expect_len(OP, "out", &[rows, dims.q_heads, dims.head_dim], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let function = Kernels::on(stream.context())?.function(OP, "glue/gate", "glue_attn_gate")?;
    let (heads, head_dim, stride) = (dims.q_heads as u32, dims.head_dim as u32, q_proj.stride as u32);
    let mut launch = stream.launch_builder(&function);
    launch.arg(&heads).arg(&head_dim).arg(&stride).arg(attn).arg(q_proj.data).arg(out);
    let all = dims.q_heads * dims.head_dim.div_ceil(4);
    // SAFETY: lengths checked above; every element of out is written.
    launched(OP, unsafe { launch.launch(quads(rows, all, 1)) })
}
