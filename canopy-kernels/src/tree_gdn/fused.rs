//! Launches of the fused design: one kernel a call, bf16 rows, with or without the commit of the round before; or f32 rows.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, sys};
use half::bf16;

use crate::cuda::early::Launch;
use crate::cuda::{Kernels, Needs, PathsOnDevice, TreeOnDevice};
use crate::error::expect_len;
use crate::{AcceptedPaths, Error, GdnDims, Result, TreeBatch};

const OP: &str = "tree-gdn-fused";
const BUILT: &str = "32 or 64 columns to 256 nodes, 128 columns to 128 nodes";

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
    /// Symbol of every block that commits too, smallest first.
    const COMMIT_SYMBOLS: &'static [&'static str];
}

/// Most nodes, value columns and threads of every block that one file builds, and the symbols of both tiers.
macro_rules! blocks {
    ($prefix:literal, $shapes:ident, $a:ident, $b:ident, [$(($nodes:literal, $columns:literal, $threads:literal)),+ $(,)?]) => {
        const $shapes: &[(usize, usize, u32)] = &[$(($nodes, $columns, $threads)),+];
        const $a: &[&str] = &[$(concat!($prefix, "_n", $nodes, "_v", $columns, "_a_f32")),+];
        const $b: &[&str] = &[$(concat!($prefix, "_n", $nodes, "_v", $columns, "_b_bf16")),+];
    };
}

blocks!(
    "tree_gdn_fused",
    SHAPES,
    SYMBOLS_A,
    SYMBOLS_B,
    [
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
    ]
);

blocks!(
    "tree_gdn_fused_commit",
    COMMIT_SHAPES,
    COMMIT_SYMBOLS_A,
    COMMIT_SYMBOLS_B,
    [
        (16, 32, 128),
        (32, 32, 256),
        (64, 32, 256),
        (128, 32, 256),
        (256, 32, 256),
        (16, 128, 256),
        (32, 128, 256),
        (64, 128, 256),
        (128, 128, 512),
    ]
);

/// Most nodes, value columns, threads and symbol of the blocks for f32 rows, smallest first.
macro_rules! wide {
    ([$(($nodes:literal, $columns:literal, $threads:literal)),+ $(,)?]) => {
        const WIDE: &[(usize, usize, u32, &str)] =
            &[$(($nodes, $columns, $threads, concat!("tree_gdn_fused_wide_n", $nodes, "_v", $columns, "_a_f32"))),+];
    };
}

wide!([
    (16, 32, 128),
    (32, 32, 256),
    (64, 32, 256),
    (128, 32, 256),
    (16, 64, 128),
    (32, 64, 256),
    (64, 64, 256),
    (128, 64, 256),
]);

impl Tier for f32 {
    const PARTS: usize = 2;
    const SYMBOLS: &'static [&'static str] = SYMBOLS_A;
    const COMMIT_SYMBOLS: &'static [&'static str] = COMMIT_SYMBOLS_A;
}

impl Tier for bf16 {
    const PARTS: usize = 1;
    const SYMBOLS: &'static [&'static str] = SYMBOLS_B;
    const COMMIT_SYMBOLS: &'static [&'static str] = COMMIT_SYMBOLS_B;
}

/// Device buffers of one call; shapes as on the room's page. `qkv` must start on a 16-byte boundary.
#[derive(Debug)]
pub struct FusedBuffers<'a, Out, State = CudaView<'a, f32>, Row = bf16> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, Row>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// `[slots, Hv, Dv, Dk]`: a view, mutable where the launch commits too.
    pub state: State,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, Out>,
    /// `[N, Hv, Dv]`.
    pub u: CudaViewMut<'a, f32>,
    /// `[N, Hv]`.
    pub g_cum: CudaViewMut<'a, f32>,
}

