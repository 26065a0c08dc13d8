//! Launches of the CUDA kernels. Activations are f32, pools and what attention reads of them bf16 or f32. Every argument is checked before a launch.
//!
//! Inputs named [`Rows`] may be columns of a wider matrix, as the outputs of one fused projection are. Any width and any
//! alignment is right; rows of a multiple of 4 values at 16-byte addresses are fast. A row's bits are the same either way.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

mod norm;
mod pool;
mod rope;

pub use norm::{add_rms_norm, gated_rms_norm, rms_norm};
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
