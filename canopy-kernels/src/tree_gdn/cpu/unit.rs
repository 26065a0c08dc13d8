//! Queries and keys in f32 with L2 norm 1, the queries scaled.

use crate::GdnDims;
use crate::numeric::{Kernel, dispatch, dot};

/// Added to the sum of squares under the root.
const EPS: f32 = 1e-6;

/// Unit keys and scaled unit queries of a call's live rows.
pub(super) struct UnitRows {
    rows: usize,
    dk: usize,
    /// `[Hk, N, 2, Dk]`: key, then query.
    kq: Vec<f32>,
    /// `[Hk, N]`: key . query.
    dots: Vec<f32>,
}

impl UnitRows {
    /// Normalises the given packed rows of `qkv` `[N, 2 Hk Dk + Hv Dv]`.
    pub(super) fn new(dims: GdnDims, qkv: &[f32], live: impl Iterator<Item = usize>) -> Self {
        let rows = qkv.len() / dims.qkv_width();
        let kq = vec![0.0; dims.k_heads * rows * 2 * dims.dk];
        let mut units = Self { rows, dk: dims.dk, kq, dots: vec![0.0; dims.k_heads * rows] };
        dispatch(Normalise { dims, qkv, live, units: &mut units });
        units
    }

    /// `(key, query, key . query)` of a packed row.
    #[inline(always)]
    pub(super) fn row(&self, k_head: usize, row: usize) -> (&[f32], &[f32], f32) {
        let at = k_head * self.rows + row;
        let (k, q) = self.kq[at * 2 * self.dk..][..2 * self.dk].split_at(self.dk);
        (k, q, self.dots[at])
    }
}

struct Normalise<'a, I> {
    dims: GdnDims,
    qkv: &'a [f32],
    live: I,
    units: &'a mut UnitRows,
}

impl<I: Iterator<Item = usize>> Kernel for Normalise<'_, I> {
    #[inline(always)]
    fn run(self) {
        let Self { dims, qkv, live, units } = self;
        let dk = dims.dk;
        for row in live {
            let (q_heads, rest) = qkv[row * dims.qkv_width()..].split_at(dims.k_heads * dk);
            for k_head in 0..dims.k_heads {
                let at = k_head * units.rows + row;
                let (k, q) = units.kq[at * 2 * dk..][..2 * dk].split_at_mut(dk);
                normalise(&rest[k_head * dk..][..dk], 1.0, k);
                normalise(&q_heads[k_head * dk..][..dk], dims.scale(), q);
                units.dots[at] = dot(k, q);
            }
        }
    }
}

/// `out = scale * x / sqrt(x . x + EPS)`.
#[inline(always)]
fn normalise(x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = scale / (dot(x, x) + EPS).sqrt();
    for (out, &x) in out.iter_mut().zip(x) {
        *out = x * factor;
    }
}
