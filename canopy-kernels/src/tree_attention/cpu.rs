//! CPU forward.

use crate::{AttnDims, Result, TreeBatch};

/// Row i of sequence b sees rows `0..prefix_lens[b]` of its slot and then its own root-to-row path, whose keys
/// lie at `prefix_lens[b] + node`. `q`, `out` `[N, Hq, D]`; `k_cache`, `v_cache` `[slots, capacity, Hkv, D]`. f32.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// Queries, RoPE applied.
    pub q: &'a [f32],
    /// Key pool.
    pub k_cache: &'a [f32],
    /// Value pool.
    pub v_cache: &'a [f32],
    /// Rows per slot in the pools.
    pub capacity: usize,
}

/// Attention of every drafted row.
pub fn verify(
    dims: AttnDims,
    batch: &TreeBatch,
    prefix_lens: &[i32],
    input: AttentionInput<'_>,
    out: &mut [f32],
) -> Result<()> {
    let _ = (dims, batch, prefix_lens, input, out);
    unimplemented!()
}
