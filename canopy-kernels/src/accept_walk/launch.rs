//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use super::{Lens, OP, check};
use crate::cuda::early::Launch;
use crate::{Error, Result};

/// Trees that one CTA walks at most, and its threads.
const MOST_TREES: usize = 1024;
const THREADS: u32 = 512;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct WalkArgs {
    trees: u32,
    most: u32,
    rows: u32,
    stated: u32,
}
// SAFETY: repr(C), 4-byte fields only; walk.cu asserts the size.
unsafe impl DeviceRepr for WalkArgs {}

/// Device buffers of one call; shapes as on the room's page.
#[derive(Debug)]
pub struct Buffers<'a> {
    /// `[N]`.
    pub parents: CudaView<'a, i32>,
    /// `[N]`.
    pub tokens: CudaView<'a, u32>,
    /// `[B + 1]`.
    pub cu_nodes: CudaView<'a, i32>,
    /// `[N, 4]`.
    pub best: CudaView<'a, u32>,
    /// `[N]` and `[B, 2, most]`.
    pub stated: Option<(CudaView<'a, u32>, CudaView<'a, i32>)>,
    /// `[B, 2 + 2 most]`.
    pub words: CudaViewMut<'a, u32>,
    /// `[N]`.
    pub rows: CudaViewMut<'a, i32>,
    /// `[B + 1]`.
    pub cu_rows: CudaViewMut<'a, i32>,
}

/// Walks trees of `cu_nodes` nodes, the same on the device; see the room's page. Tokens and parents may have been written there by kernels
/// ahead, parents that do not come before their child are none's.
///
/// # Errors
/// Any wrong length or more than 1,024 trees, before the launch.
pub fn forward(stream: &Arc<CudaStream>, cu_nodes: &[i32], most: usize, buffers: Buffers<'_>) -> Result<()> {
    let Buffers { parents, tokens, cu_nodes: on_device, best, stated, mut words, mut rows, mut cu_rows } =
        buffers;
    let lens = Lens {
        parents: parents.len(),
        tokens: tokens.len(),
        best: best.len(),
        stated: stated.as_ref().map(|(nodes, wanted)| (nodes.len(), wanted.len())),
        words: words.len(),
        rows: rows.len(),
        cu_rows: cu_rows.len(),
    };
    let trees = check(cu_nodes, most, &lens)?;
    crate::error::expect_len(OP, "cu_nodes on the device", &[trees + 1], on_device.len())?;
    if trees > MOST_TREES {
        let expected = format!("at most {MOST_TREES} trees");
        return Err(Error::Value { op: OP, arg: "cu_nodes", expected, got: trees.to_string() });
    }
    if trees == 0 {
        return Ok(());
    }
    let args = WalkArgs {
        trees: trees as u32,
        most: most as u32,
        rows: parents.len() as u32,
        stated: stated.is_some().into(),
    };
    // without a model the kernel does not read these places
    let nowhere = (tokens.slice(..), parents.slice(..));
    let (nodes, wanted) = stated.as_ref().unwrap_or(&nowhere);
    let mut launch = Launch::new(stream, OP, "accept_walk/walk", "accept_walk")?;
    launch.value(&args).read(&parents).read(&tokens).read(&on_device).read(&best).read(nodes).read(wanted);
    launch.write(&mut words).write(&mut rows).write(&mut cu_rows);
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: lengths checked above; links stay inside their tree; every element of words, rows and cu_rows is written.
    unsafe { launch.launch(config) }
}
