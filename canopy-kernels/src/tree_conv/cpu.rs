//! CPU forward.

use crate::error::{expect_len, expect_pool};
use crate::gdn_prefill::Sequences;
use crate::math::{mul_add, silu, vectorised};
use crate::{AcceptedPaths, ConvDims, DraftTree, Error, Result, TreeBatch, team};

/// Channels whose taps are held transposed at a time: they and a row's four sources stay in the L1 cache.
const CHANNELS: usize = 128;
/// Elements that one thread takes at least.
const PIECE: usize = 1 << 11;

/// The raw rows under taps 0 to 3 of one output row.
type Sources<'a> = [&'a [f32]; ConvDims::WIDTH];

/// `x` raw rows `[N, C]`, `weight` `[C, 4]` (tap 3 = the node itself), `conv_state` pool `[slots, 3, C]` (raw
/// rows, oldest first), `out` `[N, C]`. All f32.
///
/// # Errors
/// When a buffer has another size, or a slot lies outside the pool.
pub fn verify(
    dims: ConvDims,
    batch: &TreeBatch,
    x: &[f32],
    weight: &[f32],
    conv_state: &[f32],
    out: &mut [f32],
) -> Result<()> {
    const OP: &str = "tree_conv verify";
    let (rows, channels) = (batch.rows(), dims.channels);
    expect_len(OP, "x", &[rows, channels], x.len())?;
    expect_len(OP, "weight", &[channels, ConvDims::WIDTH], weight.len())?;
    expect_len(OP, "out", &[rows, channels], out.len())?;
    batch.check_slots(OP, expect_pool(OP, "conv_state", dims.state_len(), conv_state.len())?)?;

    let mut sources = Vec::with_capacity(rows);
    for (first, tree, slot) in batch.iter() {
        let x = &x[first * channels..][..tree.len() * channels];
        let state = slot.map(|slot| &conv_state[slot * dims.state_len()..][..dims.state_len()]);
        sources.extend((0..tree.len()).map(|node| state.map(|state| taps(dims, tree, node, x, state))));
    }
    run(channels, weight, &sources, out);
    Ok(())
}

/// [`verify`] of long chains.
///
/// # Errors
/// As [`verify`].
pub fn forward_chains(
    dims: ConvDims,
    sequences: &Sequences,
    x: &[f32],
    weight: &[f32],
    conv_state: &[f32],
    out: &mut [f32],
) -> Result<()> {
    const OP: &str = "chain_conv";
    let (rows, channels) = (sequences.rows(), dims.channels);
    expect_len(OP, "x", &[rows, channels], x.len())?;
    expect_len(OP, "weight", &[channels, ConvDims::WIDTH], weight.len())?;
    expect_len(OP, "out", &[rows, channels], out.len())?;
    sequences.check_slots(OP, expect_pool(OP, "conv_state", dims.state_len(), conv_state.len())?)?;

    let mut sources = Vec::with_capacity(rows);
    for (first, len, slot) in sequences.iter() {
        let state = slot.map(|slot| &conv_state[slot * dims.state_len()..][..dims.state_len()]);
        sources
            .extend((0..len).map(|t| state.map(|state| chain_taps(dims, t, &x[first * channels..], state))));
    }
    run(channels, weight, &sources, out);
    Ok(())
}

