//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::cuda::{PathsOnDevice, TreeOnDevice};
use crate::error::expect_len;
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

/// `x`, `out` `[N, C]`, `weight` `[C, 4]`, `conv_state` `[slots, 3, C]`; the inputs of one dtype, all 16-byte aligned.
///
/// # Errors
/// Any wrong length, a channel count that is no multiple of 4, or a slot outside the pool, before the launch.
pub fn verify<T: Element, Out: OutputOf<T>>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    batch: &TreeBatch,
    tree: &TreeOnDevice,
    inputs: [CudaView<'_, T>; 3],
    mut out: CudaViewMut<'_, Out>,
) -> Result<()> {
    const OP: &str = "tree-conv-verify";
    let [x, weight, conv_state] = inputs;
    check_channels(OP, dims)?;
    expect_len(OP, "x", &[batch.rows(), dims.channels], x.len())?;
    expect_len(OP, "weight", &[dims.channels, ConvDims::WIDTH], weight.len())?;
    expect_len(OP, "out", &[batch.rows(), dims.channels], out.len())?;
    batch.check_slots(OP, pool_slots(OP, dims, conv_state.len())?)?;
    if batch.rows() == 0 {
        return Ok(());
    }
    let channels = dims.channels as u32;
    let mut launch = Launch::new(stream, OP, "tree_conv/conv", Out::VERIFY)?;
    launch.value(&channels).read(&x).read(&weight).read(&conv_state).read(&tree.parents).read(&tree.sequence);
    launch.read(&tree.cu_nodes).read(&tree.slots).write(&mut out);
    // SAFETY: lengths and slots checked above; every element of out is written.
    unsafe { launch.launch(grid(dims.channels, batch.rows())) }
}

/// Keeps the last three raw rows of (old conv state, accepted path), in place.
///
/// # Errors
/// As [`verify`].
pub fn commit<T: Element>(
    stream: &Arc<CudaStream>,
    dims: ConvDims,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    x: CudaView<'_, T>,
    mut conv_state: CudaViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "tree-conv-commit";
    check_channels(OP, dims)?;
    let rows = paths.cu_nodes().last().copied().unwrap_or(0) as usize;
    expect_len(OP, "x", &[rows, dims.channels], x.len())?;
    let pool = pool_slots(OP, dims, conv_state.len())?;
    paths.check_slots(OP, pool)?;
    if paths.rows().is_empty() {
        return Ok(());
    }
    let channels = dims.channels as u32;
    let mut launch = Launch::new(stream, OP, "tree_conv/conv", T::COMMIT)?;
    launch
        .value(&channels)
        .read(&x)
        .read(&on_device.rows)
        .read(&on_device.cu_rows)
        .read(&on_device.slots)
        .write(&mut conv_state);
    // SAFETY: lengths and slots checked above; each thread rewrites its own channels of its own slot.
    unsafe { launch.launch(grid(dims.channels, paths.slots().len())) }
}
