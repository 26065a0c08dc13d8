//! Launch of the CUDA kernels: one over key splits, one that adds the splits.

use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use half::bf16;

use super::ring::{self, Job};
pub use super::tile::Tile;
use crate::cuda::early::Launch;
use crate::cuda::{DeviceList, Kernels};
use crate::error::{expect_len, expect_pool};
use crate::{AttnDims, Error, Result};

/// Most splits of one stream's keys, and the CTAs that a stream's splits make at most (attend/args.cuh).
const MOST_SPLITS: usize = 32;
const SPLIT_BLOCKS: usize = 256;
/// Turns of a CTA of the second launch where a call has so many heads of rows.
const MERGE_TURNS: usize = 4;
const MANY_HEADS: usize = 4096;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AttendArgs {
    q_heads: u32,
    kv_heads: u32,
    capacity: u32,
    rows: u32,
    block_size: u32,
    window: u32,
    causal: u32,
    scale: f32,
    pub tiles: u32,
    pub height: u32,
    wide: u32,
    packed: u32,
    alone: u32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for AttendArgs {}

/// An output type: bf16, or f32 to see the kernel's own rounding.
pub trait Output: DeviceRepr {
    /// Symbols of the second launch for head widths 256 and 128, for few heads of rows and for many.
    const MERGE: [[&'static str; 2]; 2];
}

impl Output for bf16 {
    const MERGE: [[&'static str; 2]; 2] = [
        ["attend_merge_d256_bf16", "attend_merge_d128_bf16"],
        ["attend_merge_d256_bf16_many", "attend_merge_d128_bf16_many"],
    ];
}

impl Output for f32 {
    const MERGE: [[&'static str; 2]; 2] = [
        ["attend_merge_d256_f32", "attend_merge_d128_f32"],
        ["attend_merge_d256_f32_many", "attend_merge_d128_f32_many"],
    ];
}

/// Device buffers of one call. `q` and the pools must start on a 16-byte boundary.
#[derive(Debug)]
pub struct AttentionBuffers<'a, Out> {
    /// `[N, Hq, D]`, RoPE applied.
    pub q: CudaView<'a, bf16>,
    /// `[slots, capacity, Hkv, D]`.
    pub k_cache: CudaView<'a, bf16>,
    /// `[slots, capacity, Hkv, D]`.
    pub v_cache: CudaView<'a, bf16>,
    /// Rows per slot in the pools.
    pub capacity: usize,
    /// `[B]` keys of every stream before its rows. A stream whose keys and rows do not fit into its slot gets NaN.
    pub lens: CudaView<'a, i32>,
    /// At least `scratch_len` elements.
    pub scratch: &'a mut CudaSlice<f32>,
    /// `[N, Hq, D]`.
    pub out: CudaViewMut<'a, Out>,
}

/// Which rows a call has.
pub(crate) struct Streams<'a> {
    pub op: &'static str,
    /// Rows of every stream.
    pub counts: &'a [usize],
    /// `[B]` on the device.
    pub slots: CudaView<'a, i32>,
    /// Draft trees: `[B + 1]`, `[N, 8]`, `[N]` on the device.
    pub tree: Option<(&'a DeviceList<i32>, &'a DeviceList<u32>, &'a DeviceList<i32>)>,
    /// Draft blocks: rows of a block, window and causal mask.
    pub block: (usize, Option<usize>, bool),
}

impl Streams<'_> {
    /// Parts that the second launch adds, of the stream with the most.
    fn parts(&self, dims: AttnDims) -> usize {
        parts(dims, self.counts.iter().copied(), self.tree.is_some())
    }
}

/// Most parts of one stream: args.cuh `walk_of`.
fn parts(dims: AttnDims, counts: impl Iterator<Item = usize>, tree: bool) -> usize {
    let group = dims.q_heads / dims.kv_heads;
    let paths = usize::from(tree);
    let splits = |rows: usize| {
        let all = (SPLIT_BLOCKS / (dims.kv_heads * (rows * group).div_ceil(64))).min(MOST_SPLITS);
        all.saturating_sub(paths).max(1)
    };
    counts.filter(|&rows| rows > 0).map(splits).max().unwrap_or(0) + paths
}

/// Elements of scratch for streams of `counts` rows.
pub(crate) fn scratch_len(dims: AttnDims, counts: impl Iterator<Item = usize> + Clone, tree: bool) -> usize {
    let rows: usize = counts.clone().sum();
    parts(dims, counts, tree) * rows * dims.q_heads * (dims.head_dim + 2)
}

/// Checks every buffer; returns the pool's slots.
pub(crate) fn check<Out>(
    op: &'static str,
    dims: AttnDims,
    rows: usize,
    streams: usize,
    buffers: &AttentionBuffers<'_, Out>,
) -> Result<usize> {
    let AttentionBuffers { q, k_cache, v_cache, capacity, lens, out, .. } = buffers;
    if dims.head_dim != 128 && dims.head_dim != 256 {
        let wanted = format!("head_dim = {}", dims.head_dim);
        return Err(Error::Unsupported { op, wanted, built: "head_dim = 128, 256" });
    }
    expect_len(op, "q", &[rows, dims.q_heads, dims.head_dim], q.len())?;
    expect_len(op, "out", &[rows, dims.q_heads, dims.head_dim], out.len())?;
    expect_len(op, "lens", &[streams], lens.len())?;
    if *capacity == 0 || *capacity > i32::MAX as usize {
        let expected = "1 to 2147483647".into();
        return Err(Error::Value { op, arg: "capacity", expected, got: capacity.to_string() });
    }
    let slots = expect_pool(op, "k_cache", capacity * dims.kv_width(), k_cache.len())?;
    expect_len(op, "v_cache", &[slots, *capacity, dims.kv_heads, dims.head_dim], v_cache.len())?;
    Ok(slots)
}

/// Both launches, after [`check`].
pub(crate) fn launch<Out: Output>(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    streams: &Streams<'_>,
    tile: Option<Tile>,
    buffers: AttentionBuffers<'_, Out>,
) -> Result<()> {
    let op = streams.op;
    let driver = |source| Error::Driver { op, source };
    let AttentionBuffers { q, k_cache, v_cache, capacity, lens, scratch, mut out } = buffers;
    let rows: usize = streams.counts.iter().sum();
    let needed = scratch_len(dims, streams.counts.iter().copied(), streams.tree.is_some());
    if scratch.len() < needed {
        let (expected, got) = (Box::new([needed]), Box::new([scratch.len()]));
        return Err(Error::Shape { op, arg: "scratch", expected, got });
    }
    if rows == 0 {
        return Ok(());
    }
    let group = dims.q_heads / dims.kv_heads;
    let pairs = group * streams.counts.iter().copied().max().unwrap_or(0);
    let kernels = Kernels::on(stream.context())?;
    let tile = tile.unwrap_or_else(|| Tile::pick(pairs, dims.head_dim, &kernels));
    // a pool without slots, of which all streams are padding, cannot be described to the copy engine
    let tile = if k_cache.is_empty() { Tile::Tight } else { tile };
    let width = usize::from(dims.head_dim == 128);
    let (block_size, window, causal) = streams.block;
    let args = AttendArgs {
        q_heads: dims.q_heads as u32,
        kv_heads: dims.kv_heads as u32,
        capacity: capacity as u32,
        rows: rows as u32,
        block_size: if streams.tree.is_some() { 0 } else { block_size as u32 },
        window: window.unwrap_or(i32::MAX as usize).min(i32::MAX as usize) as u32,
        causal: causal.into(),
        scale: dims.scale() * std::f32::consts::LOG2_E,
        tiles: if tile.rings() { ring::tiles(dims, streams.counts) as u32 } else { 0 },
        height: tile.rows().unwrap_or(0) as u32,
        wide: (size_of::<Out>() == 4).into(),
        packed: out.device_ptr(stream).0.is_multiple_of(16).into(),
        alone: (streams.counts.len() == 1).into(),
    };
    let parts = streams.parts(dims);
    let heads = rows * dims.q_heads;
    let (mut part_o, rest) = scratch.split_at_mut(parts * heads * dims.head_dim);
    let mut part_ml = rest;
    // blocks have no node arrays: the kernels do not read these places
    let nowhere = streams.slots.device_ptr(stream).0;
    let (image, symbols) = tile.kernel();
    let function = kernels.function(op, image, symbols[width])?;
    if tile.rings() {
        let job = Job { op, dims, args, tile, counts: streams.counts, capacity, kernels: &kernels, function };
        let inputs = (&q, &k_cache, &v_cache, &lens);
        ring::launch(stream, &job, streams, inputs, (&mut part_o, &mut part_ml, &mut out))?;
    } else {
        let rows = tile.rows().unwrap_or(128);
        let config = LaunchConfig {
            grid_dim: (
                (dims.kv_heads * pairs.div_ceil(rows)) as u32,
                parts as u32,
                streams.counts.len() as u32,
            ),
            block_dim: (2 * rows as u32, 1, 1),
            shared_mem_bytes: tile.shared(dims.head_dim) as u32,
        };
        let mut first = stream.launch_builder(&function);
        first.arg(&args).arg(&q).arg(&k_cache).arg(&v_cache).arg(&lens).arg(&streams.slots);
        match &streams.tree {
            Some((cu_nodes, mask, _)) => first.arg(*cu_nodes).arg(*mask),
            None => first.arg(&nowhere).arg(&nowhere),
        };
        first.arg(&mut part_o).arg(&mut part_ml);
        // SAFETY: lengths checked by `check` and above; lengths and slots that do not fit are left out by the kernel.
        unsafe { first.launch(config) }.map_err(driver)?;
    }

    // a CTA has heads of one row, in several turns where rows are many
    let turn = 512 / dims.head_dim;
    let many = heads >= MANY_HEADS;
    let turns = if many { MERGE_TURNS } else { 1 };
    let config = LaunchConfig {
        grid_dim: ((rows * dims.q_heads.div_ceil(turn * turns)) as u32, 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut second = Launch::new(stream, op, "attend/merge", Out::MERGE[usize::from(many)][width])?;
    second.value(&args).read(&q).read(&k_cache).read(&v_cache).read(&lens).read(&streams.slots);
    match &streams.tree {
        Some((cu_nodes, mask, sequence)) => second.read(*cu_nodes).read(*mask).read(*sequence),
        None => second.read(&streams.slots).read(&streams.slots).read(&streams.slots),
    };
    second.write(&mut part_o).write(&mut part_ml).write(&mut out);
    // SAFETY: as above; every element of out is written. Before its wait the kernel reads lengths, slots and trees alone, which the launch
    // above found finished.
    unsafe { second.launch(config) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_the_rows() {
        let dims = AttnDims::new(16, 4, 256).unwrap();
        for (rows, parts_of) in [(1, 32), (16, 32), (64, 16), (128, 8), (256, 4)] {
            assert_eq!(parts(dims, [rows].into_iter(), true), parts_of, "{rows} rows");
        }
        assert_eq!(parts(AttnDims::new(32, 8, 128).unwrap(), [16].into_iter(), false), 32);
    }
}
