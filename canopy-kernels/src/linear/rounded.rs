//! The product over weights and inputs rounded to seven bits: a quarter of the instructions and half the reads, for
//! drafts, which may be a little wrong.
//!
//! `y[r][o] = (s_r t_o) sum_k X[r][k] V[o][k]` with integers `V = round(W / t)` within ±`MOST` and `X = round(x / s)`
//! within ±`MOST`; `t_o` and `s_r` are the largest absolute weight of an output and input of a row over `MOST`.
//!
//! Invariants:
//! 1. The integer sum never overflows, so its order does not matter: every instruction set, number of rows and of
//!    threads gives the same bits. (`tests::instruction_sets_agree`, `tests::rows_alone_equal_rows_together`)
//! 2. Within `sum_k (|x| t / 2 + |w| s / 2 + s t / 4)` of the f64 oracle, and what f32 loses on the way.
//!    (`tests::oracle_bound`)
//! 3. A row with a NaN or an infinity becomes NaN, and no other row does. (`tests::a_poisoned_row_stays_alone`)
//!
//! Limits: at most [`INPUTS`] inputs.

#[cfg(target_arch = "x86_64")]
mod avx2;

use std::mem::MaybeUninit;
use std::ops::Range;

use super::cpu::{Isa, share};
use super::pack::{PANEL, PackedWeight, PanelPlace};
use super::tile::Output;
use crate::error::expect_len;
use crate::{Error, Result};

const OP: &str = "rounded linear";

/// Largest absolute integer: four products of an input and a raised weight (0 to twice this) fit into 16 bits.
const MOST: f32 = 63.0;
/// What is added to a weight, so that it is never negative.
const RAISED: i32 = MOST as i32;
/// Inputs of one step.
const QUAD: usize = 4;
/// Outputs of one step.
const LANES: usize = 8;
/// Most rows of a tile.
const ROWS: usize = 8;
/// Most inputs: their largest sum fits into 32 bits.
pub const INPUTS: usize = 1 << 17;

/// Four neighbouring inputs' raised weights of eight outputs, output by output.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
struct Step([[u8; QUAD]; LANES]);

/// A [`PackedWeight`] rounded to seven bits.
#[derive(Clone, Debug)]
pub struct RoundedWeight {
    inputs: usize,
    outputs: Vec<usize>,
    places: Vec<PanelPlace>,
    /// Both halves of every panel, each of [`steps`] steps.
    steps: Vec<Step>,
    /// `t` of every half panel's outputs.
    scales: Vec<[f32; LANES]>,
}

/// Steps of half a panel, an even number.
fn steps(inputs: usize) -> usize {
    inputs.div_ceil(2 * QUAD) * 2
}

impl RoundedWeight {
    /// Rounds every output's weights; an output with one that is not finite becomes NaN.
    ///
    /// # Errors
    /// More than [`INPUTS`] inputs.
    pub fn new(weight: &PackedWeight) -> Result<Self> {
        let (inputs, places) = (weight.inputs(), weight.places.clone());
        if inputs > INPUTS {
            let (expected, got) = (format!("at most {INPUTS}"), inputs.to_string());
            return Err(Error::Value { op: OP, arg: "inputs", expected, got });
        }
        let half = steps(inputs);
        let mut steps = vec![Step([[RAISED as u8; QUAD]; LANES]); places.len() * 2 * half];
        let mut scales = vec![[0f32; LANES]; places.len() * 2];
        let (mut row, mut index) = (vec![0f32; inputs], 0);
        let panels = steps.chunks_exact_mut(2 * half).zip(scales.as_chunks_mut::<2>().0);
        for (place, (panel, scales)) in places.iter().zip(panels) {
            for (o, scale) in scales.as_flattened_mut().iter_mut().enumerate().take(place.width) {
                weight.row(index, &mut row)?;
                index += 1;
                *scale = scale_of(&row);
                if !scale.is_normal() {
                    continue;
                }
                for (step, quad) in panel[o / LANES * half..].iter_mut().zip(row.chunks(QUAD)) {
                    for (v, w) in step.0[o % LANES].iter_mut().zip(quad) {
                        *v = ((w / *scale).round() as i32 + RAISED) as u8;
                    }
                }
            }
        }
        Ok(Self { inputs, outputs: weight.outputs().to_vec(), places, steps, scales })
    }

    /// Input width.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Output width of every part.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }
}

