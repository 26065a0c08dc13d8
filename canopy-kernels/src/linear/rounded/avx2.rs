//! The tile for AVX2.

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi16, _mm256_add_epi32, _mm256_cvtepi32_ps,
    _mm256_load_si256, _mm256_loadu_ps, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_storeu_ps,
    _mm256_sub_epi32,
};

use super::{LANES, Step};

/// Bytes between what is read and what is asked for.
const AHEAD: usize = 2048;

/// `R` rows: what they bring and where their outputs go.
pub(super) struct Rows<'a, const R: usize> {
    /// Integers, row after row, as many words each as the panel has steps.
    pub quads: &'a [i32],
    /// `s` of every row.
    pub scales: &'a [f32],
    /// What raised weights add to every row's sums.
    pub raised: &'a [i32],
    /// The first output of every row.
    pub outs: [*mut f32; R],
}

/// The first `width` outputs of half a panel, `scales` being its `t`: [`super::Job::keep`] of [`super::sums_portable`].
///
/// # Safety
/// The CPU has AVX2; `width` elements may be written at each of `outs`, by this thread alone.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn tile<const R: usize>(
    panel: &[Step],
    scales: &[f32; LANES],
    width: usize,
    rows: &Rows<'_, R>,
) {
    assert!(rows.quads.len() == R * panel.len() && rows.scales.len() == R && rows.raised.len() == R);
    let one = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_si256(); R];
    for (pair, steps) in panel.as_chunks::<2>().0.iter().enumerate() {
        let at = steps.as_ptr().cast::<__m256i>();
        // SAFETY: a step is an aligned vector, and there are two; a prefetch may name any address.
        let (low, high) = unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
            (_mm256_load_si256(at), _mm256_load_si256(at.add(1)))
        };
        for (r, sum) in sums.iter_mut().enumerate() {
            let first = r * panel.len() + 2 * pair;
            // SAFETY: 2 * pair + 1 < panel.len() and r < R, so both words are among the R * panel.len(), asserted above.
            let (a, b) = unsafe { (*rows.quads.get_unchecked(first), *rows.quads.get_unchecked(first + 1)) };
            let a = _mm256_maddubs_epi16(low, _mm256_set1_epi32(a));
            let b = _mm256_maddubs_epi16(high, _mm256_set1_epi32(b));
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_add_epi16(a, b), one));
        }
    }
    // SAFETY: the array holds the eight values that are read.
    let scales = unsafe { _mm256_loadu_ps(scales.as_ptr()) };
    for (r, sum) in sums.into_iter().enumerate() {
        let sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(rows.raised[r])));
        let y = _mm256_mul_ps(sum, _mm256_mul_ps(_mm256_set1_ps(rows.scales[r]), scales));
        let mut part = [0f32; LANES];
        // SAFETY: eight outputs, or as many as the caller allows, by way of an array that holds eight.
        unsafe {
            match width {
                LANES => _mm256_storeu_ps(rows.outs[r], y),
                _ => {
                    _mm256_storeu_ps(part.as_mut_ptr(), y);
                    rows.outs[r].copy_from_nonoverlapping(part.as_ptr(), width);
                }
            }
        }
    }
}
