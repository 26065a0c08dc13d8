//! The product on CUDA: bf16 or int8 weights in tensor-core order, f32 rows. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};
use half::bf16;

use crate::cuda::Kernels;
use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

mod int8;
mod warpgroup;

use warpgroup::Source;

const OP: &str = "linear";
const IMAGE: &str = "linear/linear";
/// Outputs of a tile, and inputs of a tensor-core step.
const TILE: usize = 16;
/// Inputs that one stage of the kernel covers.
const CHUNK: usize = 128;
/// Outputs of a block.
const BLOCK: usize = 128;
const THREADS: usize = 256;
/// CTAs that share a product's chunks: two on each multiprocessor of an H200. A constant, so that the order of a sum does not depend on the
/// device.
const WORKERS: usize = 264;
/// Row tiles of one launch.
const ROW_TILES: usize = 4;
const MAX_PARTS: usize = 8;

/// How the kernel takes its f32 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// As two bf16 parts: products within 2^-15 of `|x w|`.
    Split,
    /// Rounded to bf16, as bf16 models are run elsewhere: half the work where rows are many.
    Bf16,
    /// As [`Self::Bf16`], each output summed in one piece where the device and the weight have that kernel: for hundreds of rows. A row's bits
    /// then are others than by [`Self::Bf16`], and do not depend on its company either.
    Whole,
}

