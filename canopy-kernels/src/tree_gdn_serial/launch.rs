//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::cuda::{PathsOnDevice, TreeOnDevice};
use crate::error::expect_len;
use crate::{AcceptedPaths, Error, GdnDims, Result, TreeBatch};

const VERIFY: &str = "tree-gdn-serial-verify";
const CHAIN: &str = "tree-gdn-serial-chain";
const COMMIT: &str = "tree-gdn-serial-commit";
const IMAGE: &str = "tree_gdn_serial/serial";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SerialArgs {
    k_heads: u32,
    v_heads: u32,
    advance: u32,
    scale: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for SerialArgs {}

/// Value columns of the blocks that are built: with snapshots the first two, for chains all.
pub const COLUMNS: [usize; 3] = [32, 64, 128];

/// An element type of rows that the kernels are built for.
pub trait Element: DeviceRepr {
    /// Symbols with snapshots, one for each of the first two [`COLUMNS`].
    const SNAPSHOTS: [&'static str; 2];
    /// Symbols for chains, one for each of [`COLUMNS`].
    const CHAIN: [&'static str; 3];
}

macro_rules! element {
    ($type:ty, $name:literal) => {
        impl Element for $type {
            const SNAPSHOTS: [&'static str; 2] = [
                concat!("tree_gdn_serial_snapshots_v32_", $name),
                concat!("tree_gdn_serial_snapshots_v64_", $name),
            ];
            const CHAIN: [&'static str; 3] = [
                concat!("tree_gdn_serial_chain_v32_", $name),
                concat!("tree_gdn_serial_chain_v64_", $name),
                concat!("tree_gdn_serial_chain_v128_", $name),
            ];
        }
    };
}

element!(f32, "f32");
element!(half::bf16, "bf16");

/// Device buffers of one call of the baseline; shapes as on the room's page. `qkv` must start on a 16-byte boundary.
#[derive(Debug)]
pub struct SnapshotBuffers<'a, T> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, T>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// `[slots, Hv, Dv, Dk]`, read only.
    pub state: CudaView<'a, f32>,
    /// `[N, Hv, Dv, Dk]`; rows of padding sequences are left as they are.
    pub snapshots: CudaViewMut<'a, f32>,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, f32>,
}

/// What a chain call does with the state pool `[slots, Hv, Dv, Dk]`.
#[derive(Debug)]
pub enum Pool<'a> {
    /// Verify: the pool is read only.
    Read(CudaView<'a, f32>),
    /// Verify and commit the whole chain: every sequence's slot ends with the state after its last node.
    Advance(CudaViewMut<'a, f32>),
}

impl Pool<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read(state) => state.len(),
            Self::Advance(state) => state.len(),
        }
    }
}

/// Device buffers of one call of the chain form.
#[derive(Debug)]
pub struct ChainBuffers<'a, T> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, T>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// The pool and what becomes of it.
    pub state: Pool<'a>,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, f32>,
    /// `[N, Hv, Dv]`: the tape, as `tree_gdn`'s commit reads it.
    pub u: CudaViewMut<'a, f32>,
    /// `[N, Hv]`.
    pub g_cum: CudaViewMut<'a, f32>,
}

/// What every form checks: head size, the lengths of qkv, gates and state, the slots.
fn check(op: &'static str, dims: GdnDims, batch: &TreeBatch, [qkv, gates, state]: [usize; 3]) -> Result<()> {
    let rows = batch.rows();
    if dims.dk != 128 || dims.dv != 128 {
        let wanted = format!("dk = {}, dv = {}", dims.dk, dims.dv);
        return Err(Error::Unsupported { op, wanted, built: "dk = 128, dv = 128" });
    }
    expect_len(op, "qkv", &[rows, dims.qkv_width()], qkv)?;
    expect_len(op, "gates", &[rows, 2, dims.v_heads], gates)?;
    batch.check_slots(op, dims.pool_slots(op, state)?)
}

fn symbol(
    op: &'static str,
    symbols: &[&'static str],
    columns: usize,
    built: &'static str,
) -> Result<&'static str> {
    let unsupported =
        || Error::Unsupported { op, wanted: format!("blocks of {columns} value columns"), built };
    let at = COLUMNS.iter().position(|&known| known == columns).ok_or_else(unsupported)?;
    symbols.get(at).copied().ok_or_else(unsupported)
}

fn args(dims: GdnDims, advance: bool) -> SerialArgs {
    SerialArgs {
        k_heads: dims.k_heads as u32,
        v_heads: dims.v_heads as u32,
        advance: advance.into(),
        scale: dims.scale(),
    }
}

