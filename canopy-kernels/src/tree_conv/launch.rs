//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::cuda::{ChainsOnDevice, DeviceList, PathsOnDevice, TreeOnDevice};
use crate::error::expect_len;
use crate::gates::launch::GateBuffers;
use crate::gdn_prefill::Sequences;
use crate::{AcceptedPaths, ConvDims, Error, Result, TreeBatch};

/// An element type that the kernels are built for.
pub trait Element: DeviceRepr {
    /// Symbol of commit.
    const COMMIT: &'static str;
}

impl Element for f32 {
    const COMMIT: &'static str = "tree_conv_commit_f32";
}

impl Element for half::bf16 {
    const COMMIT: &'static str = "tree_conv_commit_bf16";
}

/// An element type that verify may write from inputs of type `T`.
pub trait OutputOf<T>: DeviceRepr {
    /// Symbol of verify.
    const VERIFY: &'static str;
}

impl OutputOf<Self> for f32 {
    const VERIFY: &'static str = "tree_conv_verify_f32";
}

impl OutputOf<Self> for half::bf16 {
    const VERIFY: &'static str = "tree_conv_verify_bf16";
}

impl OutputOf<f32> for half::bf16 {
    const VERIFY: &'static str = "tree_conv_verify_f32_bf16";
}

const CTA: u32 = 128;

fn grid(channels: usize, y: usize) -> LaunchConfig {
    let x = (channels as u32 / 4).div_ceil(CTA);
    LaunchConfig { grid_dim: (x, y as u32, 1), block_dim: (CTA, 1, 1), shared_mem_bytes: 0 }
}

fn check_channels(op: &'static str, dims: ConvDims) -> Result<()> {
    if dims.channels.is_multiple_of(4) {
        return Ok(());
    }
    Err(Error::Unsupported {
        op,
        wanted: format!("{} channels", dims.channels),
        built: "multiples of 4 channels",
    })
}

fn pool_slots(op: &'static str, dims: ConvDims, elements: usize) -> Result<usize> {
    let slots = elements / dims.state_len();
    expect_len(op, "conv_state", &[slots, ConvDims::STATE_ROWS, dims.channels], elements)?;
    Ok(slots)
}

/// Device buffers of one forward call, the inputs of one dtype; all 16-byte aligned but those of the gates.
#[derive(Debug)]
pub struct ConvBuffers<'a, T, Out> {
    /// `[N, C]`.
    pub x: CudaView<'a, T>,
    /// `[C, 4]`.
    pub weight: CudaView<'a, T>,
    /// `[slots, 3, C]`.
    pub conv_state: CudaView<'a, T>,
    /// `[N, C]`.
    pub out: CudaViewMut<'a, Out>,
    /// What [`gates::launch::forward`](crate::gates::launch::forward) would do with the same rows, in the same launch and with the same bits.
    pub gates: Option<GateBuffers<'a, T>>,
}

/// The convolution of every node's root path.
///
/// # Errors
/// Any wrong length, a channel count that is no multiple of 4, more than [`MOST_ROWS`] rows, or a slot outside the pool, before the launch.
pub fn verify<T: Element, Out: OutputOf<T>>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    buffers: ConvBuffers<'_, T, Out>,
) -> Result<()> {
    const OP: &str = "tree-conv-verify";
    batch.check_slots(OP, pool_slots(OP, dims, buffers.conv_state.len())?)?;
    let lists = [&tree.parents, &tree.sequence, &tree.cu_nodes, &tree.slots];
    convolve(stream, OP, dims, batch.rows(), lists, buffers)
}

/// [`verify`] of long chains.
///
/// # Errors
/// As [`verify`].
pub fn forward_chains<T: Element, Out: OutputOf<T>>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    sequences: &Sequences,
    chains: &ChainsOnDevice,
    buffers: ConvBuffers<'_, T, Out>,
) -> Result<()> {
    const OP: &str = "chain-conv";
    sequences.check_slots(OP, pool_slots(OP, dims, buffers.conv_state.len())?)?;
    let lists = [&chains.parents, &chains.sequence, &chains.cu_rows, &chains.slots];
    convolve(stream, OP, dims, sequences.rows(), lists, buffers)
}

/// Rows of one launch at most.
pub const MOST_ROWS: usize = 65_535;

