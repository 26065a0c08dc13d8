//! The core that both attention rooms share: rows attend over keys of a pool in position order.
//!
//! A row's bits depend on its query and on the sequence of (position, key, value) that it sees, on nothing else:
//! * a score is one dot product, summed in 8 lanes over the head's width and then over the lanes;
//! * weights are summed in 8 lanes by absolute position modulo 8, and then over the lanes;
//! * an output element adds weight times value one position after another, from the first to the last;
//! * a head whose output is not finite is computed again in float64 from the same sequence.
//!
//! Where rows are computed together, each of these sums stays as it is; only loads are shared.

mod kernels;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
#[cfg(feature = "cuda")]
mod ring;
#[cfg(feature = "cuda")]
mod tile;

use std::ops::Range;

use rayon::prelude::*;

use crate::AttnDims;
use crate::math::vectorised;
use kernels::{KEYS, Table, exact, mix, score, softmax};

/// Queries that share one pass over the keys: their scores stay in the L2 cache.
const QUERIES: usize = 24;
/// Fewer multiply-adds than this one thread does alone: sharing them out takes about as long as it saves.
const PARALLEL_WORK: usize = 3 << 17;

/// Queries and the pools they look into: `q` `[N, Hq, D]`, `keys`, `values` `[slots, capacity, Hkv, D]`.
#[derive(Clone, Copy)]
pub(crate) struct Pools<'a> {
    pub dims: AttnDims,
    pub q: &'a [f32],
    pub keys: &'a [f32],
    pub values: &'a [f32],
    pub capacity: usize,
}

impl<'a> Pools<'a> {
    /// The rows of one pool that one KV head of one slot owns.
    fn head(&self, pool: &'a [f32], slot: usize, kv_head: usize) -> Head<'a> {
        let (width, dim) = (self.dims.kv_width(), self.dims.head_dim);
        let rows = &pool[slot * self.capacity * width..][..self.capacity * width];
        Head { rows, stride: width, offset: kv_head * dim, dim }
    }
}

/// One KV head's keys or values in one slot.
#[derive(Clone, Copy)]
struct Head<'a> {
    rows: &'a [f32],
    stride: usize,
    offset: usize,
    dim: usize,
}

impl<'a> Head<'a> {
    #[inline(always)]
    fn row(&self, row: usize) -> &'a [f32] {
        &self.rows[row * self.stride + self.offset..][..self.dim]
    }
}

/// What one row sees: positions `first..end` of its slot. Position p lies at pool row p below `direct`, from
/// there on at pool row `path[p - direct]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight<'a> {
    pub slot: usize,
    pub first: usize,
    pub end: usize,
    pub direct: usize,
    pub path: &'a [u32],
}

impl Sight<'_> {
    #[inline(always)]
    fn pool_row(&self, position: usize) -> usize {
        if position < self.direct { position } else { self.path[position - self.direct] as usize }
    }
}

/// Attention of packed row r over `rows[r]`; the output of a `None` row is zero. `out` is `[N, Hq, D]`.
pub(crate) fn attend(pools: Pools<'_>, rows: &[Option<Sight<'_>>], out: &mut [f32]) {
    let width = pools.dims.q_width();
    let mut passes = Passes { pools, open: Vec::new(), done: Vec::new() };
    for (row, (sight, out)) in rows.iter().zip(out.chunks_exact_mut(width)).enumerate() {
        match sight {
            None => out.fill(0.0),
            Some(sight) => passes.push(row, *sight, out),
        }
    }
    let mut passes = passes.finish();
    let seen: usize = rows.iter().flatten().map(|sight| sight.end - sight.first).sum();
    if 2 * seen * width < PARALLEL_WORK {
        let mut scores = Vec::new();
        passes.iter_mut().for_each(|pass| run(&pools, pass, &mut scores));
    } else {
        passes.par_iter_mut().for_each_init(Vec::new, |scores, pass| run(&pools, pass, scores));
    }
}

/// Consecutive rows of one slot under one KV head. `queries` and `outs` are `[rows, Hq / Hkv]` heads.
struct Pass<'a> {
    kv_head: usize,
    rows: Vec<Sight<'a>>,
    queries: Vec<&'a [f32]>,
    outs: Vec<&'a mut [f32]>,
}

/// Gathers rows into passes: `open` has one pass per KV head, over the same rows.
struct Passes<'a> {
    pools: Pools<'a>,
    open: Vec<Pass<'a>>,
    done: Vec<Pass<'a>>,
}

