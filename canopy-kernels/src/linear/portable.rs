//! The tile in plain Rust, vectorised by the compiler for whatever the build targets.

use super::pack::Step;
use super::tile::{Kernels, Span};
use crate::math::{PORTABLE_FMA, mul_add};

/// # Safety
/// `span` covers readable memory.
unsafe fn dots<S: Step, const R: usize, const P: usize>(span: &Span<S>) {
    let mut tile = [[[0f32; 16]; P]; R];
    for k in 0..span.len {
        // SAFETY: k < len, which `span` covers for its P panels and R rows (the caller's promise).
        let weights = |p: usize| unsafe { &*span.panels.add(p * span.panel_stride + k) }.widen();
        // SAFETY: as above.
        let input = |r: usize| unsafe { *span.x.add(r * span.x_stride + k) };
        let weights: [_; P] = std::array::from_fn(weights);
        for (r, row) in tile.iter_mut().enumerate() {
            let x = input(r);
            for (sums, weights) in row.iter_mut().zip(&weights) {
                for (sum, &w) in sums.iter_mut().zip(weights) {
                    *sum = mul_add::<PORTABLE_FMA>(x, w, *sum);
                }
            }
        }
    }
    for (&entry, sums) in span.sums.iter().zip(tile.as_flattened()) {
        // SAFETY: every entry is writable (the caller's promise).
        unsafe { *entry = *sums };
    }
}

/// Every tile.
pub(super) const fn kernels<S: Step>() -> Kernels<S> {
    Kernels([
        &[dots::<S, 1, 1>, dots::<S, 1, 2>],
        &[dots::<S, 2, 1>],
        &[dots::<S, 3, 1>],
        &[dots::<S, 4, 1>],
        &[dots::<S, 5, 1>],
        &[dots::<S, 6, 1>],
    ])
}