/// The largest absolute value over [`MOST`]; NaN when a value is not finite, 0 when all but vanish.
#[inline(always)]
fn scale_of(x: &[f32]) -> f32 {
    // Of non-negative floats the bits are in the order of the values, infinity and NaN above all others.
    let largest = x.iter().fold(0u32, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    match f32::from_bits(largest) / MOST {
        scale if !scale.is_finite() => f32::NAN,
        scale if scale.is_normal() => scale,
        _ => 0.0,
    }
}

/// All rows' integers, four neighbours a word.
struct RoundedRows {
    /// Words of a row, as many as half a panel has steps.
    words: usize,
    quads: Vec<i32>,
    scales: Vec<f32>,
    /// What raised weights add to a row's sums.
    raised: Vec<i32>,
}

impl RoundedRows {
    fn new(isa: Isa, inputs: usize, x: &[f32]) -> Self {
        let (words, rows) = (steps(inputs), x.len() / inputs);
        let mut quads = vec![0; rows * words];
        let (mut scales, mut raised) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        for (x, quads) in x.chunks_exact(inputs).zip(quads.chunks_exact_mut(words)) {
            let (scale, sum) = match isa {
                Isa::Portable => round(x, quads),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the CPU has the instructions of its own set.
                Isa::Avx2 => unsafe { round_avx2(x, quads) },
            };
            scales.push(scale);
            raised.push(sum * RAISED);
        }
        Self { words, quads, scales, raised }
    }
}

/// One row's integers, its `s` and the sum of the integers: zeros when the row is not finite.
#[inline(always)]
fn round(x: &[f32], quads: &mut [i32]) -> (f32, i32) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
    const SHIFT: f32 = 12_582_912.0;
    let scale = scale_of(x);
    if !scale.is_normal() {
        return (scale, 0);
    }
    let inverse = 1.0 / scale;
    let integer = |x: f32| (x * inverse + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
    let word =
        |quad: [i32; QUAD]| (quad[0] & 0xff) | (quad[1] & 0xff) << 8 | (quad[2] & 0xff) << 16 | quad[3] << 24;
    let (whole, rest) = x.as_chunks::<QUAD>();
    let mut sum = 0;
    for (out, quad) in quads.iter_mut().zip(whole) {
        let quad = quad.map(integer);
        sum += quad[0] + quad[1] + quad[2] + quad[3];
        *out = word(quad);
    }
    if !rest.is_empty() {
        let quad = std::array::from_fn(|i| rest.get(i).map_or(0, |&x| integer(x)));
        sum += quad.iter().sum::<i32>();
        quads[whole.len()] = word(quad);
    }
    (scale, sum)
}

/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn round_avx2(x: &[f32], quads: &mut [i32]) -> (f32, i32) {
    round(x, quads)
}

/// The sums of `R` rows, each as long as half a panel, and its outputs, the weights raised.
fn sums_portable<const R: usize>(panel: &[Step], x: &[i32]) -> [[i32; LANES]; R] {
    let mut sums = [[0; LANES]; R];
    for (k, step) in panel.iter().enumerate() {
        for (r, sums) in sums.iter_mut().enumerate() {
            let quad = x[r * panel.len() + k].to_le_bytes().map(|byte| i32::from(byte as i8));
            for (sum, weights) in sums.iter_mut().zip(&step.0) {
                for (x, &w) in quad.iter().zip(weights) {
                    *sum += x * i32::from(w);
                }
            }
        }
    }
    sums
}

/// One product.
struct Job<'a> {
    isa: Isa,
    weight: &'a RoundedWeight,
    rows: &'a RoundedRows,
    outs: &'a [Output<'a>],
}

