//! CPU forward: row after row, a few rows of the state at a time.

use super::{PrefillInput, Sequences};
use crate::GdnDims;
use crate::batch::split_heads;
use crate::error::{Result, expect_len};
use crate::numeric::{Kernel, Simd, dispatch_all, dot, normalise, row_dots};

const OP: &str = "gdn_prefill";

/// Rows of a state that walk a span together: they stay in the first-level cache.
const ROWS: usize = 20;
/// Rows of a sequence whose keys and queries are normalised at once.
const SPAN: usize = 64;

/// Runs every sequence over the state in its slot of the pool `[slots, Hv, Dv, Dk]`, in place; `o` is `[N, Hv, Dv]`. A padding sequence's
/// rows become zero.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument that does not fit.
pub fn forward(
    dims: GdnDims,
    sequences: &Sequences,
    input: PrefillInput<'_>,
    state: &mut [f32],
    o: &mut [f32],
) -> Result<()> {
    let n = sequences.rows();
    let slots = dims.pool_slots(OP, state.len())?;
    expect_len(OP, "qkv", &[n, dims.qkv_width()], input.qkv.len())?;
    expect_len(OP, "gates", &[n, 2, dims.v_heads], input.gates.len())?;
    sequences.check_slots(OP, slots)?;
    expect_len(OP, "o", &[n, dims.v_heads, dims.dv], o.len())?;

    let mut pool: Vec<_> = state.chunks_exact_mut(dims.state_len()).map(Some).collect();
    let mut heads = split_heads(sequences.lens(), dims.v_heads, dims.dv, o).into_iter();
    let mut tasks = Vec::with_capacity(heads.len());
    for (first, _, slot) in sequences.iter() {
        // slots are distinct, so each is still there
        let own = slot.and_then(|slot| pool[slot].take());
        let mut states = own.map(|own| own.chunks_exact_mut(dims.dv * dims.dk));
        for (v_head, o) in heads.by_ref().take(dims.v_heads).enumerate() {
            let state = states.as_mut().and_then(Iterator::next);
            tasks.push(Head { dims, first, v_head, input, state, o });
        }
    }
    dispatch_all(tasks, n * dims.state_len());
    Ok(())
}

/// One value head of one sequence.
struct Head<'a> {
    dims: GdnDims,
    first: usize,
    v_head: usize,
    input: PrefillInput<'a>,
    /// `[Dv, Dk]`, `None` for padding.
    state: Option<&'a mut [f32]>,
    /// `[rows][Dv]`.
    o: Vec<&'a mut [f32]>,
}

/// What a row brings to every row of the state, besides its key and query.
#[derive(Clone, Copy, Default)]
struct Scalars {
    decay: f32,
    beta: f32,
    kq: f32,
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { dims, first, v_head, input, state, mut o } = self;
        let Some(state) = state else {
            o.iter_mut().for_each(|row| row.fill(0.0));
            return;
        };
        let (dk, k_head) = (dims.dk, dims.key_head(v_head));
        let (mut keys, mut queries) = (vec![0.0; SPAN * dk], vec![0.0; SPAN * dk]);
        let mut scalars = [Scalars::default(); SPAN];
        for (span, outs) in o.chunks_mut(SPAN).enumerate() {
            let row0 = first + span * SPAN;
            let rows = input.qkv[row0 * dims.qkv_width()..].chunks_exact(dims.qkv_width());
            let units = keys.chunks_exact_mut(dk).zip(queries.chunks_exact_mut(dk)).zip(&mut scalars);
            for (at, (row, ((k, q), scalars))) in rows.zip(units).take(outs.len()).enumerate() {
                normalise::<S, f32>(&row[k_head * dk..][..dk], dims.scale(), q);
                normalise::<S, f32>(&row[(dims.k_heads + k_head) * dk..][..dk], 1.0, k);
                let gates = &input.gates[(row0 + at) * 2 * dims.v_heads..][..2 * dims.v_heads];
                let (decay, beta) = (gates[v_head].exp(), gates[dims.v_heads + v_head]);
                *scalars = Scalars { decay, beta, kq: dot::<S, f32>(k, q) };
            }
            let v_start = 2 * dims.k_heads * dk + v_head * dims.dv;
            for (block, state) in state.chunks_mut(ROWS * dk).enumerate() {
                let columns = block * ROWS..block * ROWS + state.len() / dk;
                for (at, out) in outs.iter_mut().enumerate() {
                    let v = &input.qkv[(row0 + at) * dims.qkv_width() + v_start..][columns.clone()];
                    let (k, q) = (&keys[at * dk..][..dk], &queries[at * dk..][..dk]);
                    advance::<S>(scalars[at], k, q, v, state, &mut out[columns.clone()]);
                }
            }
        }
    }
}

/// One row of a sequence over some rows of the state.
#[inline(always)]
fn advance<S: Simd>(scalars: Scalars, k: &[f32], q: &[f32], v: &[f32], state: &mut [f32], o: &mut [f32]) {
    let Scalars { decay, beta, kq } = scalars;
    let mut sums = [[0.0; 2]; ROWS];
    row_dots::<S, f32>(state, k, q, &mut sums[..v.len()]);
    let rows = state.chunks_exact_mut(k.len());
    for (((s, &[sk, sq]), &v), o) in rows.zip(&sums).zip(v).zip(o) {
        let u = beta * (-decay).mul_add(sk, v);
        *o = u.mul_add(kq, decay * sq);
        for (s, &k) in s.iter_mut().zip(k) {
            *s = s.mul_add(decay, k * u);
        }
    }
}
