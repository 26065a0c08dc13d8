//! Launches of the CUDA kernels. Activations are f32, pools and what attention reads of them bf16 or f32. Every argument is checked before a launch.
//!
//! Inputs named [`Rows`] may be columns of a wider matrix, as the outputs of one fused projection are. Any width and any
//! alignment is right; rows of a multiple of 4 values at 16-byte addresses are fast. A row's bits are the same either way.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

mod pool;
mod rope;

pub use pool::{Destinations, PoolElement, attn_gate, kv_append, kv_append_pair};
pub use rope::{QkNormRope, qk_norm_rope, qk_norm_rope_append};

/// What rows may come out as: products that round their rows take bf16 ones as they are.
pub trait RowElement: DeviceRepr {
    /// Its place among symbols.
    const PLACE: usize;
}

impl RowElement for f32 {
    const PLACE: usize = 0;
}

impl RowElement for half::bf16 {
    const PLACE: usize = 1;
}

/// An RMSNorm on a device; as [`super::cpu::Norm`].
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[width]`.
    pub weight: &'a CudaView<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// Multiply by `1 + weight` instead of `weight`.
    pub unit_offset: bool,
}

impl Norm<'_> {
    fn offset(&self) -> f32 {
        if self.unit_offset { 1.0 } else { 0.0 }
    }
}

/// Rows of a matrix, `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// From the first row's first element to the last row's last one.
    pub data: &'a CudaView<'a, f32>,
    /// Elements from one row to the next; at least a row's width.
    pub stride: usize,
}

impl Rows<'_> {
    fn check(&self, op: &'static str, arg: &'static str, rows: usize, width: usize) -> Result<()> {
        if self.stride < width || u32::try_from(self.stride).is_err() {
            let expected = format!("a row stride of {width} to {}", u32::MAX);
            return Err(Error::Value { op, arg, expected, got: self.stride.to_string() });
        }
        match rows {
            _ if rows == 0 || self.stride == width => expect_len(op, arg, &[rows, width], self.data.len()),
            _ => expect_len(op, arg, &[(rows - 1) * self.stride + width], self.data.len()),
        }
    }
}

/// Rows of `len` values in `width`s, or an error that names the argument.
fn rows_of(op: &'static str, arg: &'static str, len: usize, width: usize) -> Result<usize> {
    let rows = len / width.max(1);
    expect_len(op, arg, &[rows, width], len)?;
    match u32::try_from(len / 4).is_ok() && i32::try_from(rows).is_ok() {
        true => Ok(rows),
        false => {
            Err(Error::Value { op, arg, expected: "fewer than 2^31 rows".into(), got: rows.to_string() })
        }
    }
}

/// One thread per quad of every row.
const CTA: u32 = 256;

