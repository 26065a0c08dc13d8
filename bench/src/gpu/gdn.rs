//! The GDN kernels as cases to check and time: inputs of one shape, copied into as many sets as overflow the L2 cache.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use canopy_kernels::cuda::{Kernels, profile};
use canopy_kernels::tree_gdn::{Schedule, blocked, fused};
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;
use serde_json::Value;

use super::launches::{Room, Set, Trees};
use super::variant::Variant;

/// Bytes that one turn through the sets must exceed, so that every launch finds its inputs outside the L2 cache.
pub const ROTATE: usize = 240 << 20;

/// Most shared memory that a block takes for the path that it commits.
const PATH_BYTES: usize = 10 << 10;

/// Inputs and outputs of one (tree, batch) shape.
pub struct Case {
    trees: Trees,
    room: Room,
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

/// `sequences` copies of `tree` at the 9B model's heads; an accepted path of up to eight nodes each.
///
/// # Errors
/// From the driver.
pub fn trees(stream: &Arc<CudaStream>, tree: &DraftTree, sequences: usize) -> Result<Trees> {
    let batch = TreeBatch::new(vec![tree.clone(); sequences], (0..sequences as i32).collect())?;
    let deepest = (0..tree.len()).max_by_key(|&node| tree.depths()[node].min(7)).unwrap_or(0);
    let path: Vec<usize> = tree.path(deepest).into_iter().take(8).collect();
    let paths = AcceptedPaths::new(&batch, &vec![path; sequences])?;
    Trees::new(stream, dims()?, batch, paths, false)
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
        let trees = trees(stream, tree, sequences)?;
        let Inputs { qkv, gates, state } = inputs;
        let (dims, planes) = (trees.dims, trees.batch.rows() * trees.dims.v_heads);
        let bytes = 2 * qkv.len() + 4 * (gates.len() + state.len() + 2 * planes * dims.dv);
        let mut sets = vec![Set {
            qkv: stream.clone_htod(qkv)?,
            wide: None,
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
            room: trees.room(stream)?,
            trees,
            unwritten: (
                stream.clone_htod(&vec![f32::NAN; planes * dims.dv])?,
                stream.clone_htod(&vec![bf16::NAN; planes * dims.dv])?,
            ),
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
        4 * self.trees.batch.rows() * self.trees.dims.state_len()
    }

    /// Whether the device can run a variant on this shape.
    pub fn fits(&self, stream: &Arc<CudaStream>, variant: Variant) -> bool {
        let limit = Kernels::on(stream.context()).map(|kernels| kernels.shared_limit());
        let (columns, schedule) = match variant {
            Variant::Wide(columns) => {
                let needed = fused::wide_shared_bytes(self.trees.usual(), columns);
                return needed.zip(limit.ok()).is_some_and(|(bytes, limit)| bytes <= limit);
            }
            Variant::Blocked(columns) => {
                return limit.is_ok_and(|limit| blocked::fits(self.trees.usual().most_nodes, columns, limit));
            }
            Variant::FusedA(columns, schedule) | Variant::FusedB(columns, schedule) => (columns, schedule),
            Variant::Round(columns) | Variant::RoundInOne(columns) => (columns, Schedule::Levels),
            _ => return true,
        };
        let tree = self.trees.under(schedule);
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
        if matches!(variant, Variant::Wide(_)) && self.sets[0].wide.is_none() {
            let rows: Vec<f32> =
                stream.clone_dtoh(&self.sets[0].qkv)?.into_iter().map(bf16::to_f32).collect();
            for set in &mut self.sets {
                set.wide = Some(stream.clone_htod(&rows)?);
            }
        }
        self.trees.reserve(stream, variant, &mut self.room)
    }

    /// One launch of `variant` on set `n`, counted round.
    ///
    /// # Errors
    /// From the launcher.
    pub fn launch(&mut self, stream: &Arc<CudaStream>, variant: Variant, n: usize) -> Result<()> {
        if let Variant::Round(columns) | Variant::RoundInOne(columns) = variant {
            let at = n % (self.sets.len() - 1);
            let [now, last] = &mut self.sets[at..at + 2] else { bail!("two sets at least") };
            let in_one = matches!(variant, Variant::RoundInOne(_));
            return self.trees.round(stream, columns, in_one, now, last);
        }
        let at = n % self.sets.len();
        self.trees.launch(stream, variant, &mut self.sets[at], &mut self.room)
    }

    /// Every kernel that `variant` launches, with its registers a thread.
    ///
    /// # Errors
    /// From the launcher or the driver.
    pub fn kernels(&mut self, stream: &Arc<CudaStream>, variant: Variant) -> Result<Value> {
        let (_, times) = profile::profiled(stream, || self.launch(stream, variant, 0))?;
        let kernels = Kernels::on(stream.context())?;
        let registers = |time: &profile::KernelTime| {
            (time.symbol.to_string(), Value::from(kernels.registers(time.symbol)))
        };
        Ok(Value::Object(times.iter().map(registers).collect()))
    }

    /// Bytes that a launch reads and writes at least: every input and output once.
    pub fn bytes(&self, variant: Variant) -> usize {
        let Trees { dims, batch, .. } = &self.trees;
        let (rows, states) = (batch.rows(), 4 * batch.sequences() * dims.state_len());
        let (row, o) =
            (if matches!(variant, Variant::Wide(_)) { 4 } else { 2 }, if variant.tier_b() { 2 } else { 4 });
        let tape = dims.v_heads * (4 * dims.dv + 4);
        let verify =
            rows * (row * dims.qkv_width() + 8 * dims.v_heads + o * dims.v_heads * dims.dv + tape) + states;
        let path = self.trees.path_rows() * (2 * dims.k_heads * dims.dk + tape);
        match variant {
            Variant::Commit(_) | Variant::SnapshotCommit => 2 * states + path,
            Variant::Round(_) => verify + 2 * states + path,
            Variant::RoundInOne(_) => verify + states + path,
            Variant::Snapshots(_) => verify - rows * tape + self.snapshot_bytes(),
            _ => verify,
        }
    }

    /// Floating-point operations of a verify as the closed form has them on these trees; of the serial forms as the recurrence has them;
    /// `None` for what commits.
    pub fn flops(&self, variant: Variant) -> Option<usize> {
        let Trees { dims, batch, .. } = &self.trees;
        if variant.commits() {
            return None;
        }
        if matches!(variant, Variant::Snapshots(_) | Variant::Chain(_)) {
            return Some(7 * batch.rows() * dims.state_len());
        }
        let ancestors: usize =
            batch.trees().iter().flat_map(|tree| tree.depths()).map(|&depth| depth as usize).sum();
        let pairs = 2 * ancestors + batch.rows();
        Some(
            4 * batch.rows() * dims.state_len()
                + 2 * pairs * (dims.v_heads * dims.dv + dims.k_heads * dims.dk),
        )
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
        let (set, sequences) = (&self.sets[0], self.trees.batch.sequences());
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
    /// The largest difference of a value of `o`.
    pub max_abs_o: f64,
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
        let u = u.map(|u| distance(&u, want)).transpose()?;
        let apart = o.iter().zip(&self.0).map(|(a, b)| f64::from((a - b).abs()));
        let max_abs_o = apart.fold(0.0, f64::max);
        let parity = Parity { o: distance(&o, &self.0)?, u, max_abs_o };
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
