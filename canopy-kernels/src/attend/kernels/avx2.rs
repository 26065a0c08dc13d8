//! Scores in AVX2 registers, which the compiler does not find by itself: it splits vectors for the sums at the end.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_storeu_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
};

use super::LANES;

/// [`super::dots`] of heads whose width is a multiple of the lanes, with the same bits.
///
/// # Safety
/// The CPU has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dots<const Q: usize, const K: usize>(q: &[&[f32]; Q], k: &[&[f32]; K]) -> [[f32; K]; Q] {
    let width = k[0].len();
    assert!(q.iter().chain(k).all(|x| x.len() == width));
    let mut lanes = [[_mm256_setzero_ps(); K]; Q];
    for at in (0..width / LANES * LANES).step_by(LANES) {
        // SAFETY: eight values from `at` on lie in a slice of `width`, asserted above.
        let load = |x: &[f32]| unsafe { _mm256_loadu_ps(x.as_ptr().add(at)) };
        let mut keys = [_mm256_setzero_ps(); K];
        for j in 0..K {
            keys[j] = load(k[j]);
        }
        for i in 0..Q {
            let query = load(q[i]);
            for j in 0..K {
                lanes[i][j] = _mm256_fmadd_ps(query, keys[j], lanes[i][j]);
            }
        }
    }
    let mut dots = [[0f32; K]; Q];
    let (fours, rest) = lanes.as_flattened().as_chunks::<4>();
    let (out, out_rest) = dots.as_flattened_mut().as_chunks_mut::<4>();
    for (four, out) in fours.iter().zip(out) {
        *out = sums(*four);
    }
    let mut last = [_mm256_setzero_ps(); 4];
    last[..rest.len()].copy_from_slice(rest);
    out_rest.copy_from_slice(&sums(last)[..rest.len()]);
    dots
}

/// The sum of the lanes of each, neighbours first.
#[inline]
#[target_feature(enable = "avx2")]
fn sums(v: [__m256; 4]) -> [f32; 4] {
    let pairs = [_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])];
    let halves = _mm256_hadd_ps(pairs[0], pairs[1]);
    let mut out = [0f32; 4];
    // SAFETY: the array holds the 16 bytes that are written.
    unsafe {
        let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        _mm_storeu_ps(out.as_mut_ptr(), sums);
    }
    out
}