/// The launch over `rows` rows, by lists of parents, sequences, first rows and slots.
fn convolve<T: Element, Out: OutputOf<T>>(
    stream: &Arc<CudaStream>,
    op: &'static str,
    dims: ConvDims,
    rows: usize,
    [parents, sequence, cu_rows, slots]: [&DeviceList<i32>; 4],
    buffers: ConvBuffers<'_, T, Out>,
) -> Result<()> {
    let ConvBuffers { x, weight, conv_state, mut out, mut gates } = buffers;
    check_channels(op, dims)?;
    expect_len(op, "x", &[rows, dims.channels], x.len())?;
    expect_len(op, "weight", &[dims.channels, ConvDims::WIDTH], weight.len())?;
    expect_len(op, "out", &[rows, dims.channels], out.len())?;
    let heads = gates.as_ref().map_or(Ok(0), |gates| gates.check(op, rows))? as u32;
    if rows > MOST_ROWS {
        return Err(Error::Value {
            op,
            arg: "rows",
            expected: format!("at most {MOST_ROWS}"),
            got: rows.to_string(),
        });
    }
    if rows == 0 {
        return Ok(());
    }
    let (channels, mut config) = (dims.channels as u32, grid(dims.channels, rows));
    let mut launch = Launch::new(stream, op, "tree_conv/conv", Out::VERIFY)?;
    launch.value(&channels).read(&x).read(&weight).read(&conv_state).read(parents).read(sequence);
    launch.read(cu_rows).read(slots).write(&mut out).value(&heads);
    match &mut gates {
        Some(gates) => {
            config.grid_dim.0 += 1;
            launch.read(&gates.ab).read(&gates.a_log).read(&gates.dt_bias).write(&mut gates.out);
        }
        None => {
            launch.absent().absent().absent().absent();
        }
    }
    // SAFETY: lengths checked above, slots by the callers; every element of out, and of the gates where there are any, is written.
    unsafe { launch.launch(config) }
}

/// Layers of one launch of [`commit`].
const MOST_LAYERS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CommitArgs {
    channels: u32,
    layers: u32,
    layer_state: u64,
    x: [u64; MOST_LAYERS],
}
// SAFETY: repr(C) without padding; conv.cu asserts the size.
unsafe impl DeviceRepr for CommitArgs {}

/// Keeps the last three raw rows of (old conv state, accepted path), in place, for all layers of `xs`, whose pools lie one after another in
/// `conv_state` (`[layers, slots, 3, C]`). One launch for up to 64 layers.
///
/// # Errors
/// As [`verify`].
pub fn commit<T: Element>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    xs: &[CudaView<'_, T>],
    conv_state: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "tree-conv-commit";
    let rows = paths.cu_nodes().last().copied().unwrap_or(0) as usize;
    paths.check_slots(OP, check_commit(OP, dims, rows, xs, conv_state)?)?;
    if paths.rows().is_empty() {
        return Ok(());
    }
    let lists = [&on_device.rows, &on_device.cu_rows, &on_device.slots];
    keep_last(stream, OP, dims, (paths.slots().len(), lists), xs, conv_state)
}

/// [`commit`] of long chains.
///
/// # Errors
/// As [`commit`].
pub fn advance_chains<T: Element>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    sequences: &Sequences,
    chains: &ChainsOnDevice,
    xs: &[CudaView<'_, T>],
    conv_state: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "chain-conv-advance";
    sequences.check_slots(OP, check_commit(OP, dims, sequences.rows(), xs, conv_state)?)?;
    if sequences.rows() == 0 {
        return Ok(());
    }
    let lists = [&chains.last, &chains.cu_last, &chains.slots];
    keep_last(stream, OP, dims, (sequences.len(), lists), xs, conv_state)
}

/// Checks the lengths of all layers; returns the slots of a layer's pool.
fn check_commit<T>(
    op: &'static str,
    dims: ConvDims,
    rows: usize,
    xs: &[CudaView<'_, T>],
    conv_state: &CudaViewMut<'_, T>,
) -> Result<usize> {
    check_channels(op, dims)?;
    for x in xs {
        expect_len(op, "x", &[rows, dims.channels], x.len())?;
    }
    let layer_state = conv_state.len() / xs.len().max(1);
    expect_len(op, "conv_state", &[xs.len(), layer_state], conv_state.len())?;
    pool_slots(op, dims, layer_state)
}

/// The launches over the layers of `xs`, by lists of path rows, where each sequence's begin, and slots.
fn keep_last<T: Element>(
    stream: &Arc<CudaStream>,
    op: &'static str,
    dims: ConvDims,
    (sequences, [rows, cu_rows, slots]): (usize, [&DeviceList<i32>; 3]),
    xs: &[CudaView<'_, T>],
    conv_state: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    let layer_state = conv_state.len() / xs.len().max(1);
    for (at, some) in xs.chunks(MOST_LAYERS).enumerate() {
        let mut args = CommitArgs {
            channels: dims.channels as u32,
            layers: some.len() as u32,
            layer_state: layer_state as u64,
            x: [0; MOST_LAYERS],
        };
        let used = some.iter().map(|x| x.device_ptr(stream)).collect::<Vec<_>>();
        for (to, (address, _)) in args.x.iter_mut().zip(&used) {
            *to = *address;
        }
        let mut config = grid(dims.channels, sequences);
        config.grid_dim.2 = args.layers;
        let first = at * MOST_LAYERS * layer_state;
        let mut pools = conv_state.slice_mut(first..first + some.len() * layer_state);
        let mut launch = Launch::new(stream, op, "tree_conv/conv", T::COMMIT)?;
        launch.value(&args).read(rows).read(cu_rows).read(slots).write(&mut pools);
        // SAFETY: lengths and slots checked by the callers; each thread rewrites its own channels of its own slot in its own layer.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}
