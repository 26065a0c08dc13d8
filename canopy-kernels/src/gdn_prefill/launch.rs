//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};
use half::bf16;

use super::Sequences;
use crate::cuda::Kernels;
use crate::error::expect_len;
use crate::{Error, GdnDims, Result};

const OP: &str = "gdn-prefill";
/// Rows of a chunk.
pub const CHUNK: usize = 64;
/// f32 of one chunk's record: record.cuh's kRecord.
const RECORD: usize = 2 * 10 * 256 + 4 * CHUNK + 4;
/// Records that the first launch of a pair leaves for the second, about: 44 MB, what an L2 cache holds.
const RECORDS: usize = 2_048;
/// Fewest chunks of a sequence in a launch: fewer cost more in launches than their records' way through memory.
const FEWEST: usize = 16;
/// Shared memory and threads of the first launch.
const PREPARE: (usize, u32) = (2 * 2 * CHUNK * 72 * 4 + 2 * CHUNK * 4 + 2 * CHUNK * 16 + 16, 128);
/// CTAs that one multiprocessor each serves at once: those of an H200 and a few more.
const AT_ONCE: usize = 160;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PrefillArgs {
    k_heads: u32,
    v_heads: u32,
    first_chunk: u32,
    chunks: u32,
    scale: f32,
}
// SAFETY: repr(C), 4-byte fields only; args.cuh asserts the size.
unsafe impl DeviceRepr for PrefillArgs {}

/// The blocks of the second launch; all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// 32 value columns, two warps share sixteen.
    Pairs32,
    /// 64 value columns, two warps share sixteen.
    Pairs64,
    /// 128 value columns, a warp sixteen.
    Alone128,
    /// 64 value columns, one stage: at most 99 KiB of shared memory.
    Small64,
}

impl Block {
    /// Every block.
    pub const ALL: [Self; 4] = [Self::Pairs32, Self::Pairs64, Self::Alone128, Self::Small64];

    fn columns(self) -> usize {
        match self {
            Self::Pairs32 => 32,
            Self::Pairs64 | Self::Small64 => 64,
            Self::Alone128 => 128,
        }
    }

    fn pairs(self) -> bool {
        matches!(self, Self::Pairs32 | Self::Pairs64)
    }

    fn threads(self) -> u32 {
        (self.columns() / 16 * if self.pairs() { 64 } else { 32 }) as u32
    }

    /// Bytes of shared memory: the twin of `Stages::kBytes`.
    pub fn shared_bytes(self) -> usize {
        let stages = if self == Self::Small64 { 1 } else { 2 };
        let keys = if self.pairs() { 3 } else { stages };
        let (tile, triangle, planes) = (CHUNK * 256, 10 * 1_024, 4 * CHUNK * 4 + 16);
        let handed = if self.pairs() { 2 * self.columns() / 16 * 4_096 } else { 0 };
        keys * (tile + planes) + stages * (tile + 2 * triangle + CHUNK * (2 * self.columns() + 16)) + handed
    }

    /// The block for so many value heads of all sequences where a block may have `limit` bytes of shared memory.
    pub fn choose(heads: usize, limit: usize) -> Self {
        let wanted = match heads {
            heads if heads * 4 <= AT_ONCE => Self::Pairs32,
            heads if heads * 2 <= AT_ONCE => Self::Pairs64,
            _ => Self::Alone128,
        };
        if wanted.shared_bytes() <= limit { wanted } else { Self::Small64 }
    }
}

