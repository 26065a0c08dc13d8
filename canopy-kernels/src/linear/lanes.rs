//! Eight f32 lanes: the few vector operations that the tile needs, per instruction set.

/// Eight f32 values in a register or an array.
pub(super) trait Lanes: Copy {
    /// All lanes 0.
    fn zero() -> Self;
    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// Lane i = `values[i]`.
    fn load(values: &[f32; 8]) -> Self;
    /// Lane i = the bf16 in the low half of `pairs[i]`, and the same of the high halves.
    fn unpack(pairs: &[u32; 8]) -> [Self; 2];
    /// `self * a + sum`, rounded once where the CPU can.
    fn mul_add(self, a: Self, sum: Self) -> Self;
    /// Lane i to `out[i]`.
    fn store(self, out: &mut [f32; 8]);
}

const HIGH: u32 = 0xffff_0000;

/// Plain arrays; the compiler vectorises for whatever the build targets.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Lanes for Portable {
    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; 8])
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 8])
    }

    #[inline(always)]
    fn load(values: &[f32; 8]) -> Self {
        Self(*values)
    }

    #[inline(always)]
    fn unpack(pairs: &[u32; 8]) -> [Self; 2] {
        [Self(pairs.map(|p| f32::from_bits(p << 16))), Self(pairs.map(|p| f32::from_bits(p & HIGH)))]
    }

    #[inline(always)]
    fn mul_add(self, a: Self, sum: Self) -> Self {
        let fused = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
        let one = |i: usize| {
            if fused { self.0[i].mul_add(a.0[i], sum.0[i]) } else { self.0[i] * a.0[i] + sum.0[i] }
        };
        Self(std::array::from_fn(one))
    }

    #[inline(always)]
    fn store(self, out: &mut [f32; 8]) {
        *out = self.0;
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{HIGH, Lanes};

    /// One AVX register. Only code inside a function with `avx2` and `fma` enabled may use this type.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    // Each SAFETY line below rests on the type's rule: the CPU has avx2 and fma when any of this runs.
    impl Lanes for Avx2 {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: avx is there.
            Self(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: avx is there.
            Self(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        fn load(values: &[f32; 8]) -> Self {
            // SAFETY: avx is there; the array has 32 readable bytes.
            Self(unsafe { _mm256_loadu_ps(values.as_ptr()) })
        }

        #[inline(always)]
        fn unpack(pairs: &[u32; 8]) -> [Self; 2] {
            // SAFETY: avx2 is there; the array has 32 readable bytes.
            unsafe {
                let pairs = _mm256_loadu_si256(pairs.as_ptr().cast());
                let low = _mm256_slli_epi32::<16>(pairs);
                let high = _mm256_and_si256(pairs, _mm256_set1_epi32(HIGH as i32));
                [Self(_mm256_castsi256_ps(low)), Self(_mm256_castsi256_ps(high))]
            }
        }

        #[inline(always)]
        fn mul_add(self, a: Self, sum: Self) -> Self {
            // SAFETY: fma is there.
            Self(unsafe { _mm256_fmadd_ps(self.0, a.0, sum.0) })
        }

        #[inline(always)]
        fn store(self, out: &mut [f32; 8]) {
            // SAFETY: avx is there; the array has 32 writable bytes.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), self.0) }
        }
    }
}
