//! Launch of the fused design: one kernel a call, bf16 rows.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};
use half::bf16;

use crate::cuda::{Kernels, TreeOnDevice};
use crate::error::expect_len;
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

/// Blocks that are built: most nodes, value columns, threads.
const SHAPES: [(usize, usize, u32); 12] = [
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

/// An output type, which is also the accuracy: f32 is tier A (the state split into two bf16 parts), bf16 is tier B.
pub trait Tier: DeviceRepr {
    /// bf16 parts of the state.
    const PARTS: usize;
    /// Symbol of every block of [`SHAPES`].
    const SYMBOLS: [&'static str; SHAPES.len()];
}

macro_rules! tier {
    ($out:ty, $parts:literal, $suffix:literal) => {
        impl Tier for $out {
            const PARTS: usize = $parts;
            const SYMBOLS: [&'static str; SHAPES.len()] = [
                concat!("tree_gdn_fused_n16_v32_", $suffix),
                concat!("tree_gdn_fused_n32_v32_", $suffix),
                concat!("tree_gdn_fused_n64_v32_", $suffix),
                concat!("tree_gdn_fused_n128_v32_", $suffix),
                concat!("tree_gdn_fused_n256_v32_", $suffix),
                concat!("tree_gdn_fused_n64_v64_", $suffix),
                concat!("tree_gdn_fused_n128_v64_", $suffix),
                concat!("tree_gdn_fused_n256_v64_", $suffix),
                concat!("tree_gdn_fused_n16_v128_", $suffix),
                concat!("tree_gdn_fused_n32_v128_", $suffix),
                concat!("tree_gdn_fused_n64_v128_", $suffix),
                concat!("tree_gdn_fused_n128_v128_", $suffix),
            ];
        }
    };
}

tier!(f32, 2, "a_f32");
tier!(bf16, 1, "b_bf16");

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

/// The smallest block of `columns` value columns for trees of up to `nodes` nodes: its index in [`SHAPES`].
fn shape(nodes: usize, columns: usize) -> Option<usize> {
    SHAPES.iter().position(|&(most, width, _)| most >= nodes && width == columns)
}

/// Bytes of shared memory of one block of `columns` value columns, `None` where no such block is built.
pub fn shared_bytes<Out: Tier>(tree: &TreeOnDevice, nodes: usize, columns: usize) -> Option<usize> {
    let (most, width, _) = SHAPES[shape(nodes, columns)?];
    let tiles = (2 * most + Out::PARTS * width) * 256;
    // R and exp(g_cum) q S0 lie over the tiles
    let after = 8 * most * (width + 8);
    Some(tiles.max(after) + 8 * tree.most_entries + 28 * most + 4 * tree.most_words)
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
    let rows = batch.rows();
    super::launch::check_dims(OP, dims)?;
    expect_len(OP, "qkv", &[rows, dims.qkv_width()], qkv.len())?;
    expect_len(OP, "gates", &[rows, 2, dims.v_heads], gates.len())?;
    expect_len(OP, "o", &[rows, dims.v_heads, dims.dv], o.len())?;
    expect_len(OP, "u", &[rows, dims.v_heads, dims.dv], u.len())?;
    expect_len(OP, "g_cum", &[rows, dims.v_heads], g_cum.len())?;
    expect_len(OP, "state", &[state.len() / dims.state_len(), dims.state_len()], state.len())?;
    batch.check_slots(OP, state.len() / dims.state_len())?;
    if rows == 0 {
        return Ok(());
    }
    let most = super::launch::max_nodes(batch);
    let unsupported = || Error::Unsupported {
        op: OP,
        wanted: format!("{most} nodes in blocks of {columns} value columns"),
        built: "32 or 64 columns to 256 nodes, 128 columns to 128 nodes",
    };
    let at = shape(most, columns).ok_or_else(unsupported)?;
    let shared = shared_bytes::<Out>(tree, most, columns).ok_or_else(unsupported)?;
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
    let function = kernels.function(OP, "tree_gdn/fused", Out::SYMBOLS[at])?;
    let config = LaunchConfig {
        grid_dim: ((dims.dv / columns) as u32, args.v_heads, batch.sequences() as u32),
        block_dim: (SHAPES[at].2, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    let mut launch = stream.launch_builder(&function);
    launch.arg(&args).arg(&qkv).arg(&gates).arg(&state).arg(&tree.cu_nodes).arg(&tree.slots);
    launch.arg(&tree.plans).arg(&tree.plan_at).arg(&mut o).arg(&mut u).arg(&mut g_cum);
    // SAFETY: lengths and slots checked above; every element of o, u and g_cum is written.
    unsafe { launch.launch(config) }.map_err(driver)?;
    Ok(())
}
