//! The GDN kernels as cases to check and time: inputs of one shape, copied into as many sets as overflow the L2 cache.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use canopy_kernels::cuda::{Kernels, PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{Schedule, blocked, fused, launch, series};
use canopy_kernels::tree_gdn_serial::launch as serial;
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use super::variant::Variant;

/// Bytes that one turn through the sets must exceed, so that every launch finds its inputs outside the L2 cache.
const ROTATE: usize = 240 << 20;

/// Most shared memory that a block takes for the path that it commits.
const PATH_BYTES: usize = 10 << 10;

struct Set {
    qkv: CudaSlice<bf16>,
    gates: CudaSlice<f32>,
    state: CudaSlice<f32>,
    o: CudaSlice<f32>,
    o16: CudaSlice<bf16>,
    u: CudaSlice<f32>,
    g_cum: CudaSlice<f32>,
}

impl Set {
    fn copy(&self, stream: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self {
            qkv: stream.clone_dtod(&self.qkv)?,
            gates: stream.clone_dtod(&self.gates)?,
            state: stream.clone_dtod(&self.state)?,
            o: stream.clone_dtod(&self.o)?,
            o16: stream.clone_dtod(&self.o16)?,
            u: stream.clone_dtod(&self.u)?,
            g_cum: stream.clone_dtod(&self.g_cum)?,
        })
    }
}

/// Inputs and outputs of one (tree, batch) shape.
pub struct Case {
    dims: GdnDims,
    batch: TreeBatch,
    levels: TreeOnDevice,
    chains: TreeOnDevice,
    paths: AcceptedPaths,
    on_device: PathsOnDevice,
    scratch: CudaSlice<f32>,
    /// Every node's state, once a variant that keeps them was asked for.
    snapshots: Option<CudaSlice<f32>>,
    /// Every set's rows in f32, once a variant that reads them so was asked for.
    wide: Vec<CudaSlice<f32>>,
    /// What outputs hold before a run that is compared.
    unwritten: (CudaSlice<f32>, CudaSlice<bf16>),
    sets: Vec<Set>,
}

/// Cheap reproducible noise, about normal.
pub fn noise(n: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n).map(move |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let part = |shift: u32| ((x >> shift) & 0xffff) as f32 / 65536.0;
        (part(0) + part(16) + part(32) + part(48) - 2.0) * 1.732
    })
}

/// Every sequence's rows in another order: row `i` becomes what row `order[i]` was.
fn in_order<T: Copy>(values: Vec<T>, width: usize, order: &[usize]) -> Vec<T> {
    if order.is_sorted() {
        return values;
    }
    let sequences = values.chunks_exact(width * order.len());
    let row = |sequence: &'_ [T], &row: &usize| sequence[row * width..(row + 1) * width].to_vec();
    sequences.flat_map(|sequence| order.iter().flat_map(move |at| row(sequence, at))).collect()
}

/// The 9B model's heads.
///
/// # Errors
/// None that can happen: the sizes fit each other.
pub fn dims() -> Result<GdnDims> {
    Ok(GdnDims::new(16, 32, 128, 128)?)
}

/// How a case's keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// About normal, gates and write strengths too.
    Random,
    /// Nearly one key for all rows, every write strength 1, nothing forgotten: what a repeated token gives.
    NearlyEqual,
}

/// What verify reads, on the host.
pub struct Inputs {
    /// Rows.
    pub qkv: Vec<bf16>,
    /// Log gates and write strengths.
    pub gates: Vec<f32>,
    /// The pool.
    pub state: Vec<f32>,
}

impl Inputs {
    /// So many rows of so many sequences.
    ///
    /// # Errors
    /// None that can happen.
    pub fn new(rows: usize, sequences: usize, keys: Keys) -> Result<Self> {
        let dims = dims()?;
        let (width, key, heads) = (dims.qkv_width(), dims.k_heads * dims.dk, dims.v_heads);
        let base: Vec<f32> = noise(key, 4).collect();
        let shared = |(i, x): (usize, f32)| match (keys, (i % width).checked_sub(key)) {
            (Keys::NearlyEqual, Some(at)) if at < key => base[at] + 0.02 * x,
            _ => x,
        };
        let gate = |(i, x): (usize, f32)| match (keys, i / heads % 2) {
            (Keys::Random, 0) => -0.1 * x.abs(),
            (Keys::Random, _) => 1.0 / (1.0 + (-x).exp()),
            (Keys::NearlyEqual, plane) => plane as f32,
        };
        Ok(Self {
            qkv: noise(rows * width, 1).enumerate().map(shared).map(bf16::from_f32).collect(),
            gates: noise(rows * 2 * heads, 3).enumerate().map(gate).collect(),
            state: noise(sequences * dims.state_len(), 2).map(|x| 0.1 * x).collect(),
        })
    }
}

