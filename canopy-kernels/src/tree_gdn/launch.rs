//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig,
};

use crate::cuda::early::Launch;
use crate::cuda::{PathsOnDevice, TreeOnDevice};
use crate::error::expect_len;
use crate::{AcceptedPaths, Error, GdnDims, Result, TreeBatch};

/// Nodes, or value columns, of a tile.
pub(super) const TILE: usize = 32;
const VERIFY: &str = "tree_gdn/verify";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct VerifyArgs {
    pub batch: u32,
    pub k_heads: u32,
    pub v_heads: u32,
    pub max_nodes: u32,
    pub tiles: u32,
    scale: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for VerifyArgs {}

/// Layers of one launch.
const MOST_LAYERS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CommitArgs {
    batch: u32,
    k_heads: u32,
    v_heads: u32,
    layers: u32,
    layer_state: u64,
    qkv: [u64; MOST_LAYERS],
    gates: [u64; MOST_LAYERS],
    u: [u64; MOST_LAYERS],
}
// SAFETY: repr(C) without padding; args.cuh asserts the size.
unsafe impl DeviceRepr for CommitArgs {}

/// An element type that the kernels are built for.
pub trait Element: DeviceRepr {
    /// Symbols of gram, solve and the series' last launch.
    const SYMBOLS: [&'static str; 3];
    /// Symbols of commit in blocks of 32, 64 and 128 value columns.
    const COMMIT: [&'static str; 3];
}

impl Element for f32 {
    const SYMBOLS: [&'static str; 3] =
        ["tree_gdn_gram_f32_k128", "tree_gdn_solve_f32_k128_v128", "tree_gdn_apply_f32_k128_v128"];
    const COMMIT: [&'static str; 3] = [
        "tree_gdn_commit_f32_k128_v128",
        "tree_gdn_commit_f32_k128_v128_c64",
        "tree_gdn_commit_f32_k128_v128_c128",
    ];
}

impl Element for half::bf16 {
    const SYMBOLS: [&'static str; 3] =
        ["tree_gdn_gram_bf16_k128", "tree_gdn_solve_bf16_k128_v128", "tree_gdn_apply_bf16_k128_v128"];
    const COMMIT: [&'static str; 3] = [
        "tree_gdn_commit_bf16_k128_v128",
        "tree_gdn_commit_bf16_k128_v128_c64",
        "tree_gdn_commit_bf16_k128_v128_c128",
    ];
}

/// f32 elements of scratch that [`verify`] needs for this batch: both Gram matrices in 32 x 32 tiles per key head.
pub fn scratch_len(dims: GdnDims, batch: &TreeBatch) -> usize {
    batch.sequences() * dims.k_heads * tiles(batch) * 2 * TILE * TILE
}

fn max_nodes(batch: &TreeBatch) -> usize {
    batch.trees().iter().map(crate::DraftTree::len).max().unwrap_or(0)
}

fn tiles(batch: &TreeBatch) -> usize {
    let blocks = max_nodes(batch).div_ceil(TILE);
    blocks * (blocks + 1) / 2
}

fn check_dims(op: &'static str, dims: GdnDims) -> Result<()> {
    if dims.dk == 128 && dims.dv == 128 {
        return Ok(());
    }
    let wanted = format!("dk = {}, dv = {}", dims.dk, dims.dv);
    Err(Error::Unsupported { op, wanted, built: "dk = 128, dv = 128" })
}

/// Trees whose blocks need more than `limit` bytes of shared memory are refused before anything is launched.
pub(super) fn expect_shared(op: &'static str, bytes: usize, limit: usize) -> Result<()> {
    if bytes <= limit {
        return Ok(());
    }
    let expected = format!("at most {limit} bytes of shared memory a block on this device");
    Err(Error::Value { op, arg: "trees", expected, got: format!("{bytes} bytes") })
}

/// What every design of verify checks before a launch: the lengths of qkv, gates and state, then of o, u and g_cum, the head size and
/// the slots.
pub(super) fn check_verify(
    op: &'static str,
    dims: GdnDims,
    batch: &TreeBatch,
    [qkv, gates, state]: [usize; 3],
    [o, u, g_cum]: [usize; 3],
) -> Result<()> {
    let rows = batch.rows();
    check_dims(op, dims)?;
    expect_len(op, "qkv", &[rows, dims.qkv_width()], qkv)?;
    expect_len(op, "gates", &[rows, 2, dims.v_heads], gates)?;
    expect_len(op, "o", &[rows, dims.v_heads, dims.dv], o)?;
    expect_len(op, "u", &[rows, dims.v_heads, dims.dv], u)?;
    expect_len(op, "g_cum", &[rows, dims.v_heads], g_cum)?;
    batch.check_slots(op, dims.pool_slots(op, state)?)
}

impl VerifyArgs {
    pub(super) fn new(dims: GdnDims, batch: &TreeBatch) -> Self {
        Self {
            batch: batch.sequences() as u32,
            k_heads: dims.k_heads as u32,
            v_heads: dims.v_heads as u32,
            max_nodes: max_nodes(batch) as u32,
            tiles: tiles(batch) as u32,
            scale: dims.scale(),
        }
    }
}

/// Bytes of what a block keeps for so many nodes (`split.cuh`, `carve`).
pub(super) fn block_bytes(padded: usize) -> usize {
    4 * (padded * TILE + 2 * TILE * 128 + TILE * TILE + 3 * 256 + padded * 8)
}

/// The Gram matrices of every key head into `scratch`, whose length the caller has checked.
pub(super) fn gram<T: Element>(
    stream: &Arc<CudaStream>,
    args: &VerifyArgs,
    tree: &TreeOnDevice,
    qkv: &CudaView<'_, T>,
    scratch: &mut impl DevicePtrMut<f32>,
) -> Result<()> {
    let config = LaunchConfig {
        grid_dim: (args.tiles, args.k_heads, args.batch),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = Launch::new(stream, "tree-gdn-verify", VERIFY, T::SYMBOLS[0])?;
    launch.value(args).read(qkv).read(&tree.mask).read(&tree.cu_nodes).read(&tree.slots).write(scratch);
    // SAFETY: lengths checked by the caller; the kernel reads rows below cu_nodes[B] and writes tiles below `tiles`.
    unsafe { launch.launch(config) }
}

/// Device buffers of one verify call; shapes as on the room's page. `qkv` must start on a 16-byte boundary.
#[derive(Debug)]
pub struct VerifyBuffers<'a, T> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, T>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// `[slots, Hv, Dv, Dk]`.
    pub state: CudaView<'a, f32>,
    /// At least [`scratch_len`] elements.
    pub scratch: &'a mut CudaSlice<f32>,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, f32>,
    /// `[N, Hv, Dv]`.
    pub u: CudaViewMut<'a, f32>,
    /// `[N, Hv]`.
    pub g_cum: CudaViewMut<'a, f32>,
}

/// Verifies every tree of `batch` (two launches: Gram matrices, then solve and outputs). Reads the state pool only.
///
/// # Errors
/// Any wrong length, an unsupported head size or a slot outside the pool, before anything is launched.
pub fn verify<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    buffers: VerifyBuffers<'_, T>,
) -> Result<()> {
    const OP: &str = "tree-gdn-verify";
    let VerifyBuffers { qkv, gates, state, scratch, mut o, mut u, mut g_cum } = buffers;
    let (inputs, outputs) = ([qkv.len(), gates.len(), state.len()], [o.len(), u.len(), g_cum.len()]);
    check_verify(OP, dims, batch, inputs, outputs)?;
    if scratch.len() < scratch_len(dims, batch) {
        let (expected, got) = (Box::new([scratch_len(dims, batch)]), Box::new([scratch.len()]));
        return Err(Error::Shape { op: OP, arg: "scratch", expected, got });
    }
    if batch.rows() == 0 {
        return Ok(());
    }
    let args = VerifyArgs::new(dims, batch);
    gram::<T>(stream, &args, tree, &qkv, scratch)?;
    let padded = max_nodes(batch).next_multiple_of(TILE);
    let shared = block_bytes(padded);
    let config = LaunchConfig {
        grid_dim: ((dims.dv / TILE) as u32, args.v_heads, args.batch),
        block_dim: (256, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    let mut launch = Launch::new(stream, OP, VERIFY, T::SYMBOLS[1])?;
    let config = launch.spread(config)?;
    launch.value(&args).read(&qkv).read(&gates).read(&state).read(&tree.parents).read(&tree.mask);
    launch
        .read(&tree.cu_nodes)
        .read(&tree.slots)
        .read(&*scratch)
        .write(&mut o)
        .write(&mut u)
        .write(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written.
    unsafe { launch.launch(config) }
}

/// What verify read and wrote in one layer, for its commit.
#[derive(Debug)]
pub struct LayerTape<'a, T> {
    /// The rows that verify read.
    pub qkv: CudaView<'a, T>,
    /// The gates that verify read.
    pub gates: CudaView<'a, f32>,
    /// Pseudo-values that verify wrote.
    pub u: CudaView<'a, f32>,
}

/// Commits the accepted paths into the pools of all layers of `tapes`, which lie one after another in `state` (`[layers, slots, Hv, Dv, Dk]`):
/// `S <- exp(g_cum_a) S + sum_j exp(g_cum_a - g_cum_j) k_j u_j^T`, the differences taken as sums of `g` from the path's end. One launch for
/// up to 64 layers.
///
/// # Errors
/// Any wrong length, an unsupported head size or a slot outside the pools, before anything is launched.
pub fn commit<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    tapes: &[LayerTape<'_, T>],
    state: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    commit_in(stream, dims, paths, on_device, tapes, TILE, state)
}

/// [`commit`] with blocks of `columns` value columns (32, 64 or 128), taken 32 at a time. The state has the same bits.
///
/// # Errors
/// Those of [`commit`], or other columns.
pub fn commit_in<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    tapes: &[LayerTape<'_, T>],
    columns: usize,
    state: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "tree-gdn-commit";
    let Some(built) = [TILE, 2 * TILE, 4 * TILE].iter().position(|&built| built == columns) else {
        let (expected, got) = ("32, 64 or 128".into(), columns.to_string());
        return Err(Error::Value { op: OP, arg: "columns", expected, got });
    };
    let rows = paths.cu_nodes().last().copied().unwrap_or(0) as usize;
    check_dims(OP, dims)?;
    for tape in tapes {
        expect_len(OP, "qkv", &[rows, dims.qkv_width()], tape.qkv.len())?;
        expect_len(OP, "u", &[rows, dims.v_heads, dims.dv], tape.u.len())?;
        expect_len(OP, "gates", &[rows, 2, dims.v_heads], tape.gates.len())?;
    }
    let layer_state = state.len() / tapes.len().max(1);
    expect_len(OP, "state", &[tapes.len(), layer_state], state.len())?;
    paths.check_slots(OP, dims.pool_slots(OP, layer_state)?)?;
    if paths.rows().is_empty() {
        return Ok(());
    }
    for (at, some) in tapes.chunks(MOST_LAYERS).enumerate() {
        let mut args = CommitArgs {
            batch: paths.slots().len() as u32,
            k_heads: dims.k_heads as u32,
            v_heads: dims.v_heads as u32,
            layers: some.len() as u32,
            layer_state: layer_state as u64,
            qkv: [0; MOST_LAYERS],
            gates: [0; MOST_LAYERS],
            u: [0; MOST_LAYERS],
        };
        let mut in_use = Vec::with_capacity(3 * some.len());
        for (layer, tape) in some.iter().enumerate() {
            let (qkv, gates, u) =
                (tape.qkv.device_ptr(stream), tape.gates.device_ptr(stream), tape.u.device_ptr(stream));
            (args.qkv[layer], args.gates[layer], args.u[layer]) = (qkv.0, gates.0, u.0);
            in_use.extend([qkv.1, gates.1, u.1]);
        }
        let config = LaunchConfig {
            grid_dim: ((dims.dv / columns) as u32, args.v_heads, args.batch * args.layers),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let first = at * MOST_LAYERS * layer_state;
        let mut pools = state.slice_mut(first..first + some.len() * layer_state);
        let mut launch = Launch::new(stream, OP, "tree_gdn/commit", T::COMMIT[built])?;
        launch
            .value(&args)
            .read(&on_device.rows)
            .read(&on_device.cu_rows)
            .read(&on_device.slots)
            .write(&mut pools);
        // SAFETY: lengths and slots checked above; each CTA writes its own value rows of its own slot in its own layer; the tapes stay
        // borrowed meanwhile.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}
