//! Arithmetic in one fixed order: sums over eight lanes, fused multiply-adds, whatever the instruction set.

use std::ops::{Add, AddAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// Lanes of every sum: element `i` is added in lane `i % 8`, the lanes are added at the end in a fixed tree.
pub(crate) const LANES: usize = 8;

/// The scalar that a CPU forward computes in.
pub(crate) trait Real:
    Copy
    + Default
    + PartialEq
    + Send
    + Sync
    + std::fmt::Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The nearest value.
    fn from_f64(x: f64) -> Self;
    /// The same value in f64.
    fn to_f64(self) -> f64;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// `e^self`.
    fn exp(self) -> Self;
}

macro_rules! real {
    ($float:ty) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as Self
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn fma(self, b: Self, c: Self) -> Self {
                self.mul_add(b, c)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                self.exp()
            }
        }
    };
}
real!(f32);
real!(f64);

/// Work whose body is compiled once per instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Does the work.
    fn run(self);
}

/// Runs a kernel with the widest instruction set of this machine. Every set gives the same bits.
pub(crate) fn dispatch(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn wide(kernel: impl Kernel) {
            kernel.run();
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just found on this machine.
            return unsafe { wide(kernel) };
        }
    }
    kernel.run();
}

#[inline(always)]
fn lane_sum<T: Real>(l: [T; LANES]) -> T {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// `(row . a, row . b)` of `R` rows, all as long as `a`. A row's sums do not depend on `R`.
#[inline(always)]
pub(crate) fn dots<T: Real, const R: usize>(rows: [&[T]; R], a: &[T], b: &[T]) -> ([T; R], [T; R]) {
    let (mut sum_a, mut sum_b) = ([[T::ZERO; LANES]; R], [[T::ZERO; LANES]; R]);
    let ((a_lanes, a_rest), (b_lanes, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let row_lanes = rows.map(|row| &row[..a.len()].as_chunks::<LANES>().0[..a_lanes.len()]);
    let b_lanes = &b_lanes[..a_lanes.len()];
    for (i, (x, y)) in a_lanes.iter().zip(b_lanes).enumerate() {
        for r in 0..R {
            let s = &row_lanes[r][i];
            for lane in 0..LANES {
                sum_a[r][lane] = s[lane].fma(x[lane], sum_a[r][lane]);
                sum_b[r][lane] = s[lane].fma(y[lane], sum_b[r][lane]);
            }
        }
    }
    for r in 0..R {
        let rest = &rows[r][a.len() - a_rest.len()..];
        for (lane, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
            sum_a[r][lane] = rest[lane].fma(*x, sum_a[r][lane]);
            sum_b[r][lane] = rest[lane].fma(*y, sum_b[r][lane]);
        }
    }
    (sum_a.map(lane_sum), sum_b.map(lane_sum))
}

/// `x . y` in the lane order.
#[inline(always)]
pub(crate) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    dots([x], y, y).0[0]
}

/// `out += factor * x`, element by element, each rounded once.
#[inline(always)]
pub(crate) fn axpy<T: Real>(factor: T, x: &[T], out: &mut [T]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = x.fma(factor, *out);
    }
}
