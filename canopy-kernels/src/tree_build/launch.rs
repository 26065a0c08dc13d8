//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, DeviceRepr, DeviceSlice, LaunchConfig};

use super::{Draft, Lens, OP, check, value};
use crate::cuda::early::Launch;
use crate::cuda::{DeviceList, TreeOnDevice};
use crate::error::expect_len;
use crate::{DraftTree, Result, TreeBatch};

const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BuildArgs {
    k: u32,
    stated: u32,
}
// SAFETY: repr(C), 4-byte fields only; build.cu asserts the size.
unsafe impl DeviceRepr for BuildArgs {}

/// Device lists of one call; shapes as on the room's page.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// `[R, 2 + 2 k]`.
    pub best: &'a CudaView<'a, u32>,
    /// [`Draft::words`].
    pub drafts: &'a DeviceList<i32>,
    /// `[D, k]` f64, two words each.
    pub stated: Option<&'a DeviceList<i32>>,
    /// `[B]`.
    pub lens: &'a DeviceList<i32>,
    /// `[N]`.
    pub tokens: &'a DeviceList<i32>,
    /// `[N]`.
    pub nodes: &'a DeviceList<i32>,
    /// `[N]`.
    pub positions: &'a DeviceList<i32>,
    /// The lists of `batch`, whose parents, masks and plans are replaced.
    pub tree: &'a TreeOnDevice,
}

/// Builds the trees of `batch` that have a draft, in place and in the stream's order; the others' lists stay. In the batch a tree with a draft is a
/// [`DraftTree::broom`] of its depths, which has room for it.
///
/// # Errors
/// Any wrong length, k beyond 64, a draft outside `best` or of more than 15 depths, another tree than a broom, before the launch.
pub fn forward(
    stream: &Arc<CudaStream>,
    k: usize,
    drafts: &[Option<Draft>],
    batch: &TreeBatch,
    buffers: Buffers<'_>,
) -> Result<()> {
    let Buffers { best, drafts: on_device, stated, lens, tokens, nodes, positions, tree } = buffers;
    let counts = Lens {
        best: best.len(),
        stated: stated.map(|stated| stated.len() / 2),
        lens: lens.len(),
        tokens: tokens.len(),
        nodes: nodes.len(),
        positions: positions.len(),
        parents: tree.parents.len(),
        mask: tree.mask.len(),
    };
    check(k, drafts, batch.cu_nodes(), &counts)?;
    expect_len(OP, "drafts on the device", &[drafts.len(), 2], on_device.len())?;
    for (draft, tree) in drafts.iter().zip(batch.trees()) {
        let Some(Draft { depths, .. }) = *draft else { continue };
        if *tree != DraftTree::broom(tree.len(), depths)? {
            let expected = format!("a broom of {} nodes and depth {depths} for a draft", tree.len());
            return value("batch", expected, format!("{:?}", tree.parents()));
        }
    }
    if drafts.iter().all(Option::is_none) {
        return Ok(());
    }
    let args = BuildArgs { k: k as u32, stated: stated.is_some().into() };
    let mut launch = Launch::new(stream, OP, "tree_build/build", "tree_build")?;
    // without a model the kernel does not read its place
    launch.value(&args).read(best).read(on_device).read(stated.unwrap_or(on_device)).read(&tree.cu_nodes);
    launch.read(lens).read(&tree.plan_at).read(tokens).read(nodes).read(positions);
    launch.read(&tree.parents).read(&tree.mask).read(&tree.plans);
    let config = LaunchConfig {
        grid_dim: (drafts.len() as u32, 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: lengths and drafts checked above, and a broom's plan is the longest; nothing but kernels of this stream reads the lists, before
    // or after this launch.
    unsafe { launch.launch(config) }
}