impl Job<'_> {
    /// All rows of the given panels.
    ///
    /// # Safety
    /// The CPU has the instructions of `isa`, and no other thread works on these panels of the same product.
    unsafe fn run(&self, panels: Range<usize>) {
        let rows = self.rows.scales.len();
        let tiles = rows.div_ceil(ROWS);
        for half in 2 * panels.start..2 * panels.end {
            for tile in 0..tiles {
                let first = tile * rows / tiles;
                // SAFETY: the caller's promise.
                unsafe {
                    match (tile + 1) * rows / tiles - first {
                        1 => self.tile::<1>(half, first),
                        2 => self.tile::<2>(half, first),
                        3 => self.tile::<3>(half, first),
                        4 => self.tile::<4>(half, first),
                        5 => self.tile::<5>(half, first),
                        6 => self.tile::<6>(half, first),
                        7 => self.tile::<7>(half, first),
                        _ => self.tile::<ROWS>(half, first),
                    }
                }
            }
        }
    }

    /// `R` rows of half a panel.
    ///
    /// # Safety
    /// As [`Job::run`].
    unsafe fn tile<const R: usize>(&self, half: usize, first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.isa {
                Isa::Portable => {
                    self.keep(half, first, &sums_portable::<R>(self.steps(half), self.quads::<R>(first)))
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => {
                    let (place, lane, width) = self.outputs(half);
                    let out = |r| self.outs[place.part].slot(first + r, place).wrapping_add(lane);
                    let rows = avx2::Rows {
                        quads: self.quads::<R>(first),
                        scales: &self.rows.scales[first..first + R],
                        raised: &self.rows.raised[first..first + R],
                        outs: std::array::from_fn(out),
                    };
                    avx2::tile::<R>(self.steps(half), &self.weight.scales[half], width, &rows);
                }
            }
        }
    }

    /// Where half a panel's outputs go: the panel's place, the first lane there, and how many there are.
    #[inline(always)]
    fn outputs(&self, half: usize) -> (&PanelPlace, usize, usize) {
        let (place, lane) = (&self.weight.places[half / 2], half % 2 * LANES);
        (place, lane, place.width.saturating_sub(lane).min(LANES))
    }

    #[inline(always)]
    fn steps(&self, half: usize) -> &[Step] {
        &self.weight.steps[half * self.rows.words..(half + 1) * self.rows.words]
    }

    #[inline(always)]
    fn quads<const R: usize>(&self, first: usize) -> &[i32] {
        &self.rows.quads[first * self.rows.words..(first + R) * self.rows.words]
    }

    /// Scales the sums of `R` rows of half a panel into their places.
    ///
    /// # Safety
    /// No other thread writes there.
    #[inline(always)]
    unsafe fn keep<const R: usize>(&self, half: usize, first: usize, sums: &[[i32; LANES]; R]) {
        let (place, lane, width) = self.outputs(half);
        let scales = &self.weight.scales[half];
        for (row, sums) in (first..).zip(sums) {
            let out = self.outs[place.part].slot(row, place).wrapping_add(lane);
            let (scale, raised) = (self.rows.scales[row], self.rows.raised[row]);
            let y: [f32; LANES] = std::array::from_fn(|o| (sums[o] - raised) as f32 * (scale * scales[o]));
            // SAFETY: of the panel's outputs, all inside the buffer, `width` come from `lane` on; this thread owns them.
            unsafe {
                match width {
                    LANES => out.cast::<[f32; LANES]>().write(y),
                    _ => out.copy_from_nonoverlapping(y.as_ptr(), width),
                }
            }
        }
    }
}

/// The product of `x` `[rows, in]` into buffers `[rows, out_p]` that need not be initialised; on success every element
/// of them is.
///
/// # Errors
/// Another number of buffers than parts, or a buffer whose length is not rows times its width.
pub fn forward_into(weight: &RoundedWeight, x: &[f32], outs: Vec<&mut [MaybeUninit<f32>]>) -> Result<()> {
    // SAFETY: the CPU has what it was asked for.
    unsafe { product(Isa::detect(), weight, x, outs) }
}

/// [`forward_into`] on the given instruction set.
///
/// # Safety
/// The CPU has the instructions of `isa`.
unsafe fn product(
    isa: Isa,
    weight: &RoundedWeight,
    x: &[f32],
    mut outs: Vec<&mut [MaybeUninit<f32>]>,
) -> Result<()> {
    let inputs = weight.inputs;
    let rows = x.len() / inputs;
    expect_len(OP, "x", &[rows, inputs], x.len())?;
    if outs.len() != weight.outputs.len() {
        let (expected, got) = (weight.outputs.len().to_string(), outs.len().to_string());
        return Err(Error::Value { op: OP, arg: "number of outs", expected, got });
    }
    for (out, &width) in outs.iter().zip(&weight.outputs) {
        expect_len(OP, "out", &[rows, width], out.len())?;
    }
    if rows == 0 {
        return Ok(());
    }
    let outs: Vec<_> =
        outs.iter_mut().zip(&weight.outputs).map(|(out, &width)| Output::new(out, width)).collect();
    let job = Job { isa, weight, rows: &RoundedRows::new(isa, inputs, x), outs: &outs };
    share(weight.places.len(), PANEL * inputs * rows, |panels| {
        // SAFETY: the caller's promise; each panel is in one piece.
        unsafe { job.run(panels) }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
