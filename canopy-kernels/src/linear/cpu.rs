//! CPU forward over packed weights.

use std::mem::MaybeUninit;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::avx2;
pub use super::pack::PackedWeight;
use super::pack::{Bf16Step, F32Step, PANEL, Panels, Step};
use super::portable;
use super::tile::{Job, Kernels, Output};
use crate::error::expect_len;
use crate::{Error, Result, team};

/// Multiply-adds below which one thread does the whole product.
const SERIAL_WORK: usize = 1 << 16;

/// Multiply-adds of one piece of work, where there are that many.
const PIECE_WORK: usize = 1 << 17;

/// Pieces per thread that there are at least, for balance.
const PIECES: usize = 2;

/// Which tiles compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Isa {
    /// The best of this CPU.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if avx2::available() {
            return Self::Avx2;
        }
        Self::Portable
    }

    fn bf16(self) -> &'static Kernels<Bf16Step> {
        match self {
            Self::Portable => const { &portable::kernels() },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => &avx2::BF16,
        }
    }

    fn f32(self) -> &'static Kernels<F32Step> {
        match self {
            Self::Portable => const { &portable::kernels() },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => &avx2::F32,
        }
    }
}

/// `outs[p] [rows, out_p] = x [rows, in] W_p^T`, f32 accumulation in one fixed order per element.
///
/// # Errors
/// Another number of buffers than parts, or a buffer whose length is not rows times its width.
pub fn forward(weight: &PackedWeight, x: &[f32], outs: &mut [&mut [f32]]) -> Result<()> {
    // SAFETY: the CPU has what it was asked for.
    unsafe { forward_on(Isa::detect(), weight, x, outs) }
}

/// [`forward`] into buffers that need not be initialised; on success every element of them is.
///
/// # Errors
/// Those of [`forward`].
pub fn forward_into(weight: &PackedWeight, x: &[f32], outs: Vec<&mut [MaybeUninit<f32>]>) -> Result<()> {
    // SAFETY: the CPU has what it was asked for.
    unsafe { product(Isa::detect(), weight, x, outs) }
}

/// [`forward`] with the given tiles.
///
/// # Safety
/// The CPU has the instructions of `isa`.
pub(super) unsafe fn forward_on(
    isa: Isa,
    weight: &PackedWeight,
    x: &[f32],
    outs: &mut [&mut [f32]],
) -> Result<()> {
    let uninit = |out: &mut &mut [f32]| {
        // SAFETY: a product writes numbers only, so the elements stay initialised.
        unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), out.len()) }
    };
    let outs = outs.iter_mut().map(uninit).collect();
    // SAFETY: the caller's promise.
    unsafe { product(isa, weight, x, outs) }
}

/// [`forward_into`] with the given tiles.
///
/// # Safety
/// As [`forward_on`].
unsafe fn product(
    isa: Isa,
    weight: &PackedWeight,
    x: &[f32],
    mut outs: Vec<&mut [MaybeUninit<f32>]>,
) -> Result<()> {
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
        Panels::Bf16(steps) => spread(&Job { kernels: isa.bf16(), steps, places, inputs, x, rows, outs }),
        Panels::F32(steps) => spread(&Job { kernels: isa.f32(), steps, places, inputs, x, rows, outs }),
    }
    Ok(())
}

/// The job over the threads of the current pool.
fn spread<S: Step>(job: &Job<'_, S>) {
    share(job.places.len(), PANEL * job.inputs * job.rows, |panels| {
        // SAFETY: the kernels were chosen for this CPU; each panel is in one piece.
        unsafe { job.run(panels) }
    });
}

/// Splits panels of `panel_work` multiply-adds each over the threads of the current pool.
pub(super) fn share(panels: usize, panel_work: usize, run: impl Fn(Range<usize>) + Sync) {
    let threads = rayon::current_num_threads();
    let serial = threads == 1 || panels * panel_work <= SERIAL_WORK;
    let piece = match serial {
        true => panels,
        false => (PIECE_WORK / panel_work).clamp(1, panels.div_ceil(PIECES * threads)),
    };
    team::for_each(panels.div_ceil(piece), |index| run(index * piece..panels.min((index + 1) * piece)));
}