/// The type of `o`, which is the accuracy too: f32 for tier A, bf16 for tier B.
pub trait Tier: DeviceRepr {
    /// Symbols of the second launch, one for each of [`Block::ALL`].
    const CHUNKS: [&'static str; 4];
}

impl Tier for f32 {
    const CHUNKS: [&'static str; 4] = [
        "gdn_prefill_chunks_v32_pairs_a",
        "gdn_prefill_chunks_v64_pairs_a",
        "gdn_prefill_chunks_v128_alone_a",
        "gdn_prefill_chunks_v64_small_a",
    ];
}

impl Tier for bf16 {
    const CHUNKS: [&'static str; 4] = [
        "gdn_prefill_chunks_v32_pairs_b",
        "gdn_prefill_chunks_v64_pairs_b",
        "gdn_prefill_chunks_v128_alone_b",
        "gdn_prefill_chunks_v64_small_b",
    ];
}

/// [`Sequences`] on a device.
#[derive(Debug)]
pub struct SequencesOnDevice {
    /// `[B + 1]`.
    pub cu_rows: CudaSlice<i32>,
    /// `[B]`, -1 = padding.
    pub slots: CudaSlice<i32>,
}

impl SequencesOnDevice {
    /// Copies what the kernels read.
    pub fn new(stream: &Arc<CudaStream>, sequences: &Sequences) -> Result<Self> {
        let driver = |source| Error::Driver { op: OP, source };
        let slots = if sequences.is_empty() { &[-1][..] } else { sequences.slots() };
        Ok(Self {
            cu_rows: stream.clone_htod(sequences.cu_rows()).map_err(driver)?,
            slots: stream.clone_htod(slots).map_err(driver)?,
        })
    }
}

/// Device buffers of one call; shapes as on the room's page. `qkv` must start on a 16-byte boundary.
#[derive(Debug)]
pub struct PrefillBuffers<'a, Out> {
    /// `[N, 2 Hk Dk + Hv Dv]`.
    pub qkv: CudaView<'a, bf16>,
    /// `[N, 2, Hv]`.
    pub gates: CudaView<'a, f32>,
    /// `[slots, Hv, Dv, Dk]`, advanced in place.
    pub state: CudaViewMut<'a, f32>,
    /// At least [`scratch_len`].
    pub scratch: &'a mut CudaSlice<f32>,
    /// `[N, Hv, Dv]`.
    pub o: CudaViewMut<'a, Out>,
}

/// How a call is launched; none of it changes a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The second launch's block; `None` leaves it to [`Block::choose`].
    pub block: Option<Block>,
    /// Chunks of a sequence in one pair of launches.
    pub chunks: usize,
}

impl Plan {
    /// What [`forward`] uses: as many chunks as the records' cache holds.
    pub fn new(dims: GdnDims, sequences: &Sequences) -> Self {
        let most = sequences.lens().max().unwrap_or(0).div_ceil(CHUNK).max(1);
        let heads = (sequences.len() * dims.v_heads).max(1);
        Self { block: None, chunks: (RECORDS / heads).max(FEWEST).min(most) }
    }
}

/// Scratch elements of a pair of launches.
fn records(dims: GdnDims, sequences: &Sequences, plan: Plan) -> usize {
    sequences.len() * plan.chunks * dims.v_heads * RECORD
}

/// Scratch elements that a call needs.
pub fn scratch_len(dims: GdnDims, sequences: &Sequences) -> usize {
    records(dims, sequences, Plan::new(dims, sequences))
}

/// Runs every sequence over the state in its slot.
///
/// # Errors
/// Any wrong length, an unsupported head size, or a slot outside the pool, before anything is launched.
pub fn forward<Out: Tier>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    sequences: &Sequences,
    on_device: &SequencesOnDevice,
    buffers: PrefillBuffers<'_, Out>,
) -> Result<()> {
    forward_with(stream, dims, sequences, on_device, Plan::new(dims, sequences), buffers)
}

