//! Queries and keys with L2 norm 1, the queries scaled.

use crate::GdnDims;
use crate::numeric::{Aligned, Kernel, Real, Simd, dispatch, dot, normalise};

/// Unit keys and scaled unit queries of a call's live rows.
pub(super) struct UnitRows<T> {
    rows: usize,
    dk: usize,
    /// `[Hk, N, 2, Dk]`: key, then query.
    kq: Aligned<T>,
    /// `[Hk, N]`: key . query.
    dots: Vec<T>,
}

impl<T: Real> UnitRows<T> {
    /// Normalises the given packed rows of `qkv` `[N, 2 Hk Dk + Hv Dv]`.
    pub(super) fn new(dims: GdnDims, qkv: &[T], live: impl Iterator<Item = usize>) -> Self {
        let rows = qkv.len() / dims.qkv_width();
        let kq = Aligned::new(dims.k_heads * rows * 2 * dims.dk);
        let mut units = Self { rows, dk: dims.dk, kq, dots: vec![T::ZERO; dims.k_heads * rows] };
        dispatch(Normalise { dims, qkv, live, units: &mut units });
        units
    }

    /// `(key, query, key . query)` of a packed row.
    #[inline(always)]
    pub(super) fn row(&self, k_head: usize, row: usize) -> (&[T], &[T], T) {
        let at = k_head * self.rows + row;
        let (k, q) = self.kq[at * 2 * self.dk..][..2 * self.dk].split_at(self.dk);
        (k, q, self.dots[at])
    }
}

struct Normalise<'a, T, I> {
    dims: GdnDims,
    qkv: &'a [T],
    live: I,
    units: &'a mut UnitRows<T>,
}

impl<T: Real, I: Iterator<Item = usize>> Kernel for Normalise<'_, T, I> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { dims, qkv, live, units } = self;
        let dk = dims.dk;
        let scale = T::from_f64((dk as f64).powf(-0.5));
        for row in live {
            let (q_heads, rest) = qkv[row * dims.qkv_width()..].split_at(dims.k_heads * dk);
            for k_head in 0..dims.k_heads {
                let at = k_head * units.rows + row;
                let (k, q) = units.kq[at * 2 * dk..][..2 * dk].split_at_mut(dk);
                normalise::<S, T>(&rest[k_head * dk..][..dk], T::ONE, k);
                normalise::<S, T>(&q_heads[k_head * dk..][..dk], scale, q);
                units.dots[at] = dot::<S, T>(k, q);
            }
        }
    }
}
