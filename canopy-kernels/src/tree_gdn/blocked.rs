//! Launches of the blocked design: one kernel a call, bf16 rows, tier B.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig};
use half::bf16;

use super::fused::FusedBuffers;
use crate::cuda::early::Launch;
use crate::cuda::{Kernels, TreeOnDevice};
use crate::{Error, GdnDims, Result, TreeBatch};

const OP: &str = "tree-gdn-blocked";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BlockedArgs {
    k_heads: u32,
    v_heads: u32,
    scale: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for BlockedArgs {}

/// A block that is built: most nodes, value columns, threads.
#[derive(Clone, Copy, Debug)]
struct Shape {
    nodes: usize,
    columns: usize,
    threads: usize,
    symbol: &'static str,
}

macro_rules! shapes {
    ($(($nodes:literal, $columns:literal, $threads:literal)),+ $(,)?) => {
        &[$(Shape {
            nodes: $nodes,
            columns: $columns,
            threads: $threads,
            symbol: concat!("tree_gdn_blocked_n", $nodes, "_v", $columns, "_b_bf16"),
        }),+]
    };
}

/// Smallest first.
const SHAPES: &[Shape] = shapes![
    (32, 32, 256),
    (64, 32, 256),
    (128, 32, 256),
    (256, 32, 384),
    (16, 64, 128),
    (64, 64, 256),
    (128, 64, 256),
    (256, 64, 384),
    (16, 128, 256),
    (32, 128, 256),
    (64, 128, 256),
    (128, 128, 256),
];

/// Value columns of the blocks that are built.
pub const COLUMNS: [usize; 3] = [32, 64, 128];

impl Shape {
    /// The smallest block of `columns` value columns that takes the largest tree.
    fn of(nodes: usize, columns: usize) -> Option<&'static Self> {
        SHAPES.iter().find(|shape| shape.nodes >= nodes && shape.columns == columns)
    }

    /// `sizeof(Blocked)`; blocked.cu asserts that they agree.
    fn shared(&self) -> usize {
        let blocks = self.nodes / 16;
        let words = blocks.div_ceil(2);
        // the triangle of blocks, or two rows of it
        let (units, counters) =
            if blocks > 8 { (2 * blocks, 3 * blocks) } else { (blocks * (blocks + 1) / 2, 4 + blocks) };
        let bytes = 2048 * units + self.nodes * (556 + 4 * words) + 4 * words * self.columns + 4 * counters;
        bytes.next_multiple_of(16)
    }
}

/// Whether a block of `columns` value columns is built for trees of so many nodes and this device's blocks have the shared memory for it.
pub fn fits(nodes: usize, columns: usize, shared_limit: usize) -> bool {
    Shape::of(nodes, columns).is_some_and(|shape| shape.shared() <= shared_limit)
}

/// Verifies every tree of `batch` in one launch with blocks of `columns` value columns (one of [`COLUMNS`]). Reads the pool only. The state is
/// rounded to bf16, the system's entries and the pseudo-values to tf32 within products; every block gives the same bits.
///
/// # Errors
/// Any wrong length, an unsupported head size or number of nodes, a slot outside the pool, or a block that needs more shared memory than this
/// device has, before anything is launched.
pub fn verify(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    buffers: FusedBuffers<'_, bf16>,
) -> Result<()> {
    let FusedBuffers { qkv, gates, state, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    super::launch::check_verify(OP, dims, batch, inputs, outputs)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let shape = Shape::of(tree.most_nodes, columns).ok_or_else(|| Error::Unsupported {
        op: OP,
        wanted: format!("{} nodes in blocks of {columns} value columns", tree.most_nodes),
        built: "32 or 64 columns to 256 nodes, 128 to 128",
    })?;
    let kernels = Kernels::on(stream.context())?;
    super::launch::expect_shared(OP, shape.shared(), kernels.shared_limit())?;
    let args =
        BlockedArgs { k_heads: dims.k_heads as u32, v_heads: dims.v_heads as u32, scale: dims.scale() };
    let config = LaunchConfig {
        grid_dim: ((dims.dv / shape.columns) as u32, dims.v_heads as u32, batch.sequences() as u32),
        block_dim: (shape.threads as u32, 1, 1),
        shared_mem_bytes: shape.shared() as u32,
    };
    let function = kernels.function(OP, "tree_gdn/blocked", shape.symbol)?;
    let mut launch = Launch::of(stream, OP, &kernels, function);
    let config = launch.spread(config)?;
    launch.value(&args).read(&qkv).read(&gates).read(&state).read(&tree.parents).read(&tree.mask);
    launch.read(&tree.cu_nodes).read(&tree.slots).write(&mut o).write(&mut u).write(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written.
    unsafe { launch.launch(config) }
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Shape, fits};

    #[test]
    fn dense_blocks_of_64_nodes_are_within_99_kib_and_larger_ones_are_not() {
        let small = 99 * 1024;
        for columns in COLUMNS {
            assert!(fits(64, columns, small), "{columns} columns: {:?}", Shape::of(64, columns));
            assert!(!fits(65, columns, small), "{columns} columns");
        }
        assert!(fits(256, 64, 227 * 1024) && !fits(256, 128, 227 * 1024));
    }
}
