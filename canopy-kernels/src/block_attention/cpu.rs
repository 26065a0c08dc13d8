//! CPU forward.

use crate::tree_attention::cpu::AttentionInput;
use crate::{AttnDims, Result};

/// Which draft blocks a call holds: `rows` block rows of sequence b in slot `slots[b]` after
/// `context_lens[b]` context rows; the block's own keys lie right after the context in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftBlocks {
    /// Rows of every block.
    pub block_size: usize,
    /// `[B]` pool slots, -1 = padding.
    pub slots: Vec<i32>,
    /// `[B]` context rows.
    pub context_lens: Vec<i32>,
}

/// What a block row may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMask {
    /// Only keys at a distance below this, the row itself counted.
    pub window: Option<usize>,
    /// Only itself and earlier rows of the block.
    pub causal: bool,
}

/// Attention of every block row; `q`, `out` `[B block_size, Hq, D]`.
pub fn forward(
    dims: AttnDims,
    blocks: &DraftBlocks,
    mask: BlockMask,
    input: AttentionInput<'_>,
    out: &mut [f32],
) -> Result<()> {
    let _ = (dims, blocks, mask, input, out);
    unimplemented!()
}