/// Rows of a row tile and its kernels for [`Rounding::Split`] and [`Rounding::Bf16`], smallest first.
type Tiles = (usize, [&'static str; 2]);

const BF16_KERNELS: [Tiles; 4] = [
    (8, ["linear_r8_p2", "linear_r8_p1"]),
    (16, ["linear_r16_p2", "linear_r16_p1"]),
    (32, ["linear_r32_p2", "linear_r32_p1"]),
    (64, ["linear_r64_p2", "linear_r64_p1"]),
];

const INT8_KERNELS: [Tiles; 3] = [
    (8, ["linear_i8_p2", "linear_i8_p1"]),
    (16, ["linear_i16_p2", "linear_i16_p1"]),
    (32, ["linear_i32_p2", "linear_i32_p1"]),
];

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LinearArgs {
    inputs: u32,
    chunks: u32,
    blocks: u32,
    per_worker: u32,
    tiles: u32,
    rows: u32,
    parts: u32,
    tile_end: [u32; MAX_PARTS],
    width: [u32; MAX_PARTS],
    start: [u32; MAX_PARTS],
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for LinearArgs {}

/// The shape of one weight, or of several with the same inputs, stacked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightShape {
    inputs: usize,
    outputs: Vec<usize>,
}

impl WeightShape {
    /// `inputs` a multiple of 4; one to eight parts of at least one output each.
    ///
    /// # Errors
    /// Anything else.
    pub fn new(inputs: usize, outputs: &[usize]) -> Result<Self> {
        const OP: &str = "pack weight";
        let value = |arg, expected: &str, got: String| {
            Err(Error::Value { op: OP, arg, expected: expected.into(), got })
        };
        if inputs == 0 || !inputs.is_multiple_of(4) {
            return value("inputs", "a multiple of 4 on CUDA", inputs.to_string());
        }
        if outputs.is_empty() || outputs.len() > MAX_PARTS || outputs.contains(&0) {
            return value("parts", "1 to 8 parts of at least 1 output", format!("{outputs:?}"));
        }
        Ok(Self { inputs, outputs: outputs.to_vec() })
    }

    /// Input width.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Output width of every part.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }

    fn tiles(&self) -> usize {
        self.outputs.iter().map(|out| out.div_ceil(TILE)).sum()
    }

    fn chunks(&self) -> usize {
        self.inputs.div_ceil(CHUNK)
    }

    fn blocks(&self) -> usize {
        self.tiles().div_ceil(BLOCK / TILE)
    }

    /// bf16 elements of the packed weight: tiles of 16 outputs, inputs padded with zeros to chunks of 128.
    pub fn packed_len(&self) -> usize {
        self.tiles() * TILE * self.chunks() * CHUNK
    }

    /// Chunks of one worker, and workers.
    fn workers(&self) -> (usize, usize) {
        let chunks = self.blocks() * self.chunks();
        let per_worker = chunks.div_ceil(WORKERS).max(2);
        (per_worker, chunks.div_ceil(per_worker))
    }

    fn args(&self) -> LinearArgs {
        let mut args = LinearArgs {
            inputs: self.inputs as u32,
            chunks: self.chunks() as u32,
            blocks: self.blocks() as u32,
            per_worker: self.workers().0 as u32,
            tiles: self.tiles() as u32,
            parts: self.outputs.len() as u32,
            ..LinearArgs::default()
        };
        let mut tile = 0;
        for (part, &out) in self.outputs.iter().enumerate() {
            tile += out.div_ceil(TILE) as u32;
            (args.tile_end[part], args.width[part]) = (tile, out as u32);
        }
        args
    }

    /// The packed form of row-major matrices `[out_p, inputs]`: per tile of 16 outputs and step of 16 inputs 32 lanes of 8 values, lane
    /// `4 (o % 8) + k % 8 / 2` holding outputs `o` and `o + 8` at inputs `k`, `k + 1`, `k + 8` and `k + 9`, as m16n8k16 takes A.
    ///
    /// # Errors
    /// Another number of parts, or a part of another length.
    pub fn pack(&self, parts: &[&[bf16]]) -> Result<Vec<bf16>> {
        const OP: &str = "pack weight";
        expect_len(OP, "parts", &[self.outputs.len()], parts.len())?;
        let mut packed = vec![bf16::ZERO; self.packed_len()];
        let row_len = self.chunks() * CHUNK;
        let mut first_tile = 0;
        for (weights, &out) in parts.iter().zip(&self.outputs) {
            expect_len(OP, "part", &[out, self.inputs], weights.len())?;
            for (o, row) in weights.chunks_exact(self.inputs).enumerate() {
                let tile = &mut packed[(first_tile + o / TILE) * TILE * row_len..][..TILE * row_len];
                for (k, &w) in row.iter().enumerate() {
                    let (step, k) = (k / TILE, k % TILE);
                    let lane = o % 8 * 4 + k % 8 / 2;
                    let word = o % TILE / 8 + k / 8 * 2;
                    tile[step * 256 + lane * 8 + word * 2 + k % 2] = w;
                }
            }
            first_tile += out.div_ceil(TILE);
        }
        Ok(packed)
    }
}

/// Weights in tensor-core order.
#[derive(Debug)]
enum Packed {
    Bf16(CudaSlice<bf16>),
    Int8(CudaSlice<u8>),
}

impl Packed {
    /// The next parameter of `launch`.
    fn read_by<'a>(&'a self, launch: &mut Launch<'a>) {
        match self {
            Self::Bf16(packed) => launch.read(packed),
            Self::Int8(packed) => launch.read(packed),
        };
    }
}

/// A packed weight on a device, with the counters of its launches, which must follow one another on one stream.
#[derive(Debug)]
pub struct WeightOnDevice {
    shape: WeightShape,
    packed: Packed,
    arrived: CudaSlice<u32>,
}

impl WeightOnDevice {
    /// Takes `packed`, [`WeightShape::pack`]'s result on the device.
    ///
    /// # Errors
    /// Another length; an error of the driver.
    pub fn new(stream: &Arc<CudaStream>, shape: WeightShape, packed: CudaSlice<bf16>) -> Result<Self> {
        expect_len("pack weight", "packed", &[shape.packed_len()], packed.len())?;
        Self::of(stream, shape, Packed::Bf16(packed))
    }

    fn of(stream: &Arc<CudaStream>, shape: WeightShape, packed: Packed) -> Result<Self> {
        let arrived = stream
            .alloc_zeros(shape.blocks() * ROW_TILES)
            .map_err(|source| Error::Driver { op: "pack weight", source })?;
        Ok(Self { shape, packed, arrived })
    }

    /// The weight of [`random`](super::random), made on the device.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn random(stream: &Arc<CudaStream>, shape: WeightShape, seed: u64, scale: f32) -> Result<Self> {
        const OP: &str = "random weight";
        let driver = |source| Error::Driver { op: OP, source };
        // SAFETY: the kernel below writes every element.
        let mut packed = unsafe { stream.alloc::<bf16>(shape.packed_len()) }.map_err(driver)?;
        let function = Kernels::on(stream.context())?.function(OP, IMAGE, "linear_fill")?;
        let blocks = (shape.packed_len() / 8).div_ceil(THREADS);
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let args = shape.args();
        let mut launch = stream.launch_builder(&function);
        launch.arg(&args).arg(&seed).arg(&scale).arg(&mut packed);
        // SAFETY: a thread writes its own eight values, checked against the packed length.
        unsafe { launch.launch(config) }.map_err(driver)?;
        // A product reads its weight before it waits for the kernels ahead.
        stream.synchronize().map_err(driver)?;
        Self::new(stream, shape, packed)
    }

    /// Its shape.
    pub fn shape(&self) -> &WeightShape {
        &self.shape
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        match &self.packed {
            Packed::Bf16(packed) => packed.num_bytes(),
            Packed::Int8(packed) => packed.num_bytes(),
        }
    }

    /// Whether [`forward_bf16`] is there for it.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn takes_bf16(&self, stream: &Arc<CudaStream>) -> Result<bool> {
        Ok(warpgroup::takes(&*Kernels::on(stream.context())?, &self.shape))
    }

    /// f32 elements of scratch that [`forward`] needs for this many rows: two blocks' sums of every worker, and the rows rounded.
    pub fn scratch_len(&self, rows: usize) -> usize {
        let (tile, _) = self.kernel(rows);
        let spans = 2 * self.shape.workers().1 * rows.div_ceil(tile).min(ROW_TILES) * tile * BLOCK;
        spans.max(warpgroup::scratch_len(&self.shape, rows))
    }

    /// [`Self::scratch_len`] of [`Rounding::Whole`], which leaves no sums.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn scratch_len_whole(&self, stream: &Arc<CudaStream>, rows: usize) -> Result<usize> {
        Ok(match (&self.packed, self.takes_bf16(stream)?) {
            (Packed::Bf16(_), true) => (rows * self.shape.inputs).div_ceil(2),
            _ => self.scratch_len(rows),
        })
    }

    /// The row tile for this many rows, and its kernels.
    fn kernel(&self, rows: usize) -> Tiles {
        let kernels: &[Tiles] = match self.packed {
            Packed::Bf16(_) => &BF16_KERNELS,
            Packed::Int8(_) => &INT8_KERNELS,
        };
        kernels.iter().find(|(tile, _)| *tile >= rows).copied().unwrap_or(kernels[kernels.len() - 1])
    }
}

