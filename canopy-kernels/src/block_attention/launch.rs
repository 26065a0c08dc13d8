//! Launch of the CUDA kernels. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView};

use super::cpu::BlockMask;
use crate::attend::launch::{self, Streams};
pub use crate::attend::launch::{AttentionBuffers, Output, Tile};
use crate::{AttnDims, Error, Result, check_slots};

/// Most rows of a block.
const MOST_ROWS: usize = 256;

/// Draft blocks on a device: `slots` is the host's list, `on_device` the same `[B]` list there, which a captured call may see changed.
#[derive(Debug)]
pub struct Blocks<'a> {
    /// Rows of every block.
    pub block_size: usize,
    /// `[B]` pool slots, -1 = padding.
    pub slots: &'a [i32],
    /// `[B]`.
    pub on_device: CudaView<'a, i32>,
}

/// Elements of scratch that a call needs.
pub fn scratch_len(dims: AttnDims, block_size: usize, blocks: usize) -> usize {
    launch::scratch_len(dims, std::iter::repeat_n(block_size, blocks), false)
}

/// Attention of every block row (two launches). Reads the pools only; `lens` are the context rows of every block.
///
/// # Errors
/// Any wrong length, a head width without a kernel, a block of no or more than 256 rows, a window of 0 or a slot outside the pool,
/// before anything is launched.
pub fn forward<Out: Output>(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    blocks: Blocks<'_>,
    mask: BlockMask,
    tile: Option<Tile>,
    buffers: AttentionBuffers<'_, Out>,
) -> Result<()> {
    const OP: &str = "block_attention";
    let Blocks { block_size, slots, on_device } = blocks;
    let value = |arg, expected: &str, got: usize| {
        Err(Error::Value { op: OP, arg, expected: expected.into(), got: got.to_string() })
    };
    if block_size == 0 || block_size > MOST_ROWS {
        return value("block_size", "1 to 256", block_size);
    }
    if mask.window == Some(0) {
        return value("window", "at least 1", 0);
    }
    crate::error::expect_len(OP, "slots on the device", &[slots.len()], on_device.len())?;
    let pool = launch::check(OP, dims, slots.len() * block_size, slots.len(), &buffers)?;
    check_slots(slots, OP, pool)?;
    let counts = vec![block_size; slots.len()];
    let streams = Streams {
        op: OP,
        counts: &counts,
        slots: on_device,
        tree: None,
        block: (block_size, mask.window, mask.causal),
    };
    launch::launch(stream, dims, &streams, tile, buffers)
}
