//! Launches of the split design with the inverse taken apart: the series and the explicit inverse, behind one function with forward
//! substitution. They are there to be compared; nearly equal keys lose the series ([`Solve`]).

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DeviceRepr, LaunchConfig};

use super::Solve;
use super::launch::{self, Element, TILE, VerifyArgs, VerifyBuffers};
use crate::cuda::early::Launch;
use crate::cuda::{Kernels, TreeOnDevice};
use crate::{DraftTree, Error, GdnDims, Result, TreeBatch};

const OP: &str = "tree-gdn-series";
const IMAGE: &str = "tree_gdn/series";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SeriesArgs {
    matrices: u32,
    terms: u32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for SeriesArgs {}

/// Solves that [`verify`] runs.
pub const SOLVES: [Solve; 4] = [Solve::Forward, Solve::Dense, Solve::Neumann, Solve::Squaring];

impl SeriesArgs {
    fn new(batch: &TreeBatch, solve: Solve) -> Result<Self> {
        let depth = batch.trees().iter().map(DraftTree::max_depth).max().unwrap_or(0) as u32;
        Ok(match solve {
            Solve::Dense => Self { matrices: 1, terms: 0 },
            Solve::Neumann => Self { matrices: 1, terms: 1 },
            Solve::Squaring => Self { matrices: (u32::BITS - depth.leading_zeros()).max(1), terms: 0 },
            other => {
                let built = "forward, dense, neumann, squaring";
                return Err(Error::Unsupported { op: OP, wanted: other.to_string(), built });
            }
        })
    }
}

/// f32 elements of one matrix of every value head of every sequence.
fn matrix_len(dims: GdnDims, args: VerifyArgs) -> usize {
    args.batch as usize * dims.v_heads * args.tiles as usize * TILE * TILE
}

/// f32 elements of scratch that [`verify`] needs for this batch: the Gram matrices, then a matrix of every value head for the inverse and the
/// Neumann series, one a factor for squaring.
///
/// # Errors
/// [`Error::Unsupported`] for a solve that is not one of [`SOLVES`].
pub fn scratch_len(dims: GdnDims, batch: &TreeBatch, solve: Solve) -> Result<usize> {
    let gram = launch::scratch_len(dims, batch);
    if solve == Solve::Forward {
        return Ok(gram);
    }
    let matrices = SeriesArgs::new(batch, solve)?.matrices as usize;
    Ok(gram + matrices * matrix_len(dims, VerifyArgs::new(dims, batch)))
}

/// Verifies every tree of `batch` in the split design under `solve`: `forward` ([`launch::verify`]), `dense` (the inverse once per value head
/// by forward substitution, then applied to every value tile), `neumann` or `squaring`. Reads the state pool only; `buffers.scratch` has at
/// least [`scratch_len`] elements.
///
/// # Errors
/// Those of [`launch::verify`]; [`Error::Unsupported`] for another solve; a batch whose blocks need more shared memory than this device has.
pub fn verify<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    solve: Solve,
    buffers: VerifyBuffers<'_, T>,
) -> Result<()> {
    if solve == Solve::Forward {
        return launch::verify(stream, dims, batch, tree, buffers);
    }
    let how = SeriesArgs::new(batch, solve)?;
    let VerifyBuffers { qkv, gates, state, scratch, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    launch::check_verify(OP, dims, batch, inputs, outputs)?;
    check_scratch(scratch, scratch_len(dims, batch, solve)?)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let args = VerifyArgs::new(dims, batch);
    let padded = (args.max_nodes as usize).next_multiple_of(TILE);
    let (shared, limit) = (
        launch::block_bytes(padded) + 4 * padded * TILE,
        Kernels::on(stream.context())?.shared_limit() - FIXED_SHARED,
    );
    launch::expect_shared(OP, shared, limit)?;
    let (mut gram, mut tiles) = scratch.split_at_mut(launch::scratch_len(dims, batch));
    launch::gram::<T>(stream, &args, tree, &qkv, &mut gram)?;
    let made = Made { stream, tree, args, stride: matrix_len(dims, args) as u64 };
    if solve == Solve::Dense {
        made.inverse(&gates, &gram, &mut tiles, launch::block_bytes(padded))?;
    } else {
        made.powers(&gates, &gram, &mut tiles, how.matrices)?;
    }
    let config = LaunchConfig {
        grid_dim: ((dims.dv / TILE) as u32, args.v_heads, args.batch),
        block_dim: (256, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    let mut launch = Launch::new(stream, OP, IMAGE, T::SYMBOLS[2])?;
    let config = launch.spread(config)?;
    launch.value(&args).value(&how).read(&qkv).read(&gates).read(&state).read(&tree.parents).read(&tree.mask);
    launch.read(&tree.cu_nodes).read(&tree.slots).read(&gram).value(&made.stride).write(&mut tiles);
    launch.write(&mut o).write(&mut u).write(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written, tiles are read below the matrices made.
    unsafe { launch.launch(config) }
}

/// Static shared memory of the last launch.
const FIXED_SHARED: usize = 1296;

fn check_scratch(scratch: &CudaSlice<f32>, needed: usize) -> Result<()> {
    if scratch.len() >= needed {
        return Ok(());
    }
    let (expected, got) = (Box::new([needed]), Box::new([scratch.len()]));
    Err(Error::Shape { op: OP, arg: "scratch", expected, got })
}

/// The launches that make matrices.
struct Made<'a> {
    stream: &'a Arc<CudaStream>,
    tree: &'a TreeOnDevice,
    args: VerifyArgs,
    /// Elements from one matrix of all heads to the next.
    stride: u64,
}

impl Made<'_> {
    fn config(&self, across: u32, shared: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (across, self.args.v_heads, self.args.batch),
            block_dim: (256, 1, 1),
            shared_mem_bytes: shared as u32,
        }
    }

    /// `(I + G)^-1 - I` of every value head.
    fn inverse(
        &self,
        gates: &cudarc::driver::CudaView<'_, f32>,
        gram: &CudaViewMut<'_, f32>,
        tiles: &mut CudaViewMut<'_, f32>,
        shared: usize,
    ) -> Result<()> {
        let Self { stream, tree, args, stride } = self;
        let mut launch = Launch::new(stream, OP, IMAGE, "tree_gdn_inverse")?;
        launch.value(args).read(gates).read(&tree.parents).read(&tree.mask).read(&tree.cu_nodes);
        launch.read(&tree.slots).read(gram).value(stride).write(tiles);
        // SAFETY: as in `verify`; a CTA writes the tiles of its own block column.
        unsafe { launch.launch(self.config(args.max_nodes.div_ceil(TILE as u32), shared)) }
    }

    /// `-G` of every value head, then its squares up to `matrices` in all.
    fn powers(
        &self,
        gates: &cudarc::driver::CudaView<'_, f32>,
        gram: &CudaViewMut<'_, f32>,
        tiles: &mut CudaViewMut<'_, f32>,
        matrices: u32,
    ) -> Result<()> {
        let Self { stream, tree, args, stride } = self;
        let mut launch = Launch::new(stream, OP, IMAGE, "tree_gdn_scaled")?;
        launch.value(args).read(gates).read(&tree.parents).read(&tree.mask).read(&tree.cu_nodes);
        launch.read(&tree.slots).read(gram).value(stride).write(&mut *tiles);
        // SAFETY: as in `verify`; a CTA writes its own tile.
        unsafe { launch.launch(self.config(args.tiles, 0)) }?;
        for from in 0..matrices - 1 {
            let mut launch = Launch::new(stream, OP, IMAGE, "tree_gdn_square")?;
            launch.value(args).read(&tree.mask).read(&tree.cu_nodes).read(&tree.slots).value(&from);
            launch.value(stride).write(&mut *tiles);
            // SAFETY: as in `verify`; a CTA reads matrix `from` and writes its own tile of the next.
            unsafe { launch.launch(self.config(args.tiles, 0)) }?;
        }
        Ok(())
    }
}
