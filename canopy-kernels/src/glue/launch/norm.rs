//! Norms: alone, of a sum, with a gate.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use super::{Norm, RowElement, Rows, rows_of};
use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

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
fn team(op: &'static str, width: usize) -> Result<(usize, u32, u32)> {
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

/// One of the steps.
struct Step {
    /// Its name in errors.
    op: &'static str,
    /// Its kernels by output type and team.
    symbols: [[&'static str; 3]; 2],
}

macro_rules! step {
    ($op:literal, $symbol:literal) => {
        Step {
            op: $op,
            symbols: [
                [concat!($symbol, "_w1"), concat!($symbol, "_w16"), concat!($symbol, "_w32")],
                [concat!($symbol, "_bf16_w1"), concat!($symbol, "_bf16_w16"), concat!($symbol, "_bf16_w32")],
            ],
        }
    };
}

const RMS: Step = step!("rms-norm", "glue_rms_norm");
const ADD_RMS: Step = step!("add-rms-norm", "glue_add_rms_norm");
const GATED: Step = step!("gated-rms-norm", "glue_gated_rms_norm");

/// A step's buffers, whose lengths are checked.
struct Buffers<'a, Out> {
    /// Rows of so many heads of the weight's width.
    rows: usize,
    heads: usize,
    /// Elements from one row of the gate to the next.
    gate_stride: usize,
    reads: &'a [&'a CudaView<'a, f32>],
    sum: Option<&'a mut CudaViewMut<'a, f32>>,
    out: &'a mut CudaViewMut<'a, Out>,
}

impl Step {
    /// # Safety
    /// Every read, the sum and the output have the rows.
    unsafe fn launch<Out: RowElement>(
        &self,
        stream: &Arc<CudaStream>,
        norm: Norm<'_>,
        buffers: Buffers<'_, Out>,
    ) -> Result<()> {
        let Buffers { rows, heads, gate_stride, reads, sum, out } = buffers;
        if rows == 0 {
            return Ok(());
        }
        let (place, per_cta, threads) = team(self.op, norm.weight.len())?;
        let args = NormArgs {
            rows: (rows * heads) as u32,
            width: norm.weight.len() as u32,
            eps: norm.eps,
            offset: norm.offset(),
            heads: heads as u32,
            gate_stride: gate_stride as u32,
        };
        let grid_dim = (args.rows.div_ceil(per_cta), 1, 1);
        let config = LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        let mut launch = Launch::new(stream, self.op, "glue/norm", self.symbols[Out::PLACE][place])?;
        launch.value(&args);
        for &read in reads {
            launch.read(read);
        }
        launch.read(norm.weight);
        if let Some(sum) = sum {
            launch.write(sum);
        }
        launch.write(out);
        // SAFETY: the caller's promise; every element of the sum and of out is written.
        unsafe { launch.launch(config) }
    }
}

/// As [`crate::glue::cpu::rms_norm`]; `x`, `out` `[N, width]`.
///
/// # Errors
/// Any wrong length, or a width beyond 16,384, before the launch.
pub fn rms_norm<Out: RowElement>(
    stream: &Arc<CudaStream>,
    norm: Norm<'_>,
    x: &CudaView<'_, f32>,
    out: &mut CudaViewMut<'_, Out>,
) -> Result<()> {
    let width = norm.weight.len();
    team(RMS.op, width)?;
    let rows = rows_of(RMS.op, "x", x.len(), width)?;
    expect_len(RMS.op, "out", &[rows, width], out.len())?;
    let (reads, out) = (&[&x.slice(..)], &mut out.slice_mut(..));
    let buffers = Buffers { rows, heads: 1, gate_stride: 0, reads, sum: None, out };
    // SAFETY: lengths checked above.
    unsafe { RMS.launch(stream, norm, buffers) }
}

/// As [`crate::glue::cpu::add_rms_norm`]; `x`, `residual`, `sum`, `out` `[N, width]`.
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
    let width = norm.weight.len();
    team(ADD_RMS.op, width)?;
    let rows = rows_of(ADD_RMS.op, "x", x.len(), width)?;
    expect_len(ADD_RMS.op, "residual", &[rows, width], residual.len())?;
    expect_len(ADD_RMS.op, "sum", &[rows, width], sum.len())?;
    expect_len(ADD_RMS.op, "out", &[rows, width], out.len())?;
    let reads = &[&x.slice(..), &residual.slice(..)];
    let (sum, out) = (Some(&mut sum.slice_mut(..)), &mut out.slice_mut(..));
    // SAFETY: lengths checked above.
    unsafe { ADD_RMS.launch(stream, norm, Buffers { rows, heads: 1, gate_stride: 0, reads, sum, out }) }
}

/// As [`crate::glue::cpu::gated_rms_norm`]; `o`, `out` `[N, heads, width]`, `z` rows of `[heads width]`.
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
    let width = norm.weight.len();
    team(GATED.op, width)?;
    if heads == 0 {
        let (expected, got) = ("at least 1".into(), "0".into());
        return Err(Error::Value { op: GATED.op, arg: "heads", expected, got });
    }
    let rows = rows_of(GATED.op, "o", o.len(), heads * width)?;
    z.check(GATED.op, "z", rows, heads * width)?;
    expect_len(GATED.op, "out", &[rows, heads, width], out.len())?;
    let (reads, out) = (&[&o.slice(..), &z.data.slice(..)], &mut out.slice_mut(..));
    let buffers = Buffers { rows, heads, gate_stride: z.stride, reads, sum: None, out };
    // SAFETY: lengths checked above.
    unsafe { GATED.launch(stream, norm, buffers) }
}
