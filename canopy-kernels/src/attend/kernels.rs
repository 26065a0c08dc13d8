//! Scores, softmax and weighted sums over register tiles of queries and keys. The tile's size never shows in a
//! result: every sum has its own accumulator and its own order.

use std::array::from_fn;
use std::ops::Range;

use super::{Head, Sight};
use crate::math::{exp, mul_add};

/// f32 lanes of a vector.
pub(super) const LANES: usize = 8;

type Vector = [f32; LANES];

#[inline(always)]
fn fma<const FMA: bool>(a: Vector, b: Vector, c: Vector) -> Vector {
    from_fn(|lane| mul_add::<FMA>(a[lane], b[lane], c[lane]))
}

/// The sum of the lanes, neighbours first.
#[inline(always)]
fn sum(v: Vector) -> f32 {
    ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
}

/// Scores, then weights, of consecutive queries: position p of query i lies at `data[i * stride + p - base]`.
pub(super) struct Table<'a> {
    data: &'a mut [f32],
    stride: usize,
    base: usize,
}

impl<'a> Table<'a> {
    /// A table of minus infinity for `queries` queries over the positions `span`.
    pub(super) fn new(data: &'a mut Vec<f32>, queries: usize, span: Range<usize>) -> Self {
        // A multiple of the lanes, so that an entry's lane is its position's.
        let base = span.start / LANES * LANES;
        let stride = (span.end - base).next_multiple_of(LANES);
        data.clear();
        data.resize(stride * queries, f32::NEG_INFINITY);
        Self { data, stride, base }
    }

    /// The table of the queries from `query` on.
    pub(super) fn from(&mut self, query: usize) -> Table<'_> {
        Table { data: &mut self.data[query * self.stride..], stride: self.stride, base: self.base }
    }

    /// One query's entries at `positions`, in whole vectors of lanes.
    pub(super) fn lanes(&mut self, query: usize, positions: Range<usize>) -> &mut [Vector] {
        let row = &mut self.data[query * self.stride..][..self.stride];
        let (first, end) = (positions.start - self.base, positions.end - self.base);
        row[first / LANES * LANES..end.next_multiple_of(LANES)].as_chunks_mut().0
    }

    #[inline(always)]
    fn at(&mut self, query: usize, position: usize) -> &mut f32 {
        &mut self.data[query * self.stride + position - self.base]
    }
}

/// Fills in the scores of `queries` against the keys at `positions`.
#[inline(always)]
pub(super) fn score<const FMA: bool>(
    keys: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: Range<usize>,
    queries: &[&[f32]],
    mut table: Table<'_>,
) {
    let (fours, rest) = queries.as_chunks::<4>();
    for (tile, queries) in fours.iter().enumerate() {
        score_tile::<FMA, 4, 2>(keys, &pool_row, positions.clone(), queries, table.from(4 * tile));
    }
    let (twos, ones) = rest.as_chunks::<2>();
    for (tile, queries) in twos.iter().enumerate() {
        score_tile::<FMA, 2, 4>(
            keys,
            &pool_row,
            positions.clone(),
            queries,
            table.from(4 * fours.len() + 2 * tile),
        );
    }
    for queries in ones.as_chunks::<1>().0 {
        let table = table.from(4 * fours.len() + 2 * twos.len());
        score_tile::<FMA, 1, 8>(keys, &pool_row, positions.clone(), queries, table);
    }
}

#[inline(always)]
fn score_tile<const FMA: bool, const Q: usize, const K: usize>(
    keys: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: Range<usize>,
    queries: &[&[f32]; Q],
    mut table: Table<'_>,
) {
    let scale = (keys.dim as f32).powf(-0.5);
    let mut p = positions.start;
    while p + K <= positions.end {
        let scores = dots::<FMA, Q, K>(queries, from_fn(|k| keys.row(pool_row(p + k))));
        for (query, scores) in scores.iter().enumerate() {
            for (k, score) in scores.iter().enumerate() {
                *table.at(query, p + k) = score * scale;
            }
        }
        p += K;
    }
    for p in p..positions.end {
        let scores = dots::<FMA, Q, 1>(queries, [keys.row(pool_row(p))]);
        for (query, [score]) in scores.iter().enumerate() {
            *table.at(query, p) = score * scale;
        }
    }
}

/// The dot products of Q queries and K keys, each in 8 lanes.
#[inline(always)]
fn dots<const FMA: bool, const Q: usize, const K: usize>(q: &[&[f32]; Q], k: [&[f32]; K]) -> [[f32; K]; Q] {
    let q = q.map(|q| q.as_chunks::<LANES>());
    let k = k.map(|k| k.as_chunks::<LANES>());
    let mut lanes = [[[0f32; LANES]; K]; Q];
    let vectors = q[0].0.len();
    let (q_vectors, k_vectors) = (q.map(|q| &q.0[..vectors]), k.map(|k| &k.0[..vectors]));
    for v in 0..vectors {
        for i in 0..Q {
            for j in 0..K {
                lanes[i][j] = fma::<FMA>(q_vectors[i][v], k_vectors[j][v], lanes[i][j]);
            }
        }
    }
    for i in 0..Q {
        for j in 0..K {
            for (lane, (q, k)) in q[i].1.iter().zip(k[j].1).enumerate() {
                lanes[i][j][lane] = mul_add::<FMA>(*q, *k, lanes[i][j][lane]);
            }
        }
    }
    lanes.map(|row| row.map(sum))
}

