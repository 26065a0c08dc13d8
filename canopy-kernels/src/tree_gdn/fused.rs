//! Launch of the fused design: one kernel a call, bf16 rows.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};
use half::bf16;

use crate::cuda::{Kernels, TreeOnDevice};
use crate::{Error, GdnDims, Result, TreeBatch};

const OP: &str = "tree-gdn-fused";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct FusedArgs {
    k_heads: u32,
    v_heads: u32,
    entries: u32,
    scale: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for FusedArgs {}

/// An output type, which is also the accuracy: f32 is tier A (the state split into two bf16 parts), bf16 is tier B.
pub trait Tier: DeviceRepr {
    /// bf16 parts of the state.
    const PARTS: usize;
    /// Symbol of every block that is built, smallest first.
    const SYMBOLS: &'static [&'static str];
}

/// Most nodes, value columns and threads of every block that `fused.cu` builds.
macro_rules! blocks {
    ($(($nodes:literal, $columns:literal, $threads:literal)),+ $(,)?) => {
        const SHAPES: &[(usize, usize, u32)] = &[$(($nodes, $columns, $threads)),+];

        impl Tier for f32 {
            const PARTS: usize = 2;
            const SYMBOLS: &'static [&'static str] =
                &[$(concat!("tree_gdn_fused_n", $nodes, "_v", $columns, "_a_f32")),+];
        }

        impl Tier for bf16 {
            const PARTS: usize = 1;
            const SYMBOLS: &'static [&'static str] =
                &[$(concat!("tree_gdn_fused_n", $nodes, "_v", $columns, "_b_bf16")),+];
        }
    };
}

blocks![
    (16, 32, 128),
    (32, 32, 256),
    (64, 32, 256),
    (128, 32, 256),
    (256, 32, 256),
    (64, 64, 256),
    (128, 64, 256),
    (256, 64, 512),
    (16, 128, 256),
    (32, 128, 256),
    (64, 128, 256),
    (128, 128, 512),
];

/// Device buffers of one call; shapes as on the room's page. `qkv` must start on a 16-byte boundary.
#[derive(Debug)]
pub struct FusedBuffers<'a, Out> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, bf16>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// `[slots, Hv, Dv, Dk]`.
    pub state: CudaView<'a, f32>,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, Out>,
    /// `[N, Hv, Dv]`.
    pub u: CudaViewMut<'a, f32>,
    /// `[N, Hv]`.
    pub g_cum: CudaViewMut<'a, f32>,
}

/// One launch's block.
struct Block {
    symbol: &'static str,
    threads: u32,
    shared: usize,
}

/// The smallest block of `columns` value columns for trees of up to `nodes` nodes.
fn block<Out: Tier>(tree: &TreeOnDevice, nodes: usize, columns: usize) -> Option<Block> {
    let at = SHAPES.iter().position(|&(most, width, _)| most >= nodes && width == columns)?;
    let (most, width, threads) = SHAPES[at];
    let tiles = (2 * most + Out::PARTS * width) * 256;
    // R and exp(g_cum) q S0 lie over the tiles
    let after = 8 * most * (width + 8);
    let shared = tiles.max(after) + 8 * tree.most_entries + 28 * most + 4 * tree.most_words;
    Some(Block { symbol: Out::SYMBOLS[at], threads, shared })
}

/// Bytes of shared memory of one block of `columns` value columns, `None` where no such block is built.
pub fn shared_bytes<Out: Tier>(tree: &TreeOnDevice, nodes: usize, columns: usize) -> Option<usize> {
    block::<Out>(tree, nodes, columns).map(|block| block.shared)
}

/// Value columns of the blocks for this batch: narrow blocks fill the device when there are few heads, wide ones build G and C
/// less often. The bits do not depend on it.
pub fn columns(dims: GdnDims, batch: &TreeBatch) -> usize {
    match batch.sequences() * dims.v_heads {
        0..96 => 32,
        96..256 => 64,
        _ if super::launch::max_nodes(batch) > 128 => 64,
        _ => 128,
    }
}

/// Verifies every tree of `batch` in one launch with blocks of `columns` value columns (32, 64 or 128). Reads the pool only.
///
/// # Errors
/// Any wrong length, an unsupported head size, a slot outside the pool, or a batch whose paths need more shared memory than a block
/// of this device has, before anything is launched.
pub fn verify<Out: Tier>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    buffers: FusedBuffers<'_, Out>,
) -> Result<()> {
    let driver = |source| Error::Driver { op: OP, source };
    let FusedBuffers { qkv, gates, state, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    super::launch::check_verify(OP, dims, batch, inputs, outputs)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let most = super::launch::max_nodes(batch);
    let unsupported = || Error::Unsupported {
        op: OP,
        wanted: format!("{most} nodes in blocks of {columns} value columns"),
        built: "32 or 64 columns to 256 nodes, 128 columns to 128 nodes",
    };
    let Block { symbol, threads, shared } = block::<Out>(tree, most, columns).ok_or_else(unsupported)?;
    let kernels = Kernels::on(stream.context())?;
    let limit = kernels.shared_limit();
    if shared > limit {
        let expected = format!("at most {limit} bytes of shared memory a block on this device");
        return Err(Error::Value { op: OP, arg: "trees", expected, got: format!("{shared} bytes") });
    }
    let args = FusedArgs {
        k_heads: dims.k_heads as u32,
        v_heads: dims.v_heads as u32,
        entries: tree.most_entries as u32,
        scale: dims.scale(),
    };
    let function = kernels.function(OP, "tree_gdn/fused", symbol)?;
    let config = LaunchConfig {
        grid_dim: ((dims.dv / columns) as u32, args.v_heads, batch.sequences() as u32),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    let mut launch = stream.launch_builder(&function);
    launch.arg(&args).arg(&qkv).arg(&gates).arg(&state).arg(&tree.cu_nodes).arg(&tree.slots);
    launch.arg(&tree.plans).arg(&tree.plan_at).arg(&mut o).arg(&mut u).arg(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written.
    unsafe { launch.launch(config) }.map_err(driver)?;
    Ok(())
}
