//! Eight values side by side, in AVX2 registers or in plain arrays.

use super::{Kernel, Real};

/// Lanes of every sum: element `i` is added in lane `i % 8`, the lanes are added at the end in a fixed tree.
pub(crate) const LANES: usize = 8;

/// Eight values. Every implementation gives the same bits.
pub(crate) trait Lanes<T>: Copy {
    /// Eight zeros.
    fn zero() -> Self;
    /// Eight values from memory.
    fn load(values: &[T; LANES]) -> Self;
    /// Up to eight values, then zeros.
    fn load_part(values: &[T]) -> Self;
    /// Eight times the same value.
    fn splat(value: T) -> Self;
    /// Eight values to memory.
    fn store(self, out: &mut [T; LANES]);
    /// `self * x`, lane by lane.
    fn mul(self, x: Self) -> Self;
    /// `self * x + sum`, each lane rounded once.
    fn fma(self, x: Self, sum: Self) -> Self;
    /// Adds the lanes of both: `((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))`.
    fn sum2(a: Self, b: Self) -> [T; 2];
}

/// An instruction set.
pub(crate) trait Simd {
    /// Eight f32.
    type F32: Lanes<f32>;
    /// Eight f64.
    type F64: Lanes<f64>;
}

/// Any CPU.
pub(super) struct Portable;

impl Simd for Portable {
    type F32 = [f32; LANES];
    type F64 = [f64; LANES];
}

impl<T: Real> Lanes<T> for [T; LANES] {
    #[inline(always)]
    fn zero() -> Self {
        [T::ZERO; LANES]
    }

    #[inline(always)]
    fn load(values: &[T; LANES]) -> Self {
        *values
    }

    #[inline(always)]
    fn load_part(values: &[T]) -> Self {
        let mut lanes = Self::zero();
        lanes[..values.len()].copy_from_slice(values);
        lanes
    }

    #[inline(always)]
    fn splat(value: T) -> Self {
        [value; LANES]
    }

    #[inline(always)]
    fn store(self, out: &mut [T; LANES]) {
        *out = self;
    }

    #[inline(always)]
    fn mul(self, x: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * x[lane])
    }

    #[inline(always)]
    fn fma(self, x: Self, sum: Self) -> Self {
        std::array::from_fn(|lane| self[lane].fma(x[lane], sum[lane]))
    }

    #[inline(always)]
    fn sum2(a: Self, b: Self) -> [T; 2] {
        [a, b].map(|l| ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])))
    }
}

/// Runs a kernel with the widest instruction set of this machine. Every set gives the same bits.
pub(crate) fn dispatch(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn wide(kernel: impl Kernel) {
            kernel.run::<avx2::Avx2>();
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just found on this machine.
            return unsafe { wide(kernel) };
        }
    }
    kernel.run::<Portable>();
}

/// Only [`dispatch`] names this set, after it has found AVX2 and FMA on the machine.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes, Simd};

    pub(super) struct Avx2;

    impl Simd for Avx2 {
        type F32 = F32x8;
        type F64 = F64x8;
    }

    #[derive(Clone, Copy)]
    pub(super) struct F32x8(__m256);

    impl Lanes<f32> for F32x8 {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            // SAFETY: AVX2 as above; the array holds the 32 bytes that are read, and needs no alignment.
            Self(unsafe { _mm256_loadu_ps(values.as_ptr()) })
        }

        #[inline(always)]
        fn load_part(values: &[f32]) -> Self {
            Self::load(&<[f32; LANES] as Lanes<f32>>::load_part(values))
        }

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        fn store(self, out: &mut [f32; LANES]) {
            // SAFETY: AVX2 as above; the array holds the 32 bytes that are written, and needs no alignment.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        fn mul(self, x: Self) -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { _mm256_mul_ps(self.0, x.0) })
        }

        #[inline(always)]
        fn fma(self, x: Self, sum: Self) -> Self {
            // SAFETY: the module's users run on a machine with FMA.
            Self(unsafe { _mm256_fmadd_ps(self.0, x.0, sum.0) })
        }

        #[inline(always)]
        fn sum2(a: Self, b: Self) -> [f32; 2] {
            // SAFETY: AVX2 as above.
            unsafe {
                let [a, b] =
                    [a.0, b.0].map(|l| _mm_add_ps(_mm256_castps256_ps128(l), _mm256_extractf128_ps::<1>(l)));
                let pairs = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
                let sums = _mm_add_ps(pairs, _mm_movehl_ps(pairs, pairs));
                [_mm_cvtss_f32(sums), _mm_cvtss_f32(_mm_movehdup_ps(sums))]
            }
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct F64x8([__m256d; 2]);

    impl Lanes<f64> for F64x8 {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { [_mm256_setzero_pd(); 2] })
        }

        #[inline(always)]
        fn load(values: &[f64; LANES]) -> Self {
            // SAFETY: AVX2 as above; the array holds the twice 32 bytes that are read, and needs no alignment.
            Self(unsafe { [_mm256_loadu_pd(values.as_ptr()), _mm256_loadu_pd(values.as_ptr().add(4))] })
        }

        #[inline(always)]
        fn load_part(values: &[f64]) -> Self {
            Self::load(&<[f64; LANES] as Lanes<f64>>::load_part(values))
        }

        #[inline(always)]
        fn splat(value: f64) -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { [_mm256_set1_pd(value); 2] })
        }

        #[inline(always)]
        fn store(self, out: &mut [f64; LANES]) {
            // SAFETY: AVX2 as above; the array holds the twice 32 bytes that are written.
            unsafe {
                _mm256_storeu_pd(out.as_mut_ptr(), self.0[0]);
                _mm256_storeu_pd(out.as_mut_ptr().add(4), self.0[1]);
            }
        }

        #[inline(always)]
        fn mul(self, x: Self) -> Self {
            // SAFETY: the module's users run on a machine with AVX2.
            Self(unsafe { [_mm256_mul_pd(self.0[0], x.0[0]), _mm256_mul_pd(self.0[1], x.0[1])] })
        }

        #[inline(always)]
        fn fma(self, x: Self, sum: Self) -> Self {
            let [low, high] = [0, 1].map(|half| (self.0[half], x.0[half], sum.0[half]));
            // SAFETY: the module's users run on a machine with FMA.
            Self(unsafe { [_mm256_fmadd_pd(low.0, low.1, low.2), _mm256_fmadd_pd(high.0, high.1, high.2)] })
        }

        #[inline(always)]
        fn sum2(a: Self, b: Self) -> [f64; 2] {
            [a, b].map(|l| {
                let mut fours = [0.0; 4];
                // SAFETY: AVX2 as above; the array holds the 32 bytes that are written.
                unsafe { _mm256_storeu_pd(fours.as_mut_ptr(), _mm256_add_pd(l.0[0], l.0[1])) };
                (fours[0] + fours[2]) + (fours[1] + fours[3])
            })
        }
    }
}