/// The accepted paths of the round before, not yet in the pool, and what that round's verify read and wrote.
#[derive(Debug)]
pub struct Pending<'a> {
    /// The rows that it read.
    pub qkv: CudaView<'a, bf16>,
    /// The gates that it read.
    pub gates: CudaView<'a, f32>,
    /// The pseudo-values that it wrote.
    pub u: CudaView<'a, f32>,
    /// The accepted paths, of the same slots in the same order as the batch that is verified now.
    pub paths: &'a AcceptedPaths,
    /// The same on the device.
    pub on_device: &'a PathsOnDevice,
}

/// One launch's block.
struct Block {
    symbol: &'static str,
    threads: u32,
    shared: usize,
}

/// Bytes behind a block's tiles: entries of G and C, what a node brings, the plan.
fn behind_tiles(needs: Needs, most: usize) -> usize {
    8 * needs.entries + 28 * most + 4 * needs.words
}

/// The smallest of the built blocks of `columns` value columns that takes the largest tree.
fn block<Out: Tier>(needs: Needs, columns: usize, commits: bool) -> Option<Block> {
    let (shapes, symbols) =
        if commits { (COMMIT_SHAPES, Out::COMMIT_SYMBOLS) } else { (SHAPES, Out::SYMBOLS) };
    let at = shapes.iter().position(|&(most, width, _)| most >= needs.nodes && width == columns)?;
    let (most, width, threads) = shapes[at];
    let tiles = (2 * most + Out::PARTS * width) * 256;
    // R and exp(g_cum) q S0 lie over the tiles
    let after = 8 * most * (width + 8);
    let shared = tiles.max(after) + behind_tiles(needs, most);
    Some(Block { symbol: symbols[at], threads, shared })
}

/// The smallest of the built blocks for f32 rows.
fn wide_block(needs: Needs, columns: usize) -> Option<Block> {
    let &(most, width, threads, symbol) =
        WIDE.iter().find(|&&(most, width, ..)| most >= needs.nodes && width == columns)?;
    let tiles = (2 * most + width) * 512;
    let after = 8 * most * (width + 8);
    let shared = tiles.max(after) + behind_tiles(needs, most);
    Some(Block { symbol, threads, shared })
}

/// Bytes of shared memory of one block of `columns` value columns for f32 rows, `None` where no such block is built.
pub fn wide_shared_bytes(tree: &TreeOnDevice, columns: usize) -> Option<usize> {
    wide_block(tree.needs(), columns).map(|block| block.shared)
}

/// Bytes of shared memory of one block of `columns` value columns, `None` where no such block is built.
pub fn shared_bytes<Out: Tier>(tree: &TreeOnDevice, columns: usize) -> Option<usize> {
    block::<Out>(tree.needs(), columns, false).map(|block| block.shared)
}