fn quads(rows: usize, quads: usize, planes: u32) -> LaunchConfig {
    let y = (quads as u32).div_ceil(CTA);
    LaunchConfig { grid_dim: (rows as u32, y, planes), block_dim: (CTA, 1, 1), shared_mem_bytes: 0 }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgs {
    rows: u32,
    width: u32,
    eps: f32,
    offset: f32,
    heads: u32,
    gate_stride: u32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for NormArgs {}

/// Which kernel and grid a width takes: the kernel's place in the three teams' symbols, rows and threads of a CTA.
pub(super) fn team(op: &'static str, width: usize) -> Result<(usize, u32, u32)> {
    match width {
        0 => Err(Error::Value {
            op,
            arg: "norm.weight length",
            expected: "at least 1".into(),
            got: "0".into(),
        }),
        1..=512 => Ok((0, 4, 128)),
        513..=8_192 => Ok((1, 1, 512)),
        8_193..=16_384 => Ok((2, 1, 1024)),
        _ => {
            let wanted = format!("rows of {width} values");
            Err(Error::Unsupported { op, wanted, built: "rows of at most 16384 values" })
        }
    }
}

/// A norm's launch: its symbol, arguments and grid.
fn norm_launch(
    op: &'static str,
    symbols: [&'static str; 3],
    norm: Norm<'_>,
    rows: usize,
) -> Result<(&'static str, NormArgs, LaunchConfig)> {
    let width = norm.weight.len();
    let (place, per_cta, threads) = team(op, width)?;
    let args = NormArgs {
        rows: rows as u32,
        width: width as u32,
        eps: norm.eps,
        offset: norm.offset(),
        heads: 1,
        gate_stride: 0,
    };
    let grid_dim = ((rows as u32).div_ceil(per_cta), 1, 1);
    Ok((symbols[place], args, LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: 0 }))
}

/// As [`super::cpu::rms_norm`]; `x`, `out` `[N, width]`.
///
/// # Errors
/// Any wrong length, or a width beyond 16,384, before the launch.
pub fn rms_norm<Out: RowElement>(
    stream: &Arc<CudaStream>,
    norm: Norm<'_>,
    x: &CudaView<'_, f32>,
    out: &mut CudaViewMut<'_, Out>,
) -> Result<()> {
    const OP: &str = "rms-norm";
    let width = norm.weight.len();
    team(OP, width)?;
    let rows = rows_of(OP, "x", x.len(), width)?;
    expect_len(OP, "out", &[rows, width], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let symbols = [
        ["glue_rms_norm_w1", "glue_rms_norm_w16", "glue_rms_norm_w32"],
        ["glue_rms_norm_bf16_w1", "glue_rms_norm_bf16_w16", "glue_rms_norm_bf16_w32"],
    ];
    let (symbol, args, config) = norm_launch(OP, symbols[Out::PLACE], norm, rows)?;
    let mut launch = Launch::new(stream, OP, "glue/norm", symbol)?;
    launch.value(&args).read(x).read(norm.weight).write(out);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(config) }
}

/// As [`super::cpu::add_rms_norm`]; `x`, `residual`, `sum`, `out` `[N, width]`.
///
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm<Out: RowElement>(
    stream: &Arc<CudaStream>,
    norm: Norm<'_>,
    [x, residual]: [&CudaView<'_, f32>; 2],
    sum: &mut CudaViewMut<'_, f32>,
    out: &mut CudaViewMut<'_, Out>,
) -> Result<()> {
    const OP: &str = "add-rms-norm";
    let width = norm.weight.len();
    team(OP, width)?;
    let rows = rows_of(OP, "x", x.len(), width)?;
    expect_len(OP, "residual", &[rows, width], residual.len())?;
    expect_len(OP, "sum", &[rows, width], sum.len())?;
    expect_len(OP, "out", &[rows, width], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let symbols = [
        ["glue_add_rms_norm_w1", "glue_add_rms_norm_w16", "glue_add_rms_norm_w32"],
        ["glue_add_rms_norm_bf16_w1", "glue_add_rms_norm_bf16_w16", "glue_add_rms_norm_bf16_w32"],
    ];
    let (symbol, args, config) = norm_launch(OP, symbols[Out::PLACE], norm, rows)?;
    let mut launch = Launch::new(stream, OP, "glue/norm", symbol)?;
    launch.value(&args).read(x).read(residual).read(norm.weight).write(sum).write(out);
    // SAFETY: lengths checked above; every element of sum and out is written.
    unsafe { launch.launch(config) }
}

/// As [`super::cpu::gated_rms_norm`]; `o`, `out` `[N, heads, width]`, `z` rows of `[heads width]`.
///
/// # Errors
/// As [`rms_norm`], and no heads.
pub fn gated_rms_norm<Out: RowElement>(
    stream: &Arc<CudaStream>,
    norm: Norm<'_>,
    heads: usize,
    o: &CudaView<'_, f32>,
    z: Rows<'_>,
    out: &mut CudaViewMut<'_, Out>,
) -> Result<()> {
    const OP: &str = "gated-rms-norm";
    let width = norm.weight.len();
    team(OP, width)?;
    if heads == 0 {
        let (expected, got) = ("at least 1".into(), "0".into());
        return Err(Error::Value { op: OP, arg: "heads", expected, got });
    }
    let rows = rows_of(OP, "o", o.len(), heads * width)?;
    z.check(OP, "z", rows, heads * width)?;
    expect_len(OP, "out", &[rows, heads, width], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let symbols = [
        ["glue_gated_rms_norm_w1", "glue_gated_rms_norm_w16", "glue_gated_rms_norm_w32"],
        ["glue_gated_rms_norm_bf16_w1", "glue_gated_rms_norm_bf16_w16", "glue_gated_rms_norm_bf16_w32"],
    ];
    let (symbol, args, config) = norm_launch(OP, symbols[Out::PLACE], norm, rows * heads)?;
    let args = NormArgs { heads: heads as u32, gate_stride: z.stride as u32, ..args };
    let mut launch = Launch::new(stream, OP, "glue/norm", symbol)?;
    launch.value(&args).read(o).read(z.data).read(norm.weight).write(out);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(config) }
}

/// As [`super::cpu::swiglu`]; `gate`, `up` rows of `width`, `out` `[N, width]`.
///
/// # Errors
/// Any wrong length, before the launch.
pub fn swiglu<Out: RowElement>(
    stream: &Arc<CudaStream>,
    width: usize,
    gate: Rows<'_>,
    up: Rows<'_>,
    out: &mut CudaViewMut<'_, Out>,
) -> Result<()> {
    const OP: &str = "swiglu";
    let rows = rows_of(OP, "out", out.len(), width)?;
    gate.check(OP, "gate", rows, width)?;
    up.check(OP, "up", rows, width)?;
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let (columns, gate_stride, up_stride) = (width as u32, gate.stride as u32, up.stride as u32);
    let mut launch = Launch::new(stream, OP, "glue/gate", ["glue_swiglu", "glue_swiglu_bf16"][Out::PLACE])?;
    launch.value(&columns).value(&gate_stride).value(&up_stride).read(gate.data).read(up.data).write(out);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(quads(rows, width.div_ceil(4), 1)) }
}
