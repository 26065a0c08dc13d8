//! The product of compute capability 9.0: warpgroup products over rows rounded to bf16.

use std::mem::zeroed;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchConfig, sys,
};
use half::bf16;

use super::{BLOCK, CHUNK, IMAGE, Packed, ROW_TILES, WeightOnDevice, WeightShape, int8};
use crate::cuda::Kernels;
use crate::cuda::early::Launch;
use crate::{Error, Result};

const OP: &str = "linear";
const WARPGROUP_IMAGE: &str = "linear/linear_sm90a";
const WHOLE_IMAGE: &str = "linear/whole_sm90a";
/// Rows and outputs of a tile of [`whole`], its threads and bytes of its ring: the twins of whole_sm90a.cu's constants.
const WHOLE: (usize, usize, u32, u32) = (256, 128, 384, 4 * (8 * 2_048 + 256 * 128));
/// CTAs that share a product's chunks: the multiprocessors of an H200. A constant, so that the order of a sum does not depend on the device.
const WORKERS: usize = 132;
/// Threads that multiply. A warp copies (of the largest tile a warpgroup), and one more rounds where rows are f32.
const PRODUCTS: u32 = 256;

struct Kernel {
    /// Rows of its tile.
    tile: usize,
    /// Most rows that it is for.
    most: usize,
    /// Its names over bf16 and int8 weights, and stages of its ring.
    symbols: [&'static str; 2],
    stages: [usize; 2],
    /// Its names where pairs of CTAs share rows.
    pairs: Option<[&'static str; 2]>,
    /// Whether it takes f32 rows, or rows rounded by a launch before it.
    wide: bool,
}

const fn kernel(tile: usize, symbols: [&'static str; 2], stages: [usize; 2]) -> Kernel {
    Kernel { tile, most: tile, symbols, stages, pairs: None, wide: false }
}

/// Fewest rows first. One warp rounds few rows as fast as they are needed.
const KERNELS: [Kernel; 7] = [
    Kernel { most: 2, wide: true, ..kernel(8, ["linear_w8_f32", "linear_q8_f32"], [5, 10]) },
    kernel(8, ["linear_w8", "linear_q8"], [5, 10]),
    kernel(16, ["linear_w16", "linear_q16"], [5, 10]),
    kernel(32, ["linear_w32", "linear_q32"], [4, 8]),
    kernel(64, ["linear_w64", "linear_q64"], [4, 6]),
    kernel(128, ["linear_w128", "linear_q128"], [3, 4]),
    Kernel {
        pairs: Some(["linear_w256_pair", "linear_q256_pair"]),
        ..kernel(256, ["linear_w256", "linear_q256"], [2, 2])
    },
];

impl Kernel {
    fn threads(&self) -> u32 {
        match (self.wide, self.tile) {
            (true, _) => PRODUCTS + 64,
            (_, 256) => PRODUCTS + 128,
            _ => PRODUCTS + 32,
        }
    }

    /// Its name over such weights, and the bytes of its ring.
    fn over(&self, packed: &Packed, shape: &WeightShape) -> (&'static str, usize) {
        let (at, weights) = match packed {
            Packed::Bf16(_) => (0, BLOCK * CHUNK * size_of::<bf16>()),
            Packed::Int8(_) => (1, int8::STAGE_BYTES),
        };
        // a pair is at the same inputs of two blocks where those lie a whole number of blocks apart
        let halves = shape.blocks().is_multiple_of(2) && workers(shape).is_multiple_of(2);
        let symbols = if halves { self.pairs.unwrap_or(self.symbols) } else { self.symbols };
        (symbols[at], self.stages[at] * (weights + self.tile * CHUNK * size_of::<bf16>()))
    }
}

/// `CUtensorMap` as a kernel parameter.
#[repr(transparent)]
struct Map(sys::CUtensorMap);
// SAFETY: plain data that the driver wrote for kernels to take by value.
unsafe impl DeviceRepr for Map {}

/// Whether the device has these kernels and they take such a weight.
pub(super) fn takes(kernels: &Kernels, shape: &WeightShape) -> bool {
    shape.inputs.is_multiple_of(8) && kernels.has(WARPGROUP_IMAGE)
}

/// Of rows that are `wide`, or bf16 before the call.
fn for_rows(rows: usize, wide: bool) -> &'static Kernel {
    let fits = |kernel: &&Kernel| kernel.most >= rows && (wide || !kernel.wide);
    KERNELS.iter().find(fits).unwrap_or(&KERNELS[KERNELS.len() - 1])
}

/// Those of a weight: fewer than [`WORKERS`] where each then has a piece of one block only, or where there are not two chunks for each.
fn workers(shape: &WeightShape) -> usize {
    let all = shape.blocks() * shape.chunks();
    let piece = all.div_ceil(WORKERS);
    match shape.chunks().is_multiple_of(piece) && piece > 1 {
        true => all / piece,
        false => all.div_ceil(2).min(WORKERS),
    }
}

fn spans_len(shape: &WeightShape, rows: usize) -> usize {
    let tile = for_rows(rows, true).tile;
    2 * workers(shape) * rows.div_ceil(tile).min(ROW_TILES) * tile * BLOCK
}

/// f32 elements of scratch: sums that workers share, then the rounded rows.
pub(super) fn scratch_len(shape: &WeightShape, rows: usize) -> usize {
    spans_len(shape, rows) + (rows * shape.inputs).div_ceil(2)
}

/// Rows of x.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    F32(&'a CudaView<'a, f32>),
    Bf16(&'a CudaView<'a, bf16>),
}

impl Source<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }
}

