//! Arithmetic in one fixed order: sums over eight lanes, fused multiply-adds, whatever the instruction set.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::team;

mod lanes;

pub(crate) use lanes::{LANES, Lanes, Simd, dispatch};

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
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    /// Eight of them in the registers of an instruction set.
    type Lanes<S: Simd>: Lanes<Self>;
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
    /// The square root.
    fn sqrt(self) -> Self;
}

macro_rules! real {
    ($float:ty, $lanes:ty) => {
        impl Real for $float {
            type Lanes<S: Simd> = $lanes;
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
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
        }
    };
}
real!(f32, S::F32);
real!(f64, S::F64);

/// Work whose body is compiled once per instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Does the work.
    fn run<S: Simd>(self);
}

/// Multiply-adds below which one thread does a whole call. One row of a model's states is as much as this: they come
/// from beyond the second-level cache, and two threads read them twice as fast.
const PARALLEL_FROM: usize = 1 << 16;

/// [`dispatch`] of independent tasks that need `multiply_adds` together, over the current rayon pool where it pays.
pub(crate) fn dispatch_all<K: Kernel + Send>(tasks: Vec<K>, multiply_adds: usize) {
    if multiply_adds >= PARALLEL_FROM {
        team::for_all(tasks.into_iter(), dispatch);
    } else {
        tasks.into_iter().for_each(dispatch);
    }
}

/// `[row . a, row . b]` of `R` rows `[R, a.len()]`. A row's sums do not depend on how many rows run side by side;
/// five keep the multiply-adders of a core busy. `TAIL`: the length is no multiple of the lanes.
#[inline(always)]
fn dots<S: Simd, T: Real, const R: usize, const TAIL: bool>(
    rows: &[T],
    a: &[T],
    b: &[T],
    out: &mut [[T; 2]],
) {
    let width = a.len();
    assert!(rows.len() == R * width && b.len() == width && out.len() == R);
    let zero = T::Lanes::<S>::zero();
    let mut sums = [[zero; 2]; R];
    let (a_lanes, b_lanes) = (lanes(a), lanes(b));
    for (i, (x, y)) in a_lanes.iter().zip(b_lanes).enumerate() {
        let (x, y) = (T::Lanes::<S>::load(x), T::Lanes::<S>::load(y));
        for (r, sum) in sums.iter_mut().enumerate() {
            // SAFETY: i < width / LANES and r < R, so the lanes end at or before R * width, asserted above.
            let s = T::Lanes::<S>::load(unsafe { &*rows.as_ptr().add(r * width + i * LANES).cast() });
            *sum = [s.fma(x, sum[0]), s.fma(y, sum[1])];
        }
    }
    if TAIL {
        let whole = a_lanes.len() * LANES;
        let (x, y) = (T::Lanes::<S>::load_part(&a[whole..]), T::Lanes::<S>::load_part(&b[whole..]));
        for (r, sum) in sums.iter_mut().enumerate() {
            let s = T::Lanes::<S>::load_part(&rows[r * width + whole..(r + 1) * width]);
            *sum = [s.fma(x, sum[0]), s.fma(y, sum[1])];
        }
    }
    for (out, [a, b]) in out.iter_mut().zip(sums) {
        *out = T::Lanes::<S>::sum2(a, b);
    }
}

/// `[row . a, row . b]` of every row of `rows` `[n, a.len()]`.
#[inline(always)]
pub(crate) fn row_dots<S: Simd, T: Real>(rows: &[T], a: &[T], b: &[T], out: &mut [[T; 2]]) {
    if a.len().is_multiple_of(LANES) {
        grouped_dots::<S, T, false>(rows, a, b, out);
    } else {
        grouped_dots::<S, T, true>(rows, a, b, out);
    }
}

#[inline(always)]
fn grouped_dots<S: Simd, T: Real, const TAIL: bool>(rows: &[T], a: &[T], b: &[T], out: &mut [[T; 2]]) {
    let width = a.len();
    let mut groups = rows.chunks_exact(5 * width);
    let mut outs = out.chunks_exact_mut(5);
    for (group, out) in (&mut groups).zip(&mut outs) {
        dots::<S, T, 5, TAIL>(group, a, b, out);
    }
    let (rows, out) = (groups.remainder(), outs.into_remainder());
    let (three, rest) = rows.split_at(if rows.len() >= 3 * width { 3 * width } else { 0 });
    let (out3, out) = out.split_at_mut(three.len() / width);
    if !three.is_empty() {
        dots::<S, T, 3, TAIL>(three, a, b, out3);
    }
    for (row, out) in rest.chunks_exact(width).zip(out.chunks_exact_mut(1)) {
        dots::<S, T, 1, TAIL>(row, a, b, out);
    }
}

