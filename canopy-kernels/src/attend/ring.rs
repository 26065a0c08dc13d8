//! Launch of ring_sm90a.cu: descriptions of the pools for the copy engine, and how many splits a CTA takes.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchConfig, sys,
};
use half::bf16;

use super::launch::{AttendArgs, Streams};
use super::tile::{Tile, tile_keys};
use crate::cuda::Kernels;
use crate::cuda::early::Launch;
use crate::{AttnDims, Error, Result};

/// Splits that are added among themselves first (args.cuh `kFold`).
const FOLD: usize = 4;
/// Most splits of a stream, and the CTAs that its splits make at most (args.cuh).
const MOST_SPLITS: usize = 32;
const SPLIT_BLOCKS: usize = 128;
/// Folds with which CTAs take whole ones (args.cuh `kFilled`), and the multiprocessors that a wave of them has.
const FULL: usize = 120;
const WAVE: usize = 132;
/// Threads of a CTA (`Ring::kThreads`).
const THREADS: u32 = 384;

/// One call.
pub(super) struct Job<'a> {
    pub op: &'static str,
    pub dims: AttnDims,
    pub args: AttendArgs,
    pub tile: Tile,
    pub counts: &'a [usize],
    pub capacity: usize,
    pub kernels: &'a Kernels,
    pub function: CudaFunction,
}

/// Tiles of `height` rows that one stream has.
fn tiles_of(dims: AttnDims, rows: usize, height: usize) -> usize {
    dims.kv_heads * (rows * dims.q_heads / dims.kv_heads).div_ceil(height)
}

/// Tiles of 128 rows of a call (args.cuh `tiles`).
pub(super) fn tiles(dims: AttnDims, counts: &[usize]) -> usize {
    counts.iter().map(|&rows| tiles_of(dims, rows, 128)).sum()
}

/// CTAs of each stream. The kernel works with any number that is no less than a stream's row tiles under all heads.
fn cells(dims: AttnDims, tile: Tile, counts: &[usize]) -> usize {
    let rows = counts.iter().copied().max().unwrap_or(0);
    let across = tiles_of(dims, rows, tile.rows().unwrap_or(128)).max(1);
    let all = tiles(dims, counts);
    let splits = (SPLIT_BLOCKS / across).clamp(1, MOST_SPLITS);
    let parts = if all >= FULL { splits.div_ceil(FOLD) } else { splits };
    // waves, times a CTA's parts and what it begins with
    let takes = |runs: &usize| (all * runs).div_ceil(WAVE) * (parts.div_ceil(*runs) + 1);
    let runs = (1..=parts).min_by_key(takes).unwrap_or(1);
    let least = if tile.rows().is_none() && all < FULL { tiles_of(dims, rows, 64) } else { 1 };
    (across * runs).max(least)
}

/// `CUtensorMap` as a kernel parameter.
#[repr(transparent)]
struct Map(sys::CUtensorMap);
// SAFETY: plain data that the driver wrote for kernels to take by value.
unsafe impl DeviceRepr for Map {}

/// A pool `[slots, capacity, Hkv, D]` in boxes of one tile of keys by 64 columns.
fn describe(stream: &Arc<CudaStream>, job: &Job<'_>, pool: &CudaView<'_, bf16>) -> Result<Map> {
    let AttnDims { kv_heads, head_dim, .. } = job.dims;
    let slots = pool.len() / (job.capacity * job.dims.kv_width());
    let (pool, _used) = pool.device_ptr(stream);
    let sizes = [head_dim, kv_heads, job.capacity, slots].map(|n| n as u64);
    let row = 2 * (kv_heads * head_dim) as u64;
    let strides = [2 * head_dim as u64, row, row * job.capacity as u64];
    let shape = [64, 1, tile_keys(head_dim) as u32, 1];
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    // SAFETY: the arrays have the four (strides: three) elements that a rank of 4 asks for; the pointer is only written down.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4,
            pool as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            shape.as_ptr(),
            [1u32; 4].as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .map_err(|source| Error::Driver { op: job.op, source })?;
        Ok(Map(map.assume_init()))
    }
}

/// The launch over splits: `inputs` are q, keys, values and lengths, `outputs` the sums, their levels, and out.
pub(super) fn launch<Out>(
    stream: &Arc<CudaStream>,
    job: &Job<'_>,
    streams: &Streams<'_>,
    inputs: (&CudaView<'_, bf16>, &CudaView<'_, bf16>, &CudaView<'_, bf16>, &CudaView<'_, i32>),
    outputs: (&mut CudaViewMut<'_, f32>, &mut CudaViewMut<'_, f32>, &mut CudaViewMut<'_, Out>),
) -> Result<()> {
    let (q, keys, values, lens) = inputs;
    let maps = [describe(stream, job, keys)?, describe(stream, job, values)?];
    let config = LaunchConfig {
        grid_dim: (cells(job.dims, job.tile, job.counts) as u32, 1, job.counts.len() as u32),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: job.tile.shared(job.dims.head_dim) as u32,
    };
    let mut launch = Launch::of(stream, job.op, job.kernels, job.function.clone());
    launch.value(&job.args).value(&maps[0]).value(&maps[1]);
    launch.read(q).read(keys).read(values).read(lens).read(&streams.slots);
    match &streams.tree {
        Some((cu_nodes, mask, _)) => launch.read(*cu_nodes).read(*mask),
        // blocks have no node arrays: the kernel does not read these places
        None => launch.read(&streams.slots).read(&streams.slots),
    };
    launch.write(outputs.0).write(outputs.1).write(outputs.2);
    // SAFETY: lengths checked by the caller; lengths and slots that do not fit are left out by the kernel, which waits before it reads.
    unsafe { launch.launch(config) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_follow_the_rows_and_the_batch() {
        let (wide, narrow) = (AttnDims::new(16, 4, 256).unwrap(), AttnDims::new(32, 8, 128).unwrap());
        for (dims, tile, counts, blocks) in [
            (wide, Tile::Fed, vec![64], 128),
            (wide, Tile::Fed, vec![64; 16], 8),
            (wide, Tile::Fed, vec![64; 20], 16),
            (wide, Tile::Fed, vec![64; 4], 32),
            (wide, Tile::Fed, vec![1; 16], 8),
            (wide, Tile::FedOne, vec![16], 128),
            (wide, Tile::FedOne, vec![64; 16], 16),
            (narrow, Tile::Fed, vec![64; 16], 16),
            (narrow, Tile::FedTwo, vec![64], 128),
            (narrow, Tile::Fed, vec![256], 128),
            (narrow, Tile::Fed, vec![70, 0, 1], 72),
        ] {
            assert_eq!(cells(dims, tile, &counts), blocks, "{dims:?}, {tile:?}, {counts:?}");
            let across = tiles_of(dims, counts.iter().copied().max().unwrap(), tile.rows().unwrap_or(128));
            assert!(blocks >= across);
        }
    }
}
