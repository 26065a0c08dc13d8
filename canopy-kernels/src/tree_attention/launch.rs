//! Launch of the CUDA kernels. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::attend::launch::{self, Streams};
pub use crate::attend::launch::{AttentionBuffers, Output, Tile};
use crate::cuda::TreeOnDevice;
use crate::{AttnDims, DraftTree, Result, TreeBatch};

/// Elements of scratch that a call needs.
pub fn scratch_len(dims: AttnDims, batch: &TreeBatch) -> usize {
    launch::scratch_len(dims, batch.trees().iter().map(DraftTree::len), true)
}

/// Attention of every drafted row (two launches). Reads the pools only; `lens` are the committed rows of every sequence.
///
/// The grid follows from the batch's node counts, not from the lengths: a captured call serves any parents, slots and lengths that are
/// later put into the same device buffers.
///
/// # Errors
/// Any wrong length, a head width without a kernel or a slot outside the pool, before anything is launched.
pub fn verify<Out: Output>(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    buffers: AttentionBuffers<'_, Out>,
) -> Result<()> {
    verify_with(stream, dims, batch, tree, None, buffers)
}

/// [`verify`] with a tile of the caller's choice.
pub fn verify_with<Out: Output>(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    tile: Option<Tile>,
    buffers: AttentionBuffers<'_, Out>,
) -> Result<()> {
    const OP: &str = "tree_attention verify";
    let slots = launch::check(OP, dims, batch.rows(), batch.sequences(), &buffers)?;
    batch.check_slots(OP, slots)?;
    let counts: Vec<usize> = batch.trees().iter().map(DraftTree::len).collect();
    let streams = Streams {
        op: OP,
        counts: &counts,
        slots: tree.slots.first(batch.sequences()),
        tree: Some((&tree.cu_nodes, &tree.mask, &tree.sequence)),
        block: (0, None, false),
    };
    launch::launch(stream, dims, &streams, tile, buffers)
}
