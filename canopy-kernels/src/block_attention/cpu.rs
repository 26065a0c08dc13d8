//! CPU forward.

use std::ops::Range;

use crate::attend::{Sight, attend};
use crate::error::expect_len;
use crate::tree_attention::cpu::AttentionInput;
use crate::{AttnDims, Error, Result, check_slots};

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

impl BlockMask {
    /// The positions that a row at `position` sees, of a sequence that ends at `end` with the block.
    fn sight(self, position: usize, end: usize) -> Range<usize> {
        let window = self.window.unwrap_or(end);
        let last = if self.causal { position } else { position.saturating_add(window - 1).min(end - 1) };
        (position + 1).saturating_sub(window)..last + 1
    }
}

/// Attention of every block row; `q`, `out` `[B block_size, Hq, D]`. Row i of sequence b is at position
/// `context_lens[b] + i`.
///
/// # Errors
/// When a buffer has another size, `block_size` or the window is 0, a slot lies outside the pool, a context length
/// is negative, or a sequence's context and block do not fit into its slot.
pub fn forward(
    dims: AttnDims,
    blocks: &DraftBlocks,
    mask: BlockMask,
    input: AttentionInput<'_>,
    out: &mut [f32],
) -> Result<()> {
    const OP: &str = "block_attention";
    let DraftBlocks { block_size, slots, context_lens } = blocks;
    let value = |arg, expected: String, got: String| Err(Error::Value { op: OP, arg, expected, got });
    if *block_size == 0 {
        return value("block_size", "at least 1".into(), "0".into());
    }
    if mask.window == Some(0) {
        return value("window", "at least 1".into(), "0".into());
    }
    expect_len(OP, "context_lens", &[slots.len()], context_lens.len())?;
    let count = slots.len().saturating_mul(*block_size);
    let (pools, pool_slots) = input.check(OP, dims, count, out)?;
    check_slots(slots, OP, pool_slots)?;
    let mut rows = Vec::with_capacity(count);
    for (&slot, &context) in slots.iter().zip(context_lens) {
        let Ok(slot) = usize::try_from(slot) else {
            rows.resize(rows.len() + block_size, None);
            continue;
        };
        let end = usize::try_from(context).ok().map(|context| context + block_size);
        let Some(end) = end.filter(|&end| end <= input.capacity) else {
            let expected = format!("0 to capacity {} - block_size {block_size}", input.capacity);
            return value("context_lens", expected, context.to_string());
        };
        rows.extend((end - block_size..end).map(|position| {
            let Range { start: first, end } = mask.sight(position, end);
            Some(Sight { slot, first, end, direct: end, path: &[] })
        }));
    }
    attend(pools, &rows, out);
    Ok(())
}