/// `x . y` in the lane order.
#[inline(always)]
pub(crate) fn dot<S: Simd, T: Real>(x: &[T], y: &[T]) -> T {
    let mut out = [[T::ZERO; 2]];
    row_dots::<S, T>(x, y, y, &mut out);
    out[0][0]
}

/// `out = scale * x / sqrt(x . x + 1e-6)`: the L2 norm of queries and keys.
#[inline(always)]
pub(crate) fn normalise<S: Simd, T: Real>(x: &[T], scale: T, out: &mut [T]) {
    let factor = scale / (dot::<S, T>(x, x) + T::from_f64(1e-6)).sqrt();
    for (out, &x) in out.iter_mut().zip(x) {
        *out = x * factor;
    }
}

#[inline(always)]
fn lanes<T>(x: &[T]) -> &[[T; LANES]] {
    x.as_chunks().0
}

/// Zeros that start at a cache line, so that no vector load of a row straddles two.
#[derive(Default)]
pub(crate) struct Aligned<T> {
    buffer: Vec<T>,
    start: usize,
}

impl<T: Real> Aligned<T> {
    const LINE: usize = 64;

    /// `len` zeros.
    pub(crate) fn new(len: usize) -> Self {
        let spare = Self::LINE / size_of::<T>();
        let buffer = vec![T::ZERO; len + spare];
        // `align_offset` may decline to answer; any start is right, this one is fast.
        let start = buffer.as_ptr().align_offset(Self::LINE).min(spare);
        Self { buffer, start }
    }
}

impl<T> std::ops::Deref for Aligned<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        &self.buffer[self.start..]
    }
}

impl<T> std::ops::DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Compare<'a, T> {
        rows: &'a [T],
        a: &'a [T],
        b: &'a [T],
        out: &'a mut Vec<[T; 2]>,
    }

    impl<T: Real> Kernel for Compare<'_, T> {
        #[inline(always)]
        fn run<S: Simd>(self) {
            row_dots::<S, T>(self.rows, self.a, self.b, self.out);
        }
    }

    /// The machine's widest set, the portable one, and a scalar spelling of the lane order.
    fn agree<T: Real>(bits: fn(T) -> u64) {
        for width in [1, 3, 7, 8, 9, 16, 20, 31, 128, 130] {
            let value = |i: usize| T::from_f64(((i * 7919 % 1009) as f64 - 500.0) / 37.0);
            for count in 1..=12 {
                let rows: Vec<T> = (0..width * count).map(value).collect();
                let (a, b): (Vec<T>, Vec<T>) = (0..width).map(|i| (value(i + 5), value(3 * i + 1))).unzip();
                let mut outs = [vec![[T::ZERO; 2]; count], vec![[T::ZERO; 2]; count]];
                let [wide, portable] = &mut outs;
                dispatch(Compare { rows: &rows, a: &a, b: &b, out: wide });
                Compare { rows: &rows, a: &a, b: &b, out: portable }.run::<lanes::Portable>();
                for (r, row) in rows.chunks(width).enumerate() {
                    let scalar = [&a, &b].map(|x| {
                        let mut l = [T::ZERO; LANES];
                        for (i, (&s, &x)) in row.iter().zip(x).enumerate() {
                            l[i % LANES] = s.fma(x, l[i % LANES]);
                        }
                        bits(((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])))
                    });
                    assert_eq!(outs[0][r].map(bits), scalar, "{count} rows of {width}, row {r}");
                    assert_eq!(outs[1][r].map(bits), scalar, "{count} rows of {width}, row {r}, portable");
                }
            }
        }
    }

    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        agree::<f32>(|x| u64::from(x.to_bits()));
        agree::<f64>(f64::to_bits);
    }

    #[test]
    fn aligned_memory_starts_at_a_line() {
        for len in [1, 7, 64, 1000] {
            let memory = Aligned::<f32>::new(len);
            assert!(memory.len() >= len && memory.iter().all(|&x| x == 0.0));
            assert_eq!(memory.as_ptr().align_offset(64), 0);
        }
    }
}
