//! CPU forward over packed weights.

use std::ops::Range;

use super::lanes::Portable;
pub use super::pack::PackedWeight;
use super::pack::{Panels, Step};
use super::tile::{Job, Output};
use crate::error::expect_len;
use crate::{Error, Result};

/// Multiply-adds below which one thread does the whole product.
const SERIAL_WORK: usize = 1 << 16;

/// Panels that a thread takes at a time when it has few rows.
const GRAIN: usize = 4;

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
        Panels::Bf16(steps) => spread(Job { steps, places, inputs, x, rows, outs }),
        Panels::F32(steps) => spread(Job { steps, places, inputs, x, rows, outs }),
    }
    Ok(())
}

/// Splits the panels over the threads of the current pool.
fn spread<S: Step>(job: Job<'_, S>) {
    let panels = job.places.len();
    let work = panels * 16 * job.inputs * job.rows;
    if work <= SERIAL_WORK || rayon::current_num_threads() == 1 {
        return run(job, 0..panels);
    }
    halve(job, 0..panels);
}

fn halve<S: Step>(job: Job<'_, S>, panels: Range<usize>) {
    if panels.len() <= GRAIN {
        return run(job, panels);
    }
    let middle = panels.start + (panels.len() / 2).next_multiple_of(GRAIN).min(panels.len() - 1);
    rayon::join(|| halve(job, panels.start..middle), || halve(job, middle..panels.end));
}

/// These panels on this thread, on the best instruction set. The caller gives each panel to one thread only.
fn run<S: Step>(job: Job<'_, S>, panels: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: both features were just detected; each panel is given to one thread.
        return unsafe { run_avx2(job, panels) };
    }
    // SAFETY: each panel is given to one thread.
    unsafe { job.run::<Portable>(panels) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<S: Step>(job: Job<'_, S>, panels: Range<usize>) {
    // SAFETY: the caller gives each panel to one thread.
    unsafe { job.run::<super::lanes::Avx2>(panels) }
}