/// All rows of an output, on the team's threads.
fn run(channels: usize, weight: &[f32], sources: &[Option<Sources<'_>>], out: &mut [f32]) {
    let piece = team::piece(out.len(), channels, PIECE);
    let parts = sources.chunks(piece / channels).zip(out.chunks_mut(piece));
    team::for_all(parts, |(sources, out)| convolve(weight, sources, out));
}

/// The raw rows that row `t` of a chain sees: those before it, then the conv state from its newest row on.
fn chain_taps<'a>(dims: ConvDims, t: usize, x: &'a [f32], state: &'a [f32]) -> Sources<'a> {
    std::array::from_fn(|tap| {
        let (rows, row) = match (t + tap).checked_sub(ConvDims::STATE_ROWS) {
            Some(row) => (x, row),
            None => (state, t + tap),
        };
        &rows[row * dims.channels..][..dims.channels]
    })
}

/// The raw rows that `node` sees: its parent chain, then the conv state from its newest row on.
fn taps<'a>(dims: ConvDims, tree: &DraftTree, node: usize, x: &'a [f32], state: &'a [f32]) -> Sources<'a> {
    let mut sources: Sources<'a> = [&[]; ConvDims::WIDTH];
    let (mut node, mut older) = (Some(node), ConvDims::STATE_ROWS);
    for source in sources.iter_mut().rev() {
        let (rows, row) = match node {
            Some(node) => (x, node),
            None => {
                older -= 1;
                (state, older)
            }
        };
        *source = &rows[row * dims.channels..][..dims.channels];
        node = node.and_then(|node| tree.parent(node));
    }
    sources
}

vectorised!(fn convolve(weight: &[f32], sources: &[Option<Sources<'_>>], out: &mut [f32]) = convolve_body);

/// `out[row] = silu(sum of tap * source)`, the sum from tap 0 to tap 3; a row without sources is zero.
#[inline(always)]
fn convolve_body<const FMA: bool>(weight: &[f32], sources: &[Option<Sources<'_>>], out: &mut [f32]) {
    let channels = weight.len() / ConvDims::WIDTH;
    let mut taps = [[0f32; CHANNELS]; ConvDims::WIDTH];
    for first in (0..channels).step_by(CHANNELS) {
        let width = CHANNELS.min(channels - first);
        let block = weight[first * ConvDims::WIDTH..][..width * ConvDims::WIDTH].as_chunks().0;
        for (c, [w0, w1, w2, w3]) in block.iter().enumerate() {
            (taps[0][c], taps[1][c], taps[2][c], taps[3][c]) = (*w0, *w1, *w2, *w3);
        }
        for (row, out) in sources.iter().zip(out.chunks_exact_mut(channels)) {
            let out = &mut out[first..][..width];
            let Some(row) = row else {
                out.fill(0.0);
                continue;
            };
            let [x0, x1, x2, x3] = row.map(|source| &source[first..][..width]);
            for c in 0..width {
                let sum = mul_add::<FMA>(taps[1][c], x1[c], taps[0][c] * x0[c]);
                let sum = mul_add::<FMA>(taps[3][c], x3[c], mul_add::<FMA>(taps[2][c], x2[c], sum));
                out[c] = silu::<FMA>(sum);
            }
        }
    }
}

/// Keeps the last three raw rows of (old conv state, accepted path), in place in the pool.
///
/// # Errors
/// When a buffer has another size, or a slot lies outside the pool; the pool is then untouched.
pub fn commit(dims: ConvDims, paths: &AcceptedPaths, x: &[f32], conv_state: &mut [f32]) -> Result<()> {
    const OP: &str = "tree_conv commit";
    let channels = dims.channels;
    let rows = paths.cu_nodes().last().map_or(0, |&rows| rows as usize);
    expect_len(OP, "x", &[rows, channels], x.len())?;
    let slots = expect_pool(OP, "conv_state", dims.state_len(), conv_state.len())?;
    if let Some(slot) = paths.slots().iter().find(|&&slot| slot >= slots as i32) {
        let expected = format!("below the pool's {slots} slots");
        return Err(Error::Value { op: OP, arg: "slots", expected, got: slot.to_string() });
    }
    for (_, slot, path) in paths.iter() {
        let state = &mut conv_state[slot * dims.state_len()..][..dims.state_len()];
        let new = &path[path.len().saturating_sub(ConvDims::STATE_ROWS)..];
        let kept = (ConvDims::STATE_ROWS - new.len()) * channels;
        state.copy_within(dims.state_len() - kept.., 0);
        for (to, &row) in state[kept..].chunks_exact_mut(channels).zip(new) {
            to.copy_from_slice(&x[row as usize * channels..][..channels]);
        }
    }
    Ok(())
}

/// [`commit`] of long chains.
///
/// # Errors
/// As [`commit`].
pub fn advance_chains(
    dims: ConvDims,
    sequences: &Sequences,
    x: &[f32],
    conv_state: &mut [f32],
) -> Result<()> {
    const OP: &str = "chain_conv advance";
    let channels = dims.channels;
    expect_len(OP, "x", &[sequences.rows(), channels], x.len())?;
    sequences.check_slots(OP, expect_pool(OP, "conv_state", dims.state_len(), conv_state.len())?)?;
    for (first, len, slot) in sequences.iter() {
        let Some(slot) = slot else { continue };
        let state = &mut conv_state[slot * dims.state_len()..][..dims.state_len()];
        let new = len.min(ConvDims::STATE_ROWS) * channels;
        state.copy_within(new.., 0);
        let end = (first + len) * channels;
        state[dims.state_len() - new..].copy_from_slice(&x[end - new..end]);
    }
    Ok(())
}