impl<'a> Passes<'a> {
    fn push(&mut self, row: usize, sight: Sight<'a>, out: &'a mut [f32]) {
        let AttnDims { q_heads, kv_heads, head_dim } = self.pools.dims;
        let group = q_heads / kv_heads;
        let fits = |pass: &Pass<'_>| pass.rows[0].slot == sight.slot && pass.queries.len() + group <= QUERIES;
        if !self.open.first().is_some_and(fits) {
            self.done.append(&mut self.open);
            let empty = |kv_head| Pass { kv_head, rows: vec![], queries: vec![], outs: vec![] };
            self.open.extend((0..kv_heads).map(empty));
        }
        let width = self.pools.dims.q_width();
        let mut queries = self.pools.q[row * width..][..width].chunks_exact(head_dim);
        let mut outs = out.chunks_exact_mut(head_dim);
        for pass in &mut self.open {
            pass.rows.push(sight);
            pass.queries.extend(queries.by_ref().take(group));
            pass.outs.extend(outs.by_ref().take(group));
        }
    }

    fn finish(mut self) -> Vec<Pass<'a>> {
        self.done.append(&mut self.open);
        self.done
    }
}

vectorised!(fn run(pools: &Pools<'_>, pass: &mut Pass<'_>, scores: &mut Vec<f32>) = run_body);

#[inline(always)]
fn run_body<const FMA: bool>(pools: &Pools<'_>, pass: &mut Pass<'_>, scores: &mut Vec<f32>) {
    let Pass { kv_head, rows, queries, outs } = pass;
    let group = queries.len() / rows.len();
    let keys = pools.head(pools.keys, rows[0].slot, *kv_head);
    let values = pools.head(pools.values, rows[0].slot, *kv_head);
    let mut table = Table::new(scores, queries.len(), span(rows));
    let parts = parts(rows, group);

    for Part { sight, heads, positions } in &parts {
        let queries = &queries[heads.clone()];
        score::<FMA>(keys, |p| sight.pool_row(p), positions, queries, table.from(heads.start));
    }
    for query in 0..queries.len() {
        let sight = &rows[query / group];
        softmax::<FMA>(table.lanes(query, sight.first..sight.end));
    }
    outs.iter_mut().for_each(|out| out.fill(0.0));
    for Part { sight, heads, positions } in &parts {
        let outs = &mut outs[heads.clone()];
        mix::<FMA>(values, |p| sight.pool_row(p), positions, outs, table.from(heads.start));
    }
    for (query, (q, out)) in queries.iter().zip(outs).enumerate() {
        if !out.iter().all(|value| value.is_finite()) {
            exact(keys, values, &rows[query / group], q, out);
        }
    }
}

/// At most [`KEYS`] positions that the `heads` of a pass see at the pool rows of `sight`.
struct Part<'a> {
    sight: Sight<'a>,
    heads: Range<usize>,
    positions: Range<usize>,
}

/// All that the rows of a pass see, every head's positions in ascending order. The positions that every row sees at
/// the pool row of their own number are shared: their keys and values are read once per part.
fn parts<'a>(rows: &[Sight<'a>], group: usize) -> Vec<Part<'a>> {
    let common = common(rows);
    let mut parts = Vec::new();
    let mut push = |sight, heads: Range<usize>, positions: Range<usize>| {
        for first in positions.clone().step_by(KEYS) {
            let positions = first..positions.end.min(first + KEYS);
            parts.push(Part { sight, heads: heads.clone(), positions });
        }
    };
    for (row, sight) in rows.iter().enumerate() {
        push(*sight, row * group..(row + 1) * group, sight.first..common.start.min(sight.end));
    }
    push(rows[0], 0..rows.len() * group, common.clone());
    for (row, sight) in rows.iter().enumerate() {
        push(*sight, row * group..(row + 1) * group, common.end.max(sight.first)..sight.end);
    }
    parts
}

/// The positions that every row sees, each at the pool row of its own number; empty when there are none.
fn common(rows: &[Sight<'_>]) -> Range<usize> {
    let first = rows.iter().map(|sight| sight.first).max().unwrap_or(0);
    let end = rows.iter().map(|sight| sight.direct.min(sight.end)).min().unwrap_or(0);
    first..end.max(first)
}

/// The positions that some row sees.
fn span(rows: &[Sight<'_>]) -> Range<usize> {
    let first = rows.iter().map(|sight| sight.first).min().unwrap_or(0);
    first..rows.iter().map(|sight| sight.end).max().unwrap_or(0)
}