/// Scores to weights that sum to 1, in place. An entry of minus infinity becomes 0.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(scores: &mut [Vector]) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for score in scores.iter() {
        largest = from_fn(|lane| if score[lane] > largest[lane] { score[lane] } else { largest[lane] });
    }
    let largest = largest.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let mut total = [0f32; LANES];
    for score in scores.iter_mut() {
        *score = score.map(|score| exp::<FMA>(score - largest));
        total = from_fn(|lane| total[lane] + score[lane]);
    }
    let factor = 1.0 / sum(total);
    for score in scores.iter_mut() {
        *score = score.map(|weight| weight * factor);
    }
}

/// Adds weight times value of `positions` to the outputs, position by position.
#[inline(always)]
pub(super) fn mix<const FMA: bool>(
    values: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: Range<usize>,
    outs: &mut [&mut [f32]],
    mut table: Table<'_>,
) {
    let (fours, rest) = outs.as_chunks_mut::<4>();
    let four = fours.len();
    for (tile, outs) in fours.iter_mut().enumerate() {
        mix_tile::<FMA, 4, 2>(values, &pool_row, positions.clone(), outs, table.from(4 * tile));
    }
    let (twos, ones) = rest.as_chunks_mut::<2>();
    let two = twos.len();
    for (tile, outs) in twos.iter_mut().enumerate() {
        mix_tile::<FMA, 2, 4>(values, &pool_row, positions.clone(), outs, table.from(4 * four + 2 * tile));
    }
    for outs in ones.as_chunks_mut::<1>().0 {
        mix_tile::<FMA, 1, 8>(values, &pool_row, positions.clone(), outs, table.from(4 * four + 2 * two));
    }
}

/// Q outputs, V vectors of each at a time; what is left of the width goes element by element.
#[inline(always)]
fn mix_tile<const FMA: bool, const Q: usize, const V: usize>(
    values: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: Range<usize>,
    outs: &mut [&mut [f32]; Q],
    mut table: Table<'_>,
) {
    let whole = values.dim / (V * LANES) * (V * LANES);
    for first in (0..whole).step_by(V * LANES) {
        let tile = |row: &[f32]| -> [Vector; V] {
            let vectors = row[first..][..V * LANES].as_chunks().0;
            from_fn(|v| vectors[v])
        };
        let mut lanes: [[Vector; V]; Q] = from_fn(|i| tile(outs[i]));
        for p in positions.clone() {
            let value = tile(values.row(pool_row(p)));
            for (i, lanes) in lanes.iter_mut().enumerate() {
                let weight = [*table.at(i, p); LANES];
                for (lanes, value) in lanes.iter_mut().zip(value) {
                    *lanes = fma::<FMA>(weight, value, *lanes);
                }
            }
        }
        for (out, lanes) in outs.iter_mut().zip(lanes) {
            out[first..][..V * LANES].copy_from_slice(lanes.as_flattened());
        }
    }
    for (i, out) in outs.iter_mut().enumerate() {
        for p in positions.clone() {
            let (weight, value) = (*table.at(i, p), values.row(pool_row(p)));
            for (out, value) in out[whole..].iter_mut().zip(&value[whole..]) {
                *out = mul_add::<FMA>(weight, *value, *out);
            }
        }
    }
}

/// One head's output in float64: where f32 overflowed or met a non-finite number, this says what is right.
#[inline(never)]
pub(super) fn exact(keys: Head<'_>, values: Head<'_>, sight: &Sight<'_>, query: &[f32], out: &mut [f32]) {
    let scale = (keys.dim as f64).powf(-0.5);
    let dot = |key: &[f32]| query.iter().zip(key).map(|(&q, &k)| q as f64 * k as f64).sum::<f64>();
    let positions = sight.first..sight.end;
    let scores: Vec<f64> = positions.clone().map(|p| scale * dot(keys.row(sight.pool_row(p)))).collect();
    let largest = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let (mut total, mut mixed) = (0f64, vec![0f64; out.len()]);
    for (p, score) in positions.zip(scores) {
        let weight = (score - largest).exp();
        total += weight;
        for (mixed, &value) in mixed.iter_mut().zip(values.row(sight.pool_row(p))) {
            *mixed += weight * value as f64;
        }
    }
    for (out, mixed) in out.iter_mut().zip(mixed) {
        *out = (mixed / total) as f32;
    }
}
