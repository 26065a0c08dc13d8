//! The walk of register tiles over panels, inputs and rows.

use std::marker::PhantomData;
use std::ops::Range;

use super::K_SPAN;
use super::pack::{PANEL, PanelPlace, Step};

/// Most rows of one tile, and most rows times panels.
pub(super) const TILE: usize = 6;

/// What one tile reads, `len` inputs of its panels and rows, and where its results go.
pub(super) struct Span<S> {
    /// First step of the first panel.
    pub panels: *const S,
    /// Steps between panels.
    pub panel_stride: usize,
    /// First input of the first row.
    pub x: *const f32,
    /// Inputs between rows.
    pub x_stride: usize,
    /// Inputs.
    pub len: usize,
    /// The sums of row r and panel p go to entry `r * P + p`; all entries are writable.
    pub sums: [*mut [f32; PANEL]; TILE],
}

/// Computes one tile: each sum is one chain of multiply-adds from 0 over the span's inputs, upwards. May write to all
/// of `sums`.
pub(super) type Tile<S> = unsafe fn(&Span<S>);

/// Tiles of one instruction set: entry `[r - 1][p - 1]` has r rows and p panels; every row count up to [`TILE`] has a
/// tile of one panel.
pub(super) struct Kernels<S: 'static>(pub [&'static [Tile<S>]; TILE]);

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

    /// The outputs of one panel and row.
    ///
    /// # Safety
    /// No other live reference covers them.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slot(&self, row: usize, place: &PanelPlace) -> &mut [f32] {
        let start = row * self.width + place.column;
        assert!(place.column + place.width <= self.width && start + place.width <= self.len);
        // SAFETY: inside the buffer (asserted), and not aliased (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), place.width) }
    }
}

/// One product.
pub(super) struct Job<'a, S: 'static> {
    pub kernels: &'a Kernels<S>,
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
    /// The CPU has the kernels' instructions, and no other thread works on these panels of the same product.
    pub(super) unsafe fn run(&self, panels: Range<usize>) {
        let mut first = panels.start;
        let most = if self.rows > TILE { 1 } else { self.kernels.0[self.rows - 1].len() };
        for group in (1..=most).rev() {
            // Each of the group's panels walks through its own contiguous part of the weights.
            let stride = (panels.end - first) / group;
            for panel in first..first + stride {
                // SAFETY: the caller's promise.
                unsafe { self.group(panel, stride, group) };
            }
            first += stride * group;
        }
    }

    /// All rows of `group` panels, `stride` apart.
    unsafe fn group(&self, first: usize, stride: usize, group: usize) {
        let tiles = self.rows.div_ceil(TILE);
        for from in (0..self.inputs).step_by(K_SPAN) {
            let span = from..self.inputs.min(from + K_SPAN);
            for tile in 0..tiles {
                let rows = tile * self.rows / tiles..(tile + 1) * self.rows / tiles;
                // SAFETY: the caller's promise.
                unsafe { self.tile(rows, (first, stride, group), span.clone()) };
            }
        }
    }

    /// `rows` of the panels `(first, stride, count)` over one span of inputs.
    unsafe fn tile(
        &self,
        rows: Range<usize>,
        (first, stride, group): (usize, usize, usize),
        inputs: Range<usize>,
    ) {
        let (n, last) = (self.inputs, first + (group - 1) * stride);
        assert!(last < self.places.len() && self.places.len() * n <= self.steps.len());
        assert!(inputs.end <= n && rows.end * n <= self.x.len());
        let mut scratch = [[0f32; PANEL]; TILE];
        let sums = scratch.each_mut().map(|sums| sums as *mut _);
        let mut span = Span {
            panels: self.steps[first * n + inputs.start..].as_ptr(),
            panel_stride: stride * n,
            x: self.x[rows.start * n + inputs.start..].as_ptr(),
            x_stride: n,
            len: inputs.len(),
            sums,
        };
        // SAFETY: this thread owns these panels' outputs, and the slice is dropped before the next.
        let slot = |r: usize, p: usize| unsafe {
            let place = &self.places[first + p * stride];
            self.outs[place.part].slot(rows.start + r, place)
        };
        let add = inputs.start > 0;
        let whole = |p: usize| !add && self.places[first + p * stride].width == PANEL;
        for (r, p) in (0..rows.len()).flat_map(|r| (0..group).map(move |p| (r, p))) {
            if whole(p) {
                span.sums[r * group + p] = slot(r, p).as_mut_ptr().cast();
            }
        }
        // SAFETY: the CPU has the instructions (the caller's promise); what the span reads lies in both buffers
        // (asserted); its sums are PANEL elements each, of the outputs or of `scratch`.
        unsafe { self.kernels.0[rows.len() - 1][group - 1](&span) };
        for (r, p) in (0..rows.len()).flat_map(|r| (0..group).map(move |p| (r, p))) {
            if !whole(p) {
                keep(slot(r, p), &scratch[r * group + p], add);
            }
        }
    }
}

/// Writes one panel's outputs of one row, or adds them to the spans before.
#[inline(always)]
fn keep(out: &mut [f32], sums: &[f32; PANEL], add: bool) {
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if add { *out + sum } else { *sum };
    }
}