/// The same of one block that commits too.
pub fn commit_shared_bytes<Out: Tier>(tree: &TreeOnDevice, columns: usize) -> Option<usize> {
    block::<Out>(tree.needs(), columns, true).map(|block| block.shared)
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
    let FusedBuffers { qkv, gates, state, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    super::launch::check_verify(OP, dims, batch, inputs, outputs)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let args = args(dims, tree);
    let block =
        block::<Out>(tree.needs(), columns, false).ok_or_else(|| unsupported(tree, columns, BUILT))?;
    let (mut launch, config) = prepare(stream, dims, batch, columns, ("tree_gdn/fused", block))?;
    launch.value(&args).read(&qkv).read(&gates).read(&state).read(&tree.cu_nodes).read(&tree.slots);
    launch.read(&tree.plans).read(&tree.plan_at).write(&mut o).write(&mut u).write(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written.
    unsafe { launch.launch(config) }
}

/// [`verify`] of f32 rows, f32-class, with blocks of `columns` value columns (32 or 64) for up to 128 nodes: products of f32 take three of
/// tf32 each. Reads the pool only.
///
/// # Errors
/// Those of [`verify`].
pub fn verify_wide(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    buffers: FusedBuffers<'_, f32, CudaView<'_, f32>, f32>,
) -> Result<()> {
    let FusedBuffers { qkv, gates, state, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    super::launch::check_verify(OP, dims, batch, inputs, outputs)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let args = args(dims, tree);
    let built = "32 or 64 columns to 128 nodes for f32 rows";
    let block = wide_block(tree.needs(), columns).ok_or_else(|| unsupported(tree, columns, built))?;
    let (mut launch, config) = prepare(stream, dims, batch, columns, ("tree_gdn/fused_wide", block))?;
    launch.value(&args).read(&qkv).read(&gates).read(&state).read(&tree.cu_nodes).read(&tree.slots);
    launch.read(&tree.plans).read(&tree.plan_at).write(&mut o).write(&mut u).write(&mut g_cum);
    // SAFETY: as in [`verify`].
    unsafe { launch.launch(config) }
}

/// Commits the accepted paths of the round before and verifies every tree of `batch` from the states that this gives, in one launch with
/// blocks of `columns` value columns (32 or 128): one read and one write of every state a round. Pool and outputs have the bits of
/// `launch::commit` followed by [`verify`]. A path may be empty; its slot is only read.
///
/// # Errors
/// Those of [`verify`], paths of other slots than the batch's, or wrong lengths of what is pending, before anything is launched.
pub fn commit_and_verify<Out: Tier>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    pending: Pending<'_>,
    buffers: FusedBuffers<'_, Out, CudaViewMut<'_, f32>>,
) -> Result<()> {
    let FusedBuffers { qkv, gates, mut state, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    super::launch::check_verify(OP, dims, batch, inputs, outputs)?;
    pending.check(dims, batch)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let args = args(dims, tree);
    let built = "32 columns to 256 nodes, 128 columns to 128 nodes";
    let block = block::<Out>(tree.needs(), columns, true).ok_or_else(|| unsupported(tree, columns, built))?;
    let (mut launch, config) = prepare(stream, dims, batch, columns, ("tree_gdn/fused_commit", block))?;
    launch.value(&args).read(&pending.qkv).read(&pending.gates).read(&pending.u);
    launch.read(&pending.on_device.rows).read(&pending.on_device.cu_rows);
    launch.read(&qkv).read(&gates).write(&mut state).read(&tree.cu_nodes).read(&tree.slots);
    launch.read(&tree.plans).read(&tree.plan_at).write(&mut o).write(&mut u).write(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written, and each CTA writes its own value rows of its
    // own slot.
    unsafe { launch.launch(config) }
}

impl Pending<'_> {
    fn check(&self, dims: GdnDims, batch: &TreeBatch) -> Result<()> {
        if self.paths.slots() != batch.slots() {
            let (expected, got) =
                (format!("the batch's slots {:?}", batch.slots()), format!("slots {:?}", self.paths.slots()));
            return Err(Error::Value { op: OP, arg: "paths", expected, got });
        }
        let rows = self.paths.cu_nodes().last().copied().unwrap_or(0) as usize;
        expect_len(OP, "pending qkv", &[rows, dims.qkv_width()], self.qkv.len())?;
        expect_len(OP, "pending gates", &[rows, 2, dims.v_heads], self.gates.len())?;
        expect_len(OP, "pending u", &[rows, dims.v_heads, dims.dv], self.u.len())
    }
}

fn args(dims: GdnDims, tree: &TreeOnDevice) -> FusedArgs {
    FusedArgs {
        k_heads: dims.k_heads as u32,
        v_heads: dims.v_heads as u32,
        entries: tree.most_entries as u32,
        scale: dims.scale(),
    }
}

fn unsupported(tree: &TreeOnDevice, columns: usize, built: &'static str) -> Error {
    let wanted = format!("{} nodes in blocks of {columns} value columns", tree.most_nodes);
    Error::Unsupported { op: OP, wanted, built }
}

/// The kernel of a block of so many value columns in `image`, and its launch.
fn prepare<'a>(
    stream: &'a Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    columns: usize,
    (image, block): (&str, Block),
) -> Result<(Launch<'a>, LaunchConfig)> {
    let Block { symbol, threads, shared } = block;
    let kernels = Kernels::on(stream.context())?;
    let function = kernels.function(OP, image, symbol)?;
    let fixed = function
        .get_attribute(sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        .map_err(|source| Error::Driver { op: OP, source })?;
    let limit = kernels.shared_limit() - fixed as usize;
    super::launch::expect_shared(OP, shared, limit)?;
    let config = LaunchConfig {
        grid_dim: ((dims.dv / columns) as u32, dims.v_heads as u32, batch.sequences() as u32),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    let launch = Launch::of(stream, OP, &kernels, function);
    let config = launch.spread(config)?;
    Ok((launch, config))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{COMMIT_SHAPES, SHAPES, Tier, WIDE, block, wide_block};
    use crate::cuda::{TreeLayout, Words};
    use crate::{DraftTree, TreeBatch};

    /// Bytes of shared memory that a block may have on compute capability 8.6, 8.9, 12.0 and 12.1.
    const SMALL: usize = 99 * 1024;

    fn needs(tree: DraftTree) -> crate::cuda::Needs {
        TreeLayout::new(&TreeBatch::single(tree, 0), &mut Words::default()).needs()
    }

    fn bytes<Out: Tier>(tree: DraftTree, columns: usize) -> Option<usize> {
        block::<Out>(needs(tree), columns, false).map(|block| block.shared)
    }

    fn wide_bytes(tree: DraftTree, columns: usize) -> Option<usize> {
        wide_block(needs(tree), columns).map(|block| block.shared)
    }

    #[test]
    fn blocks_of_32_columns_hold_128_shallow_nodes_within_99_kib() {
        let (bole, chain) = (|n| DraftTree::bole(n, 3).unwrap(), |n| DraftTree::chain(n).unwrap());
        for (what, bytes, fits) in [
            ("tier A, Bole's 128", bytes::<f32>(bole(128), 32), true),
            ("tier B, Bole's 128", bytes::<bf16>(bole(128), 32), true),
            ("tier A, Bole's 256", bytes::<f32>(bole(256), 32), false),
            ("tier A, a chain of 64", bytes::<f32>(chain(64), 32), true),
            ("tier A, a chain of 128", bytes::<f32>(chain(128), 32), false),
            ("tier A, Bole's 32, 128 columns", bytes::<f32>(bole(32), 128), true),
            ("tier A, Bole's 64, 128 columns", bytes::<f32>(bole(64), 128), false),
            ("f32 rows, Bole's 64", wide_bytes(bole(64), 32), true),
            ("f32 rows, Bole's 128", wide_bytes(bole(128), 32), false),
        ] {
            let bytes = bytes.unwrap_or_else(|| panic!("{what}: no block"));
            assert_eq!(bytes <= SMALL, fits, "{what}: {bytes} bytes");
        }
    }

    #[test]
    fn trees_beyond_the_built_blocks_have_none() {
        let chain = |nodes| needs(DraftTree::chain(nodes).unwrap());
        assert!(
            block::<f32>(chain(256), 32, false).is_some() && block::<f32>(chain(256), 128, false).is_none()
        );
        assert!(block::<f32>(chain(256), 64, true).is_none(), "no block of 64 columns commits");
        assert!(wide_block(chain(128), 64).is_some() && wide_block(chain(129), 32).is_none());
        assert!(block::<bf16>(chain(8), 33, false).is_none());
    }

    #[test]
    fn the_smallest_block_that_takes_a_tree_is_taken() {
        for shapes in [SHAPES.to_vec(), COMMIT_SHAPES.to_vec()] {
            for columns in [32, 64, 128] {
                let of: Vec<usize> =
                    shapes.iter().filter(|shape| shape.1 == columns).map(|shape| shape.0).collect();
                assert!(of.is_sorted(), "{columns} columns: {of:?}");
            }
        }
        assert!(WIDE.iter().filter(|shape| shape.1 == 32).map(|shape| shape.0).is_sorted());
        let symbol = |nodes| block::<f32>(needs(DraftTree::chain(nodes).unwrap()), 32, false).unwrap().symbol;
        assert_eq!(symbol(16), "tree_gdn_fused_n16_v32_a_f32");
        assert_eq!(symbol(17), "tree_gdn_fused_n32_v32_a_f32");
    }
}
