//! tree_attention and block_attention as ops.

use candle_core::{Result, Tensor};
use canopy_kernels::AttnDims;
use canopy_kernels::block_attention::cpu::{BlockMask, DraftBlocks};

use crate::DeviceTree;

/// `q` `[N, Hq, D]`; `k_cache`, `v_cache` `[slots, capacity, Hkv, D]` with this round's rows already at
/// `prefix_lens[b] + node` -> `[N, Hq, D]` in q's dtype.
pub fn tree_attention(
    tree: &DeviceTree,
    dims: AttnDims,
    prefix_lens: &[i32],
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    let _ = (tree, dims, prefix_lens, q, k_cache, v_cache);
    unimplemented!()
}

/// `q` `[B block_size, Hq, D]`; the block's own keys lie right after its context in the pools.
pub fn block_attention(
    blocks: &DraftBlocks,
    mask: BlockMask,
    dims: AttnDims,
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    let _ = (blocks, mask, dims, q, k_cache, v_cache);
    unimplemented!()
}
