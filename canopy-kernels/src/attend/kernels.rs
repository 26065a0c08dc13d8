//! Scores, softmax and weighted sums over register tiles of queries and keys. The tile's size never shows in a
//! result: every sum has its own accumulator and its own order.

#[cfg(target_arch = "x86_64")]
mod avx2;

use std::ops::Range;

use super::{Head, Sight};
use crate::math::{exp, mul_add};

/// f32 lanes of a vector.
const LANES: usize = 8;
/// Keys, or values, that stay in the L1 cache while every query of a pass reads them.
pub(super) const KEYS: usize = 24;

// Plain loops over the lanes, no closures: what is not inlined would lose the caller's instruction set.
type Vector = [f32; LANES];

#[inline(always)]
fn fma<const FMA: bool>(a: &Vector, b: &Vector, c: &mut Vector) {
    for lane in 0..LANES {
        c[lane] = mul_add::<FMA>(a[lane], b[lane], c[lane]);
    }
}

/// The sum of the lanes, neighbours first.
#[inline(always)]
fn sum(v: &Vector) -> f32 {
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

    /// One query's entries at `positions`.
    #[inline(always)]
    fn row(&mut self, query: usize, positions: &Range<usize>) -> &mut [f32] {
        let start = query * self.stride + positions.start - self.base;
        &mut self.data[start..][..positions.len()]
    }
}

/// Fills in the scores of `queries` against the keys at `positions`, at most [`KEYS`] of them.
#[inline(always)]
pub(super) fn score<const FMA: bool>(
    keys: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: &Range<usize>,
    queries: &[&[f32]],
    mut table: Table<'_>,
) {
    let mut rows: [&[f32]; KEYS] = [&[]; KEYS];
    for (row, p) in rows.iter_mut().zip(positions.clone()) {
        *row = keys.row(pool_row(p));
    }
    let rows = &rows[..positions.len()];
    let (fours, rest) = queries.as_chunks::<4>();
    let (twos, ones) = rest.as_chunks::<2>();
    for (tile, queries) in fours.iter().enumerate() {
        score_tile::<FMA, 4, 3>(rows, queries, positions, table.from(4 * tile));
    }
    for queries in twos {
        score_tile::<FMA, 2, 6>(rows, queries, positions, table.from(4 * fours.len()));
    }
    for query in ones {
        score_tile::<FMA, 1, 8>(rows, &[query], positions, table.from(4 * fours.len() + 2 * twos.len()));
    }
}

#[inline(always)]
fn score_tile<const FMA: bool, const Q: usize, const K: usize>(
    rows: &[&[f32]],
    queries: &[&[f32]; Q],
    positions: &Range<usize>,
    mut table: Table<'_>,
) {
    let scale = (queries[0].len() as f32).powf(-0.5);
    let (whole, rest) = rows.as_chunks::<K>();
    for (tile, rows) in whole.iter().enumerate() {
        let scores = dots::<FMA, Q, K>(queries, rows);
        for (query, scores) in scores.iter().enumerate() {
            let row = &mut table.row(query, positions)[tile * K..][..K];
            for k in 0..K {
                row[k] = scores[k] * scale;
            }
        }
    }
    for (row, at) in rest.iter().zip(whole.len() * K..) {
        let scores = dots::<FMA, Q, 1>(queries, &[row]);
        for (query, [score]) in scores.iter().enumerate() {
            table.row(query, positions)[at] = score * scale;
        }
    }
}

/// The dot products of Q queries and K keys, each in 8 lanes.
#[inline(always)]
fn dots<const FMA: bool, const Q: usize, const K: usize>(q: &[&[f32]; Q], k: &[&[f32]; K]) -> [[f32; K]; Q] {
    #[cfg(target_arch = "x86_64")]
    if FMA && k[0].len().is_multiple_of(LANES) {
        // SAFETY: on this architecture `FMA` bodies run where the CPU has AVX2 and FMA.
        return unsafe { avx2::dots(q, k) };
    }
    let (mut q_lanes, mut k_lanes): ([&[Vector]; Q], [&[Vector]; K]) = ([&[]; Q], [&[]; K]);
    let vectors = k[0].len() / LANES;
    for i in 0..Q {
        q_lanes[i] = &q[i].as_chunks().0[..vectors];
    }
    for j in 0..K {
        k_lanes[j] = &k[j].as_chunks().0[..vectors];
    }
    let mut lanes = [[[0f32; LANES]; K]; Q];
    for v in 0..vectors {
        let mut key = [[0f32; LANES]; K];
        for j in 0..K {
            key[j] = k_lanes[j][v];
        }
        for i in 0..Q {
            let query = q_lanes[i][v];
            for j in 0..K {
                fma::<FMA>(&query, &key[j], &mut lanes[i][j]);
            }
        }
    }
    if vectors * LANES < k[0].len() {
        for i in 0..Q {
            for j in 0..K {
                lanes[i][j] =
                    add_rest::<FMA>(&q[i][vectors * LANES..], &k[j][vectors * LANES..], lanes[i][j]);
            }
        }
    }
    let mut dots = [[0f32; K]; Q];
    for i in 0..Q {
        for j in 0..K {
            dots[i][j] = sum(&lanes[i][j]);
        }
    }
    dots
}

