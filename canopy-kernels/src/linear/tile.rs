//! The walk of register tiles over panels, inputs and rows.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::K_SPAN;
use super::pack::{PANEL, PanelPlace, Step};

/// Most rows of one tile, and most rows times panels.
pub(super) const TILE: usize = 6;

/// Bytes of panels that many rows pass over together: half of a small first cache.
const NEAR_BYTES: usize = 16 << 10;

/// Panels that are near at least, so that tiles of three rows, which one panel leaves half empty, find two.
const LEAST_NEAR: usize = 2;

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

/// Panels `first, first + stride, ..`, `count` of them, in one tile.
#[derive(Clone, Copy)]
struct Group {
    first: usize,
    stride: usize,
    count: usize,
}

/// A part's output buffer `[rows, width]`, shared by the threads of one product.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    base: *mut f32,
    len: usize,
    width: usize,
    life: PhantomData<&'a mut [MaybeUninit<f32>]>,
}

// SAFETY: threads write through `slot`, whose caller promises disjoint elements.
unsafe impl Send for Output<'_> {}
// SAFETY: as above; nothing reads through a shared reference.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// A buffer that need not be initialised: a product writes every element before it reads it.
    pub(super) fn new(buffer: &'a mut [MaybeUninit<f32>], width: usize) -> Self {
        Self { base: buffer.as_mut_ptr().cast(), len: buffer.len(), width, life: PhantomData }
    }

    /// The outputs of one panel and row, `place.width` of them inside the buffer.
    pub(super) fn slot(&self, row: usize, place: &PanelPlace) -> *mut f32 {
        let start = row * self.width + place.column;
        assert!(place.column + place.width <= self.width && start + place.width <= self.len);
        self.base.wrapping_add(start)
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
        if self.rows > TILE {
            // SAFETY: the caller's promise.
            return unsafe { self.many_rows(panels) };
        }
        let mut first = panels.start;
        for count in (1..=self.kernels.0[self.rows - 1].len()).rev() {
            // Each of a group's panels walks through its own contiguous part of the weights.
            let stride = (panels.end - first) / count;
            for panel in first..first + stride {
                for span in self.spans() {
                    // SAFETY: the caller's promise.
                    unsafe { self.tile(0..self.rows, Group { first: panel, stride, count }, span) };
                }
            }
            first += stride * count;
        }
    }

    /// Tiles in an order that keeps a few panels and one tile's inputs near. The first tile, the largest, takes one panel at a
    /// time, so that weights come in as one stream; the others take as many panels as fill the registers.
    unsafe fn many_rows(&self, panels: Range<usize>) {
        let tiles = self.rows.div_ceil(TILE);
        let bound = |tile: usize| (tile * self.rows).div_ceil(tiles);
        let depth = (NEAR_BYTES / (self.inputs.min(K_SPAN) * size_of::<S>())).max(LEAST_NEAR);
        for from in panels.clone().step_by(depth) {
            for span in self.spans() {
                for tile in 0..tiles {
                    let (rows, end) = (bound(tile)..bound(tile + 1), panels.end.min(from + depth));
                    let most = if tile == 0 { 1 } else { self.kernels.0[rows.len() - 1].len() };
                    let mut first = from;
                    while first < end {
                        let group = Group { first, stride: 1, count: most.min(end - first) };
                        // SAFETY: the caller's promise.
                        unsafe { self.tile(rows.clone(), group, span.clone()) };
                        first += group.count;
                    }
                }
            }
        }
    }

    fn spans(&self) -> impl Iterator<Item = Range<usize>> {
        let inputs = self.inputs;
        (0..inputs).step_by(K_SPAN).map(move |from| from..inputs.min(from + K_SPAN))
    }

    /// `rows` of one group of panels over one span of inputs.
    unsafe fn tile(&self, rows: Range<usize>, group: Group, inputs: Range<usize>) {
        let Group { first, stride, count } = group;
        let (n, last) = (self.inputs, first + (count - 1) * stride);
        assert!(last < self.places.len() && self.places.len() * n <= self.steps.len());
        assert!(inputs.end <= n && rows.end * n <= self.x.len());
        // Not cleared: a tile writes to all of `sums`, and only what it computed is read.
        let mut scratch = [const { MaybeUninit::<[f32; PANEL]>::uninit() }; TILE];
        let sums = scratch.each_mut().map(MaybeUninit::as_mut_ptr);
        let mut span = Span {
            panels: self.steps[first * n + inputs.start..].as_ptr(),
            panel_stride: stride * n,
            x: self.x[rows.start * n + inputs.start..].as_ptr(),
            x_stride: n,
            len: inputs.len(),
            sums,
        };
        let slot = |r: usize, p: usize| {
            let place = &self.places[first + p * stride];
            (self.outs[place.part].slot(rows.start + r, place), place.width)
        };
        let add = inputs.start > 0;
        let whole = |p: usize| !add && self.places[first + p * stride].width == PANEL;
        let mut kept = false;
        for p in 0..count {
            if !whole(p) {
                kept = true;
                continue;
            }
            for r in 0..rows.len() {
                span.sums[r * count + p] = slot(r, p).0.cast();
            }
        }
        // SAFETY: the CPU has the instructions (the caller's promise); what the span reads lies in both buffers
        // (asserted); its sums are PANEL elements each, of the outputs or of `scratch`.
        unsafe { self.kernels.0[rows.len() - 1][count - 1](&span) };
        if !kept {
            return;
        }
        for (r, p) in (0..rows.len()).flat_map(|r| (0..count).map(move |p| (r, p))) {
            if !whole(p) {
                let (out, width) = slot(r, p);
                // SAFETY: the tile wrote the sums of every row and panel that it has; `slot` is inside the buffer, this
                // thread owns these panels' outputs, and the span before wrote what is added to.
                unsafe { keep(out, &scratch[r * count + p].assume_init_ref()[..width], add) };
            }
        }
    }
}

/// Writes one panel's outputs of one row, or adds them to the spans before.
///
/// # Safety
/// `out` may be written for as many elements as there are sums, by this thread alone, and read if `add`.
#[inline(always)]
unsafe fn keep(out: *mut f32, sums: &[f32], add: bool) {
    for (index, &sum) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let out = out.add(index);
            out.write(if add { out.read() + sum } else { sum });
        }
    }
}