/// [`super::forward`] with every argument checked.
pub(super) fn forward(
    stream: &Arc<CudaStream>,
    weight: &mut WeightOnDevice,
    x: Source<'_>,
    scratch: &mut CudaSlice<f32>,
    starts: &[usize],
    y: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    let shape = &weight.shape;
    let rows = x.len() / shape.inputs;
    if rows == 0 {
        return Ok(());
    }
    let kernel = for_rows(rows, matches!(x, Source::F32(_)));
    let (symbol, ring) = kernel.over(&weight.packed, shape);
    let (mut spans, mut rest) = scratch.split_at_mut(spans_len(shape, rows));
    let rounded = match x {
        Source::F32(x) if !kernel.wide => Some(round(stream, x, &mut rest)?),
        _ => None,
    };
    let mut args = shape.args();
    for first in (0..rows).step_by(kernel.tile * ROW_TILES) {
        let count = (rows - first).min(kernel.tile * ROW_TILES);
        args.rows = count as u32;
        for (part, (&start, &out)) in starts.iter().zip(&shape.outputs).enumerate() {
            args.start[part] = (start + first * out) as u32;
        }
        let config = LaunchConfig {
            grid_dim: (count.div_ceil(kernel.tile) as u32, workers(shape) as u32, 1),
            block_dim: (kernel.threads(), 1, 1),
            shared_mem_bytes: ring as u32,
        };
        let range = first * shape.inputs..(first + count) * shape.inputs;
        let map = |x: &CudaView<'_, bf16>| map(stream, &x.slice(range.clone()), shape.inputs, kernel.tile);
        let (wide, map) = match (x, &rounded) {
            (Source::Bf16(x), _) => (None, Some(map(x)?)),
            (Source::F32(_), Some(rounded)) => (None, Some(map(&rounded.as_view())?)),
            (Source::F32(x), None) => (Some(x.slice(range)), None),
        };
        let mut launch = Launch::new(stream, OP, WARPGROUP_IMAGE, symbol)?;
        launch.value(&args);
        match (&wide, &map) {
            (Some(wide), _) => launch.read(wide),
            (None, Some(map)) => launch.value(map),
            (None, None) => &mut launch,
        };
        weight.packed.read_by(&mut launch);
        launch.write(&mut spans).write(&mut weight.arrived).write(&mut *y);
        // SAFETY: lengths checked by the caller; a warp writes its own outputs of its own rows, within the planes; rows past the last are
        // zeros; before its wait the kernel reads the weight alone.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}

/// [`super::forward`] by [`super::Rounding::Whole`] over bf16 weights, with every argument checked.
pub(super) fn whole(
    stream: &Arc<CudaStream>,
    weight: &mut WeightOnDevice,
    x: Source<'_>,
    scratch: &mut CudaSlice<f32>,
    starts: &[usize],
    y: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    let (tile, outputs, threads, shared) = WHOLE;
    let shape = &weight.shape;
    let rows = x.len() / shape.inputs;
    if rows == 0 {
        return Ok(());
    }
    let mut args = shape.args();
    args.rows = rows as u32;
    for (to, &start) in args.start.iter_mut().zip(starts) {
        *to = start as u32;
    }
    // clusters of two blocks each
    let tiles = rows.div_ceil(tile) * (shape.tiles() * super::TILE).div_ceil(2 * outputs);
    let config = LaunchConfig {
        grid_dim: (2 * tiles.min(WORKERS / 2) as u32, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared,
    };
    let mut room = scratch.slice_mut(..);
    let map = match x {
        Source::Bf16(x) => map(stream, x, shape.inputs, tile / 2)?,
        Source::F32(x) => map(stream, &round(stream, x, &mut room)?.as_view(), shape.inputs, tile / 2)?,
    };
    let mut launch = Launch::new(stream, OP, WHOLE_IMAGE, "linear_whole")?;
    launch.value(&args).value(&map);
    weight.packed.read_by(&mut launch);
    launch.write(&mut *y);
    // SAFETY: lengths checked by the caller; a warp writes its own outputs of its own rows, within the planes; rows past the last are zeros.
    unsafe { launch.launch(config) }
}

/// `x` in bf16, in `room`.
fn round<'a>(
    stream: &Arc<CudaStream>,
    x: &CudaView<'_, f32>,
    room: &'a mut CudaViewMut<'_, f32>,
) -> Result<CudaViewMut<'a, bf16>> {
    let (expected, got) = (Box::new([x.len().div_ceil(2)]), Box::new([room.len()]));
    // SAFETY: bf16 has no invalid bits, and the kernel below writes all of them.
    let rounded = unsafe { room.transmute_mut::<bf16>(x.len()) };
    let mut rounded = rounded.ok_or(Error::Shape { op: OP, arg: "scratch", expected, got })?;
    let quads = (x.len() / 4) as u32;
    let config =
        LaunchConfig { grid_dim: (quads.div_ceil(256), 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let mut launch = Launch::new(stream, OP, IMAGE, "linear_round")?;
    launch.value(&quads).read(x).write(&mut rounded);
    // SAFETY: both buffers have four elements a thread, the width being a multiple of 8.
    unsafe { launch.launch(config) }?;
    Ok(rounded)
}

/// `x` `[rows, inputs]` in boxes of 64 inputs and `tile` rows, swizzled as warpgroup products read them.
fn map(stream: &Arc<CudaStream>, x: &CudaView<'_, bf16>, inputs: usize, tile: usize) -> Result<Map> {
    let (address, _x) = x.device_ptr(stream);
    // SAFETY: plain data, written below.
    let mut map: sys::CUtensorMap = unsafe { zeroed() };
    let (sizes, strides) =
        ([inputs as u64, (x.len() / inputs) as u64], [(inputs * size_of::<bf16>()) as u64]);
    // SAFETY: every array has as many elements as a map of rank 2 takes; the address and the stride are multiples of 16.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            [64, tile as u32].as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|source| Error::Driver { op: OP, source })?;
    Ok(Map(map))
}