fn config(dims: GdnDims, columns: usize, sequences: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: ((dims.dv / columns) as u32, dims.v_heads as u32, sequences as u32),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Walks every tree of `batch` node by node, keeping every node's state (one launch, blocks of 32 or 64 value columns). Reads the pool
/// only.
///
/// # Errors
/// Any wrong length, an unsupported head size or block, or a slot outside the pool, before anything is launched.
pub fn verify<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    buffers: SnapshotBuffers<'_, T>,
) -> Result<()> {
    let SnapshotBuffers { qkv, gates, state, mut snapshots, mut o } = buffers;
    check(VERIFY, dims, batch, [qkv.len(), gates.len(), state.len()])?;
    let rows = batch.rows();
    expect_len(VERIFY, "snapshots", &[rows, dims.v_heads, dims.dv, dims.dk], snapshots.len())?;
    expect_len(VERIFY, "o", &[rows, dims.v_heads, dims.dv], o.len())?;
    let symbol = symbol(VERIFY, &T::SNAPSHOTS, columns, "32 or 64 value columns")?;
    if rows == 0 {
        return Ok(());
    }
    let args = args(dims, false);
    let mut launch = Launch::new(stream, VERIFY, IMAGE, symbol)?;
    launch
        .value(&args)
        .read(&qkv)
        .read(&gates)
        .read(&state)
        .read(&tree.parents)
        .read(&tree.cu_nodes)
        .read(&tree.slots);
    launch.write(&mut snapshots).write(&mut o);
    let config = launch.spread(config(dims, columns, batch.sequences()))?;
    // SAFETY: lengths and slots checked above; every element of o, and every snapshot of a sequence with a slot, is written.
    unsafe { launch.launch(config) }
}

/// Walks every chain of `tree` ([`TreeOnDevice::part`] leaves the others out) with the state in registers (one launch, blocks of 32, 64 or 128 value columns).
///
/// # Errors
/// A tree that is no chain, any wrong length, an unsupported head size or block, or a slot outside the pool, before anything is launched.
pub fn chain<T: Element>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    columns: usize,
    buffers: ChainBuffers<'_, T>,
) -> Result<()> {
    let ChainBuffers { qkv, gates, mut state, mut o, mut u, mut g_cum } = buffers;
    check(CHAIN, dims, batch, [qkv.len(), gates.len(), state.len()])?;
    let rows = batch.rows();
    expect_len(CHAIN, "o", &[rows, dims.v_heads, dims.dv], o.len())?;
    expect_len(CHAIN, "u", &[rows, dims.v_heads, dims.dv], u.len())?;
    expect_len(CHAIN, "g_cum", &[rows, dims.v_heads], g_cum.len())?;
    if let Some(at) = batch.trees().iter().zip(&tree.kept).position(|(tree, &kept)| kept && !tree.is_chain())
    {
        let got = format!("tree {at} of the batch branches");
        return Err(Error::Value { op: CHAIN, arg: "trees", expected: "chains".into(), got });
    }
    let symbol = symbol(CHAIN, &T::CHAIN, columns, "32, 64 or 128 value columns")?;
    if rows == 0 {
        return Ok(());
    }
    let args = args(dims, matches!(state, Pool::Advance(_)));
    let mut launch = Launch::new(stream, CHAIN, IMAGE, symbol)?;
    launch.value(&args).read(&qkv).read(&gates);
    match &mut state {
        Pool::Read(state) => launch.read(&*state),
        Pool::Advance(state) => launch.read(state),
    };
    launch.read(&tree.cu_nodes).read(&tree.slots).write(&mut o).write(&mut u).write(&mut g_cum);
    let config = launch.spread(config(dims, columns, batch.sequences()))?;
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written; the pool is written only when it came mutable,
    // by each CTA in its own value rows of its own slot.
    unsafe { launch.launch(config) }
}

/// Copies the snapshot of every accepted path's last node into the pool, in place.
///
/// # Errors
/// Any wrong length, an unsupported head size or a slot outside the pool, before anything is launched.
pub fn commit(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    snapshots: CudaView<'_, f32>,
    mut state: CudaViewMut<'_, f32>,
) -> Result<()> {
    if dims.dk != 128 || dims.dv != 128 {
        let wanted = format!("dk = {}, dv = {}", dims.dk, dims.dv);
        return Err(Error::Unsupported { op: COMMIT, wanted, built: "dk = 128, dv = 128" });
    }
    let rows = paths.cu_nodes().last().copied().unwrap_or(0) as usize;
    expect_len(COMMIT, "snapshots", &[rows, dims.v_heads, dims.dv, dims.dk], snapshots.len())?;
    paths.check_slots(COMMIT, dims.pool_slots(COMMIT, state.len())?)?;
    if paths.rows().is_empty() {
        return Ok(());
    }
    let args = args(dims, false);
    let mut launch = Launch::new(stream, COMMIT, IMAGE, "tree_gdn_serial_commit")?;
    launch
        .value(&args)
        .read(&snapshots)
        .read(&on_device.rows)
        .read(&on_device.cu_rows)
        .read(&on_device.slots);
    launch.write(&mut state);
    // SAFETY: lengths and slots checked above; each CTA writes its own value rows of its own slot.
    unsafe { launch.launch(config(dims, 32, paths.slots().len())) }
}