/// The products behind the last whole vector, each in its lane. By value, so that the lanes stay in registers.
#[inline(never)]
fn add_rest<const FMA: bool>(q: &[f32], k: &[f32], mut lanes: Vector) -> Vector {
    for ((lane, q), k) in lanes.iter_mut().zip(q).zip(k) {
        *lane = mul_add::<FMA>(*q, *k, *lane);
    }
    lanes
}

/// Scores to weights that sum to 1, in place. An entry of minus infinity becomes 0.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(scores: &mut [Vector]) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for score in scores.iter() {
        for lane in 0..LANES {
            largest[lane] = if score[lane] > largest[lane] { score[lane] } else { largest[lane] };
        }
    }
    let largest = largest.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    for score in scores.as_flattened_mut() {
        *score = exp::<FMA>(*score - largest);
    }
    let mut total = [0f32; LANES];
    for score in scores.iter() {
        for lane in 0..LANES {
            total[lane] += score[lane];
        }
    }
    let factor = 1.0 / sum(&total);
    for weight in scores.as_flattened_mut() {
        *weight *= factor;
    }
}

/// Adds weight times value of `positions`, at most [`KEYS`] of them, to the outputs, position by position.
#[inline(always)]
pub(super) fn mix<const FMA: bool>(
    values: Head<'_>,
    pool_row: impl Fn(usize) -> usize,
    positions: &Range<usize>,
    outs: &mut [&mut [f32]],
    mut table: Table<'_>,
) {
    let mut rows: [&[f32]; KEYS] = [&[]; KEYS];
    for (row, p) in rows.iter_mut().zip(positions.clone()) {
        *row = values.row(pool_row(p));
    }
    let rows = &rows[..positions.len()];
    let (sixes, rest) = outs.as_chunks_mut::<6>();
    let (fours, rest) = rest.as_chunks_mut::<4>();
    let (twos, ones) = rest.as_chunks_mut::<2>();
    let mut query = 0;
    for outs in sixes {
        mix_tile::<FMA, 6, 2>(rows, outs, positions, table.from(query));
        query += 6;
    }
    for outs in fours {
        mix_tile::<FMA, 4, 2>(rows, outs, positions, table.from(query));
        query += 4;
    }
    for outs in twos {
        mix_tile::<FMA, 2, 4>(rows, outs, positions, table.from(query));
        query += 2;
    }
    for out in ones.as_chunks_mut::<1>().0 {
        mix_tile::<FMA, 1, 8>(rows, out, positions, table.from(query));
    }
}

/// Q outputs, V vectors of each at a time; what is left of the width goes element by element.
#[inline(always)]
fn mix_tile<const FMA: bool, const Q: usize, const V: usize>(
    rows: &[&[f32]],
    outs: &mut [&mut [f32]; Q],
    positions: &Range<usize>,
    mut table: Table<'_>,
) {
    let mut weights = [[0f32; KEYS]; Q];
    for (query, weights) in weights.iter_mut().enumerate() {
        weights[..rows.len()].copy_from_slice(table.row(query, positions));
    }
    let mut row_tiles: [&[[Vector; V]]; KEYS] = [&[]; KEYS];
    for (tiles, row) in row_tiles.iter_mut().zip(rows) {
        *tiles = row.as_chunks().0.as_chunks().0;
    }
    let tiles = outs[0].len() / (V * LANES);
    for tile in 0..tiles {
        let mut lanes = [[[0f32; LANES]; V]; Q];
        for i in 0..Q {
            lanes[i] = outs[i].as_chunks().0.as_chunks().0[tile];
        }
        for (p, row) in row_tiles[..rows.len()].iter().enumerate() {
            let value = row[tile];
            for i in 0..Q {
                let weight = [weights[i][p]; LANES];
                for v in 0..V {
                    fma::<FMA>(&weight, &value[v], &mut lanes[i][v]);
                }
            }
        }
        for i in 0..Q {
            outs[i].as_chunks_mut().0.as_chunks_mut().0[tile] = lanes[i];
        }
    }
    let whole = tiles * V * LANES;
    for (out, weights) in outs.iter_mut().zip(&weights) {
        for (row, weight) in rows.iter().zip(weights) {
            for (out, value) in out[whole..].iter_mut().zip(&row[whole..]) {
                *out = mul_add::<FMA>(*weight, *value, *out);
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