impl Case {
    /// `sequences` copies of `tree` at the 9B model's head counts; an accepted path of up to eight nodes each.
    ///
    /// # Errors
    /// From the driver.
    pub fn new(stream: &Arc<CudaStream>, tree: &DraftTree, sequences: usize) -> Result<Self> {
        let as_they_are: Vec<usize> = (0..tree.len()).collect();
        Self::ordered(stream, tree, &as_they_are, sequences)
    }

    /// The same nodes in another order: `order[row]` is the node of `tree` that is in a row.
    ///
    /// # Errors
    /// When it is no order of the tree, or from the driver.
    pub fn ordered(
        stream: &Arc<CudaStream>,
        tree: &DraftTree,
        order: &[usize],
        sequences: usize,
    ) -> Result<Self> {
        let (tree, _) = tree.reorder(order)?;
        let mut inputs = Inputs::new(sequences * tree.len(), sequences, Keys::Random)?;
        inputs.qkv = in_order(inputs.qkv, dims()?.qkv_width(), order);
        inputs.gates = in_order(inputs.gates, 2 * dims()?.v_heads, order);
        Self::of(stream, &tree, sequences, &inputs)
    }

    /// `sequences` copies of `tree` on given inputs.
    ///
    /// # Errors
    /// From the driver.
    pub fn of(stream: &Arc<CudaStream>, tree: &DraftTree, sequences: usize, inputs: &Inputs) -> Result<Self> {
        let dims = dims()?;
        let batch = TreeBatch::new(vec![tree.clone(); sequences], (0..sequences as i32).collect())?;
        let rows = batch.rows();
        let Inputs { qkv, gates, state } = inputs;
        let deepest = (0..tree.len()).max_by_key(|&node| tree.depths()[node].min(7)).unwrap_or(0);
        let path: Vec<usize> = tree.path(deepest).into_iter().take(8).collect();
        let paths = AcceptedPaths::new(&batch, &vec![path; sequences])?;
        let planes = rows * dims.v_heads;
        let bytes = 2 * qkv.len() + 4 * (gates.len() + state.len() + 2 * planes * dims.dv);
        let mut sets = vec![Set {
            qkv: stream.clone_htod(qkv)?,
            gates: stream.clone_htod(gates)?,
            state: stream.clone_htod(state)?,
            o: stream.alloc_zeros(planes * dims.dv)?,
            o16: stream.alloc_zeros(planes * dims.dv)?,
            u: stream.alloc_zeros(planes * dims.dv)?,
            g_cum: stream.alloc_zeros(planes)?,
        }];
        for _ in 0..ROTATE / bytes + 1 {
            sets.push(sets[0].copy(stream)?);
        }
        Ok(Self {
            levels: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Levels)?,
            chains: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Chains)?,
            on_device: PathsOnDevice::new(stream, &paths)?,
            scratch: stream.alloc_zeros(launch::scratch_len(dims, &batch))?,
            snapshots: None,
            wide: Vec::new(),
            unwritten: (
                stream.clone_htod(&vec![f32::NAN; planes * dims.dv])?,
                stream.clone_htod(&vec![bf16::NAN; planes * dims.dv])?,
            ),
            dims,
            batch,
            paths,
            sets,
        })
    }

    /// Launches of a variant that make a cold and a warm graph. Cold ones visit every set, unless one launch alone sweeps the L2 cache.
    pub fn launches(&self, variant: Variant) -> [usize; 2] {
        match variant {
            Variant::Snapshots(_) if self.snapshot_bytes() > ROTATE => [2, 2],
            _ => [self.sets.len().max(8), 20],
        }
    }

    /// Bytes that verify leaves for commit, one layer: `u` and `g_cum`.
    pub fn tape_bytes(&self) -> usize {
        4 * (self.sets[0].u.len() + self.sets[0].g_cum.len())
    }

    /// Bytes of one state a node, one layer: what the serial way keeps.
    pub fn snapshot_bytes(&self) -> usize {
        4 * self.batch.rows() * self.dims.state_len()
    }

    /// The tree under the schedule that its depth asks for.
    fn usual(&self) -> &TreeOnDevice {
        let levels = Schedule::for_tree(&self.batch.trees()[0]) == Schedule::Levels;
        if levels { &self.levels } else { &self.chains }
    }

    /// Whether the device can run a variant on this shape.
    pub fn fits(&self, stream: &Arc<CudaStream>, variant: Variant) -> bool {
        let limit = Kernels::on(stream.context()).map(|kernels| kernels.shared_limit());
        let (columns, schedule) = match variant {
            Variant::Wide(columns) => {
                let needed = fused::wide_shared_bytes(self.usual(), columns);
                return needed.zip(limit.ok()).is_some_and(|(bytes, limit)| bytes <= limit);
            }
            Variant::Blocked(columns) => {
                return limit.is_ok_and(|limit| blocked::fits(self.levels.most_nodes, columns, limit));
            }
            Variant::FusedA(columns, schedule) | Variant::FusedB(columns, schedule) => (columns, schedule),
            Variant::Round(columns) | Variant::RoundInOne(columns) => (columns, Schedule::Levels),
            _ => return true,
        };
        let tree = if schedule == Schedule::Levels { &self.levels } else { &self.chains };
        let needed = match variant {
            Variant::FusedB(..) => fused::shared_bytes::<bf16>(tree, columns),
            _ => fused::shared_bytes::<f32>(tree, columns),
        };
        // The block that commits too has some more, for the rows of the path.
        let more = if matches!(variant, Variant::RoundInOne(_)) { PATH_BYTES } else { 0 };
        needed.zip(limit.ok()).is_some_and(|(bytes, limit)| bytes + more <= limit)
    }

    /// Room for every node's state, for f32 rows and for a series' matrices, for the variants that use them. Not while a graph is captured, nor between
    /// a capture and its replays.
    ///
    /// # Errors
    /// From the driver.
    pub fn reserve(&mut self, stream: &Arc<CudaStream>, variant: Variant) -> Result<()> {
        if matches!(variant, Variant::Wide(_)) && self.wide.is_empty() {
            let rows: Vec<f32> =
                stream.clone_dtoh(&self.sets[0].qkv)?.into_iter().map(bf16::to_f32).collect();
            for _ in &self.sets {
                self.wide.push(stream.clone_htod(&rows)?);
            }
        }
        if let Variant::Series(solve) = variant {
            let needed = series::scratch_len(self.dims, &self.batch, solve)?;
            if self.scratch.len() < needed {
                self.scratch = stream.alloc_zeros(needed)?;
            }
        }
        let keeps = matches!(variant, Variant::Snapshots(_) | Variant::SnapshotCommit);
        if keeps && self.snapshots.is_none() {
            // SAFETY: verify writes every element before commit reads one.
            self.snapshots = Some(unsafe { stream.alloc(self.batch.rows() * self.dims.state_len()) }?);
        }
        Ok(())
    }

    /// One launch of `variant` on set `n`, counted round.
    ///
    /// # Errors
    /// From the launcher.
    pub fn launch(&mut self, stream: &Arc<CudaStream>, variant: Variant, n: usize) -> Result<()> {
        let at = n % self.sets.len();
        let Set { qkv, gates, state, o, o16, u, g_cum } = &mut self.sets[at];
        let (dims, batch) = (self.dims, &self.batch);
        let tree = |s| if s == Schedule::Levels { &self.levels } else { &self.chains };
        let usual = tree(Schedule::for_tree(&batch.trees()[0]));
        let (qkv, gates) = (qkv.as_view(), gates.as_view());
        macro_rules! fused {
            ($o:ident, $columns:expr, $schedule:expr) => {{
                let (o, u, g_cum) = ($o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let buffers = fused::FusedBuffers { qkv, gates, state: state.as_view(), o, u, g_cum };
                fused::verify(stream, dims, batch, tree($schedule), $columns, buffers)?
            }};
        }
        match variant {
            Variant::Round(columns) => return self.round(stream, columns, false, n),
            Variant::RoundInOne(columns) => return self.round(stream, columns, true, n),
            Variant::Split => {
                let (o, u, g_cum) = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let (state, scratch) = (state.as_view(), &mut self.scratch);
                let buffers = launch::VerifyBuffers { qkv, gates, state, scratch, o, u, g_cum };
                launch::verify(stream, dims, batch, &self.levels, buffers)?;
            }
            Variant::Series(solve) => {
                let (o, u, g_cum) = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let (state, scratch) = (state.as_view(), &mut self.scratch);
                let buffers = launch::VerifyBuffers { qkv, gates, state, scratch, o, u, g_cum };
                series::verify(stream, dims, batch, &self.levels, solve, buffers)?;
            }
            Variant::FusedA(columns, schedule) => fused!(o, columns, schedule),
            Variant::FusedB(columns, schedule) => fused!(o16, columns, schedule),
            Variant::Wide(columns) => {
                let (o, u, g_cum) = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let qkv = self.wide.get(at).context("f32 rows are reserved first")?.as_view();
                let buffers = fused::FusedBuffers { qkv, gates, state: state.as_view(), o, u, g_cum };
                fused::verify_wide(stream, dims, batch, usual, columns, buffers)?;
            }
            Variant::Blocked(columns) => {
                let (o, u, g_cum) = (o16.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let buffers = fused::FusedBuffers { qkv, gates, state: state.as_view(), o, u, g_cum };
                blocked::verify(stream, dims, batch, &self.levels, columns, buffers)?;
            }
            Variant::Commit => {
                let (tape, state) =
                    (launch::LayerTape { qkv, gates, u: u.as_view() }, &mut state.as_view_mut());
                launch::commit(stream, dims, &self.paths, &self.on_device, &[tape], state)?;
            }
            Variant::Snapshots(columns) => {
                let snapshots =
                    self.snapshots.as_mut().context("snapshots are reserved first")?.as_view_mut();
                let (state, o) = (state.as_view(), o.as_view_mut());
                let buffers = serial::SnapshotBuffers { qkv, gates, state, snapshots, o };
                serial::verify(stream, dims, batch, &self.levels, columns, buffers)?;
            }
            Variant::Chain(columns) => {
                let (o, u, g_cum) = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let state = serial::Pool::Read(state.as_view());
                let buffers = serial::ChainBuffers { qkv, gates, state, o, u, g_cum };
                serial::chain(stream, dims, batch, &self.levels, columns, buffers)?;
            }
            Variant::SnapshotCommit => {
                let snapshots = self.snapshots.as_ref().context("snapshots are reserved first")?.as_view();
                serial::commit(stream, dims, &self.paths, &self.on_device, snapshots, state.as_view_mut())?;
            }
        }
        Ok(())
    }

    /// Commits the paths into the states of set `n` from the tape of the set beside it, and verifies from there.
    fn round(&mut self, stream: &Arc<CudaStream>, columns: usize, in_one: bool, n: usize) -> Result<()> {
        let (dims, batch, paths, on_device) = (self.dims, &self.batch, &self.paths, &self.on_device);
        let at = n % (self.sets.len() - 1);
        let [now, last] = &mut self.sets[at..at + 2] else { bail!("two sets at least") };
        let (o, u, g_cum) = (now.o.as_view_mut(), now.u.as_view_mut(), now.g_cum.as_view_mut());
        let (qkv, gates) = (now.qkv.as_view(), now.gates.as_view());
        let (last_qkv, last_gates, last_u) = (last.qkv.as_view(), last.gates.as_view(), last.u.as_view());
        if in_one {
            let pending = fused::Pending { qkv: last_qkv, gates: last_gates, u: last_u, paths, on_device };
            let state = now.state.as_view_mut();
            let buffers = fused::FusedBuffers { qkv, gates, state, o, u, g_cum };
            fused::commit_and_verify(stream, dims, batch, &self.levels, columns, pending, buffers)?;
            return Ok(());
        }
        let tape = launch::LayerTape { qkv: last_qkv, gates: last_gates, u: last_u };
        launch::commit(stream, dims, paths, on_device, &[tape], &mut now.state.as_view_mut())?;
        let buffers = fused::FusedBuffers { qkv, gates, state: now.state.as_view(), o, u, g_cum };
        fused::verify(stream, dims, batch, &self.levels, columns, buffers)?;
        Ok(())
    }

    /// `o` of set 0 after one launch of `variant`, widened, and `u` where the variant writes it: the rows of the first and the last sequence.
    ///
    /// # Errors
    /// From the launcher or the driver.
    pub fn outputs(
        &mut self,
        stream: &Arc<CudaStream>,
        variant: Variant,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let set = &mut self.sets[0];
        stream.memcpy_dtod(&self.unwritten.0, &mut set.u)?;
        stream.memcpy_dtod(&self.unwritten.0, &mut set.o)?;
        stream.memcpy_dtod(&self.unwritten.1, &mut set.o16)?;
        self.reserve(stream, variant)?;
        self.launch(stream, variant, 0)?;
        let (set, sequences) = (&self.sets[0], self.batch.sequences());
        let len = set.u.len() / sequences;
        let last = (sequences > 1).then(|| (sequences - 1) * len..sequences * len);
        let ends: Vec<Range<usize>> = std::iter::once(0..len).chain(last).collect();
        let wide = |plane: &CudaSlice<f32>| -> Result<Vec<f32>> {
            let part = |range: &Range<usize>| stream.clone_dtoh(&plane.slice(range.clone()));
            Ok(ends.iter().map(part).collect::<Result<Vec<_>, _>>()?.concat())
        };
        let o = match variant {
            _ if variant.tier_b() => {
                let part = |range: &Range<usize>| stream.clone_dtoh(&set.o16.slice(range.clone()));
                let parts = ends.iter().map(part).collect::<Result<Vec<_>, _>>()?;
                parts.concat().into_iter().map(bf16::to_f32).collect()
            }
            _ => wide(&set.o)?,
        };
        let u = if matches!(variant, Variant::Snapshots(_)) { None } else { Some(wide(&set.u)?) };
        Ok((o, u))
    }
}

/// Distances of a variant's `o` and `u` from the split f32 design's.
#[derive(Clone, Copy, Debug)]
pub struct Parity {
    /// Of `o`.
    pub o: f64,
    /// Of `u`, where the variant writes it.
    pub u: Option<f64>,
}

/// What the split f32 design gives, and the check of the others against it.
pub struct Truth(Vec<f32>, Option<Vec<f32>>);

impl Truth {
    /// Runs the split design.
    ///
    /// # Errors
    /// From the launcher or the driver.
    pub fn new(stream: &Arc<CudaStream>, case: &mut Case) -> Result<Self> {
        let (o, u) = case.outputs(stream, Variant::Split)?;
        Ok(Self(o, u))
    }

    /// The distances of `variant`.
    ///
    /// # Errors
    /// When they are outside its bound, or from the driver.
    pub fn check(&self, stream: &Arc<CudaStream>, case: &mut Case, variant: Variant) -> Result<Parity> {
        let (o, u) = case.outputs(stream, variant)?;
        let want = self.1.as_deref().unwrap_or_default();
        let parity = Parity { o: distance(&o, &self.0)?, u: u.map(|u| distance(&u, want)).transpose()? };
        let bound = if variant.tier_b() { 1e-2 } else { 1e-5 };
        let worst = parity.o.max(parity.u.unwrap_or(0.0));
        ensure!(worst <= bound, "{}: {parity:?}, bound {bound:.0e}", variant.name());
        Ok(parity)
    }
}

/// Relative Frobenius distance of `got` from `want`.
///
/// # Errors
/// When the lengths differ or a value is not finite.
pub fn distance(got: &[f32], want: &[f32]) -> Result<f64> {
    ensure!(got.len() == want.len(), "{} values against {}", got.len(), want.len());
    let (mut error, mut norm) = (0.0f64, 0.0f64);
    for (&g, &w) in got.iter().zip(want) {
        error += f64::from(g - w).powi(2);
        norm += f64::from(w).powi(2);
    }
    ensure!(error.is_finite(), "a value is not finite");
    Ok((error / norm).sqrt())
}
