//! CPU forward over packed weights.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
pub use super::pack::PackedWeight;
use super::pack::{Bf16Step, F32Step, PANEL, Panels, Step};
use super::portable;
use super::tile::{Job, Kernels, Output};
use crate::error::expect_len;
use crate::{Error, Result};

/// Multiply-adds below which one thread does the whole product.
const SERIAL_WORK: usize = 1 << 16;

/// Panels that a thread takes at a time when it has few rows.
const GRAIN: usize = 8;

/// `outs[p] [rows, out_p] = x [rows, in] W_p^T`, f32 accumulation in one fixed order per element.
///
/// # Errors
/// Another number of buffers than parts, or a buffer whose length is not rows times its width.
pub fn forward(weight: &PackedWeight, x: &[f32], outs: &mut [&mut [f32]]) -> Result<()> {
    let op = "linear";
    let inputs = weight.inputs();
    let rows = x.len() / inputs;
    expect_len(op, "x", &[rows, inputs], x.len())?;
    if outs.len() != weight.outputs().len() {
        let (expected, got) = (weight.outputs().len().to_string(), outs.len().to_string());
        return Err(Error::Value { op, arg: "number of outs", expected, got });
    }
    for (out, &width) in outs.iter().zip(weight.outputs()) {
        expect_len(op, "out", &[rows, width], out.len())?;
    }
    if rows == 0 {
        return Ok(());
    }
    let outs: Vec<_> =
        outs.iter_mut().zip(weight.outputs()).map(|(out, &width)| Output::new(out, width)).collect();
    let (places, outs) = (weight.places.as_slice(), outs.as_slice());
    match &weight.panels {
        Panels::Bf16(steps) => spread(&Job { kernels: bf16_kernels(), steps, places, inputs, x, rows, outs }),
        Panels::F32(steps) => spread(&Job { kernels: f32_kernels(), steps, places, inputs, x, rows, outs }),
    }
    Ok(())
}

fn bf16_kernels() -> &'static Kernels<Bf16Step> {
    #[cfg(target_arch = "x86_64")]
    if avx2::available() {
        return &avx2::BF16;
    }
    const { &portable::kernels() }
}

fn f32_kernels() -> &'static Kernels<F32Step> {
    #[cfg(target_arch = "x86_64")]
    if avx2::available() {
        return &avx2::F32;
    }
    const { &portable::kernels() }
}

/// Splits the panels over the threads of the current pool.
fn spread<S: Step>(job: &Job<'_, S>) {
    let panels = job.places.len();
    let work = panels * PANEL * job.inputs * job.rows;
    if work <= SERIAL_WORK || rayon::current_num_threads() == 1 {
        // SAFETY: the kernels were chosen for this CPU; one thread has all panels.
        return unsafe { job.run(0..panels) };
    }
    halve(job, 0..panels);
}

fn halve<S: Step>(job: &Job<'_, S>, panels: Range<usize>) {
    if panels.len() <= GRAIN {
        // SAFETY: the kernels were chosen for this CPU; the recursion gives each panel to one call.
        return unsafe { job.run(panels) };
    }
    let middle = panels.start + panels.len() / 2;
    rayon::join(|| halve(job, panels.start..middle), || halve(job, middle..panels.end));
}
