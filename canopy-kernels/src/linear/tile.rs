//! The register tile and its walk over panels, inputs and rows.

use std::marker::PhantomData;
use std::ops::Range;

use super::K_SPAN;
use super::lanes::Lanes;
use super::pack::{PANEL, PanelPlace, Step};

/// Most rows of one tile: 12 accumulators of the 16 vector registers.
const TILE_ROWS: usize = 6;

/// A part's output buffer `[rows, width]`, shared by the threads of one product.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    base: *mut f32,
    len: usize,
    width: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: threads write through `slot`, whose caller promises disjoint elements.
unsafe impl Send for Output<'_> {}
// SAFETY: as above; nothing reads through a shared reference.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(super) fn new(buffer: &'a mut [f32], width: usize) -> Self {
        Self { base: buffer.as_mut_ptr(), len: buffer.len(), width, life: PhantomData }
    }

    /// `len` elements of `row` from `column` on.
    ///
    /// # Safety
    /// No other live reference covers these elements.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    unsafe fn slot(&self, row: usize, column: usize, len: usize) -> &mut [f32] {
        let start = row * self.width + column;
        assert!(column + len <= self.width && start + len <= self.len);
        // SAFETY: inside the buffer (asserted), and not aliased (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), len) }
    }
}

/// One product.
#[derive(Clone, Copy)]
pub(super) struct Job<'a, S> {
    pub steps: &'a [S],
    pub places: &'a [PanelPlace],
    pub inputs: usize,
    pub x: &'a [f32],
    pub rows: usize,
    pub outs: &'a [Output<'a>],
}

impl<S: Step> Job<'_, S> {
    /// All rows of the given panels.
    ///
    /// # Safety
    /// No other thread works on these panels of the same product.
    #[inline(always)]
    pub(super) unsafe fn run<L: Lanes>(&self, panels: Range<usize>) {
        let mut first = panels.start;
        while first < panels.end {
            let left = panels.end - first;
            // SAFETY: the caller's promise, for each group of these panels.
            first += unsafe {
                match self.rows {
                    1 if left >= 4 => self.group::<L, 4>(first),
                    1 | 2 if left >= 3 => self.group::<L, 3>(first),
                    1..=3 if left >= 2 => self.group::<L, 2>(first),
                    _ => self.group::<L, 1>(first),
                }
            };
        }
    }

    /// All rows of `P` panels; returns `P`.
    #[inline(always)]
    unsafe fn group<L: Lanes, const P: usize>(&self, first: usize) -> usize {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        for from in (0..self.inputs).step_by(K_SPAN) {
            let span = from..self.inputs.min(from + K_SPAN);
            for tile in 0..tiles {
                let row = tile * self.rows / tiles;
                let rows = (tile + 1) * self.rows / tiles - row;
                // SAFETY: the caller's promise.
                unsafe {
                    match rows {
                        1 => self.tile::<L, 1, P>(first, row, span.clone()),
                        2 => self.tile::<L, 2, P>(first, row, span.clone()),
                        3 => self.tile::<L, 3, P>(first, row, span.clone()),
                        4 => self.tile::<L, 4, P>(first, row, span.clone()),
                        5 => self.tile::<L, 5, P>(first, row, span.clone()),
                        _ => self.tile::<L, 6, P>(first, row, span.clone()),
                    }
                }
            }
        }
        P
    }

    /// `R` rows of `P` panels over one span of inputs.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const P: usize>(
        &self,
        first: usize,
        row: usize,
        span: Range<usize>,
    ) {
        let panels: [&[S]; P] =
            std::array::from_fn(|p| &self.steps[(first + p) * self.inputs..][span.clone()]);
        let x: [&[f32]; R] = std::array::from_fn(|r| &self.x[(row + r) * self.inputs..][span.clone()]);
        let sums = dots::<L, S, R, P>(panels, x);
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, [low, high]) in sums.into_iter().enumerate() {
                let place = self.places[first + p];
                // SAFETY: this thread owns these panels' outputs, and the slice is dropped before the next.
                let out = unsafe { self.outs[place.part].slot(row + r, place.column, place.width) };
                keep(out, low, high, span.start > 0);
            }
        }
    }
}

/// Writes or adds one panel's outputs of one row.
#[inline(always)]
fn keep<L: Lanes>(out: &mut [f32], low: L, high: L, add: bool) {
    let mut padded = [0f32; PANEL];
    let (halves, _) = padded.as_chunks_mut::<8>();
    low.store(&mut halves[0]);
    high.store(&mut halves[1]);
    for (out, sum) in out.iter_mut().zip(padded) {
        *out = if add { *out + sum } else { sum };
    }
}

/// The sums of products of `R` rows and `P` panels, each element one chain over k upwards.
#[inline(always)]
fn dots<L: Lanes, S: Step, const R: usize, const P: usize>(
    panels: [&[S]; P],
    x: [&[f32]; R],
) -> [[[L; 2]; P]; R] {
    let len = x[0].len();
    assert!(panels.iter().all(|panel| panel.len() == len) && x.iter().all(|x| x.len() == len));
    let mut sums = [[[L::zero(); 2]; P]; R];
    for k in 0..len {
        for p in 0..P {
            // SAFETY: k < len, the length of every panel.
            let [low, high] = unsafe { panels[p].get_unchecked(k) }.unpack::<L>();
            for r in 0..R {
                // SAFETY: k < len, the length of every row.
                let x = L::splat(*unsafe { x[r].get_unchecked(k) });
                sums[r][p] = [x.mul_add(low, sums[r][p][0]), x.mul_add(high, sums[r][p][1])];
            }
        }
    }
    sums
}