/// `x` `[rows, in]` f32 -> plane `p` of `y`, `[rows, out_p]` f32 from element `starts[p]` on. `x` and the planes start on 16-byte
/// boundaries; what lies between the planes is left alone.
///
/// # Errors
/// Any wrong length, or planes that overlap or leave `y`, before the launch.
pub fn forward(
    stream: &Arc<CudaStream>,
    weight: &mut WeightOnDevice,
    rounding: Rounding,
    x: CudaView<'_, f32>,
    scratch: &mut CudaSlice<f32>,
    starts: &[usize],
    mut y: CudaViewMut<'_, f32>,
) -> Result<()> {
    let shape = &weight.shape;
    let needed = needed(stream, weight, rounding, x.len())?;
    let rows = check(weight, x.len(), (scratch.len(), needed), starts, y.len())?;
    if rounding != Rounding::Split && warpgroup::takes(&*Kernels::on(stream.context())?, shape) {
        return on_warpgroups(stream, weight, rounding, Source::F32(&x), scratch, starts, &mut y);
    }
    let (tile, [split, bf16]) = weight.kernel(rows);
    let (symbol, parts) = if rounding == Rounding::Split { (split, 2) } else { (bf16, 1) };
    let mut args = shape.args();
    for first in (0..rows).step_by(tile * ROW_TILES) {
        let count = (rows - first).min(tile * ROW_TILES);
        args.rows = count as u32;
        for (part, (&start, &out)) in starts.iter().zip(&shape.outputs).enumerate() {
            args.start[part] = (start + first * out) as u32;
        }
        let config = LaunchConfig {
            grid_dim: (count.div_ceil(tile) as u32, shape.workers().1 as u32, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: (2 * parts * tile * 256) as u32,
        };
        let x = x.slice(first * shape.inputs..(first + count) * shape.inputs);
        let mut launch = Launch::new(stream, OP, IMAGE, symbol)?;
        launch.value(&args).read(&x);
        weight.packed.read_by(&mut launch);
        launch.write(&mut *scratch).write(&mut weight.arrived).write(&mut y);
        // SAFETY: lengths checked above; a warp writes its own outputs of its own rows, within the planes; before its wait the kernel reads
        // the weight alone.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}

/// [`forward`] of bf16 rows where [`WeightOnDevice::takes_bf16`]: the bits that the same rows have in f32, without the launch that rounds them.
/// [`Rounding::Split`] is no other than [`Rounding::Bf16`] here.
///
/// # Errors
/// Those of [`forward`]; a device or a weight that has no such kernel.
pub fn forward_bf16(
    stream: &Arc<CudaStream>,
    weight: &mut WeightOnDevice,
    rounding: Rounding,
    x: CudaView<'_, bf16>,
    scratch: &mut CudaSlice<f32>,
    starts: &[usize],
    mut y: CudaViewMut<'_, f32>,
) -> Result<()> {
    let needed = needed(stream, weight, rounding, x.len())?;
    check(weight, x.len(), (scratch.len(), needed), starts, y.len())?;
    if !weight.takes_bf16(stream)? {
        let wanted = format!("rows of {} bf16 inputs on this device", weight.shape.inputs);
        return Err(Error::Unsupported { op: OP, wanted, built: "multiples of 8 on compute capability 9.0" });
    }
    on_warpgroups(stream, weight, rounding, Source::Bf16(&x), scratch, starts, &mut y)
}

/// The product by the kernels of compute capability 9.0, every argument checked.
fn on_warpgroups(
    stream: &Arc<CudaStream>,
    weight: &mut WeightOnDevice,
    rounding: Rounding,
    x: Source<'_>,
    scratch: &mut CudaSlice<f32>,
    starts: &[usize],
    y: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    match (rounding, &weight.packed) {
        (Rounding::Whole, Packed::Bf16(_)) => warpgroup::whole(stream, weight, x, scratch, starts, y),
        _ => warpgroup::forward(stream, weight, x, scratch, starts, y),
    }
}

/// Elements of scratch for `x` values.
fn needed(stream: &Arc<CudaStream>, weight: &WeightOnDevice, rounding: Rounding, x: usize) -> Result<usize> {
    let rows = x / weight.shape.inputs;
    if rounding == Rounding::Whole {
        weight.scratch_len_whole(stream, rows)
    } else {
        Ok(weight.scratch_len(rows))
    }
}

/// Checks the lengths of a product, those of its scratch and what it needs among them; returns its rows.
fn check(
    weight: &WeightOnDevice,
    x: usize,
    (scratch, needed): (usize, usize),
    starts: &[usize],
    y: usize,
) -> Result<usize> {
    let shape = &weight.shape;
    let rows = x / shape.inputs;
    expect_len(OP, "x", &[rows, shape.inputs], x)?;
    expect_len(OP, "starts", &[shape.outputs.len()], starts.len())?;
    let mut end = 0;
    for (&start, &out) in starts.iter().zip(&shape.outputs) {
        if start < end || start + rows * out > y || u32::try_from(y).is_err() {
            let expected = format!("planes in order within {y} elements, at most 2^32");
            return Err(Error::Value { op: OP, arg: "starts", expected, got: format!("{starts:?}") });
        }
        end = start + rows * out;
    }
    if scratch < needed {
        let (expected, got) = (Box::new([needed]), Box::new([scratch]));
        return Err(Error::Shape { op: OP, arg: "scratch", expected, got });
    }
    Ok(rows)
}

/// Rows of the stacked matrix by index, `y` `[ids, in]` f32 (of int8 weights what those stand for). `most` is the largest of the ids, which are on the device.
///
/// # Errors
/// Any wrong length, or an id at or past the number of outputs, before the launch.
pub fn lookup(
    stream: &Arc<CudaStream>,
    weight: &WeightOnDevice,
    ids: CudaView<'_, u32>,
    most: u32,
    mut y: CudaViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "linear lookup";
    let shape = &weight.shape;
    let total: usize = shape.outputs.iter().sum();
    expect_len(OP, "y", &[ids.len(), shape.inputs], y.len())?;
    if most as usize >= total {
        return Err(Error::Value {
            op: OP,
            arg: "ids",
            expected: format!("below {total}"),
            got: most.to_string(),
        });
    }
    if ids.is_empty() {
        return Ok(());
    }
    let config =
        LaunchConfig { grid_dim: (ids.len() as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let args = shape.args();
    let (image, symbol) = match weight.packed {
        Packed::Bf16(_) => (IMAGE, "linear_lookup"),
        Packed::Int8(_) => (int8::IMAGE, "linear_lookup_int8"),
    };
    let mut launch = Launch::new(stream, OP, image, symbol)?;
    launch.value(&args).read(&ids);
    weight.packed.read_by(&mut launch);
    launch.write(&mut y);
    // SAFETY: lengths and the largest id checked above; a block writes its own row.
    unsafe { launch.launch(config) }
}