/// [`forward`] by a plan; the scratch then holds the plan's chunks of every sequence.
///
/// # Errors
/// As [`forward`], and a plan without chunks or with a block that this device has no shared memory for.
pub fn forward_with<Out: Tier>(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    sequences: &Sequences,
    on_device: &SequencesOnDevice,
    plan: Plan,
    buffers: PrefillBuffers<'_, Out>,
) -> Result<()> {
    check(dims, sequences, plan, &buffers)?;
    if sequences.is_empty() {
        return Ok(());
    }
    let driver = |source| Error::Driver { op: OP, source };
    let kernels = Kernels::on(stream.context())?;
    let limit = kernels.shared_limit();
    let block = plan.block.unwrap_or_else(|| Block::choose(sequences.len() * dims.v_heads, limit));
    if block.shared_bytes() > limit {
        let expected = format!("at most {limit} bytes of shared memory a block on this device");
        return Err(Error::Value { op: OP, arg: "block", expected, got: format!("{block:?}") });
    }
    let prepare = kernels.function(OP, "gdn_prefill/prepare", "gdn_prefill_prepare")?;
    let at = Block::ALL.iter().position(|&known| known == block).unwrap_or(0);
    let chunks = kernels.function(OP, "gdn_prefill/chunks", Out::CHUNKS[at])?;
    let PrefillBuffers { qkv, gates, mut state, scratch, mut o } = buffers;
    let most = sequences.lens().max().unwrap_or(0).div_ceil(CHUNK);
    let batch = sequences.len() as u32;
    let config = |x: usize, y: usize, threads: u32, shared: usize| LaunchConfig {
        grid_dim: (x as u32, y as u32, batch),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    for first in (0..most).step_by(plan.chunks) {
        let args = PrefillArgs {
            k_heads: dims.k_heads as u32,
            v_heads: dims.v_heads as u32,
            first_chunk: first as u32,
            chunks: plan.chunks as u32,
            scale: dims.scale(),
        };
        let grid = config(plan.chunks.min(most - first), dims.k_heads, PREPARE.1, PREPARE.0);
        let mut launch = stream.launch_builder(&prepare);
        launch
            .arg(&args)
            .arg(&qkv)
            .arg(&gates)
            .arg(&on_device.cu_rows)
            .arg(&on_device.slots)
            .arg(&mut *scratch);
        // SAFETY: lengths and slots checked above; a CTA writes its own chunk's records within the scratch.
        unsafe { launch.launch(grid) }.map_err(driver)?;
        let grid = config(dims.dv / block.columns(), dims.v_heads, block.threads(), block.shared_bytes());
        let mut launch = stream.launch_builder(&chunks);
        launch.arg(&args).arg(&qkv).arg(&mut state).arg(&on_device.cu_rows).arg(&on_device.slots);
        launch.arg(&*scratch).arg(&mut o);
        // SAFETY: lengths and slots checked above; a CTA writes its own value columns of its own rows and slot.
        unsafe { launch.launch(grid) }.map_err(driver)?;
    }
    Ok(())
}

fn check<Out>(
    dims: GdnDims,
    sequences: &Sequences,
    plan: Plan,
    buffers: &PrefillBuffers<'_, Out>,
) -> Result<()> {
    let rows = sequences.rows();
    if dims.dk != 128 || dims.dv != 128 {
        let wanted = format!("dk = {}, dv = {}", dims.dk, dims.dv);
        return Err(Error::Unsupported { op: OP, wanted, built: "dk = 128, dv = 128" });
    }
    expect_len(OP, "qkv", &[rows, dims.qkv_width()], buffers.qkv.len())?;
    expect_len(OP, "gates", &[rows, 2, dims.v_heads], buffers.gates.len())?;
    sequences.check_slots(OP, dims.pool_slots(OP, buffers.state.len())?)?;
    expect_len(OP, "o", &[rows, dims.v_heads, dims.dv], buffers.o.len())?;
    if plan.chunks == 0 {
        return Err(Error::Value { op: OP, arg: "chunks", expected: "at least 1".into(), got: "0".into() });
    }
    let records = records(dims, sequences, plan);
    if buffers.scratch.len() < records {
        let (expected, got) = (Box::new([records]), Box::new([buffers.scratch.len()]));
        return Err(Error::Shape { op: OP, arg: "scratch", expected, got });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Block;

    #[test]
    fn few_heads_are_spread_and_small_devices_get_the_small_block() {
        assert_eq!(Block::choose(32, 232_448), Block::Pairs32);
        assert_eq!(Block::choose(64, 232_448), Block::Pairs64);
        assert_eq!(Block::choose(512, 232_448), Block::Alone128);
        for heads in [1, 64, 512] {
            assert_eq!(Block::choose(heads, 101_376), Block::Small64);
        }
        assert!(Block::Small64.shared_bytes() <= 101_376);
        assert!(Block::ALL.iter().all(|block| block.shared_bytes() <= 232_448));
    }
}
