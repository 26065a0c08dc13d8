//! The GDN kernels as cases to check and time: inputs of one shape, copied into as many sets as overflow the L2 cache.

use std::sync::Arc;

use anyhow::{Result, ensure};
use canopy_kernels::cuda::{Kernels, PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{Schedule, fused, launch};
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

/// Bytes that one turn through the sets must exceed, so that every launch finds its inputs outside the L2 cache.
const ROTATE: usize = 240 << 20;

/// One kernel under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Gram matrices, then the blocked solve: two launches, f32 throughout.
    Split,
    /// One launch, f32-class, with blocks of this many value columns.
    FusedA(usize, Schedule),
    /// One launch, state rounded to bf16, bf16 outputs.
    FusedB(usize, Schedule),
    /// Accepted path into the pool.
    Commit,
}

impl Variant {
    /// Name in results.
    pub fn name(self) -> String {
        let schedule = |s| if s == Schedule::Levels { "levels" } else { "chains" };
        match self {
            Self::Split => "split-f32".into(),
            Self::FusedA(columns, s) => format!("fused-a-v{columns}-{}", schedule(s)),
            Self::FusedB(columns, s) => format!("fused-b-v{columns}-{}", schedule(s)),
            Self::Commit => "commit".into(),
        }
    }
}

struct Set {
    qkv: CudaSlice<bf16>,
    gates: CudaSlice<f32>,
    state: CudaSlice<f32>,
    o: CudaSlice<f32>,
    o16: CudaSlice<bf16>,
    u: CudaSlice<f32>,
    g_cum: CudaSlice<f32>,
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
    sets: Vec<Set>,
}

/// Cheap reproducible noise, about normal.
fn noise(n: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n).map(move |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let part = |shift: u32| ((x >> shift) & 0xffff) as f32 / 65536.0;
        (part(0) + part(16) + part(32) + part(48) - 2.0) * 1.732
    })
}

impl Case {
    /// `sequences` copies of `tree` at the 9B model's head counts; an accepted path of up to eight nodes each.
    ///
    /// # Errors
    /// From the driver.
    pub fn new(stream: &Arc<CudaStream>, tree: &DraftTree, sequences: usize) -> Result<Self> {
        let dims = GdnDims::new(16, 32, 128, 128)?;
        let batch = TreeBatch::new(vec![tree.clone(); sequences], (0..sequences as i32).collect())?;
        let rows = batch.rows();
        let qkv: Vec<bf16> = noise(rows * dims.qkv_width(), 1).map(bf16::from_f32).collect();
        let state: Vec<f32> = noise(sequences * dims.state_len(), 2).map(|x| 0.1 * x).collect();
        let gates: Vec<f32> = noise(rows * 2 * dims.v_heads, 3)
            .enumerate()
            .map(|(i, x)| if i / dims.v_heads % 2 == 0 { -0.1 * x.abs() } else { 1.0 / (1.0 + (-x).exp()) })
            .collect();
        let deepest = (0..tree.len()).max_by_key(|&node| tree.depths()[node].min(7)).unwrap_or(0);
        let path: Vec<usize> = tree.path(deepest).into_iter().take(8).collect();
        let paths = AcceptedPaths::new(&batch, &vec![path; sequences])?;
        let planes = rows * dims.v_heads;
        let bytes = 2 * qkv.len() + 4 * (gates.len() + state.len() + 2 * planes * dims.dv);
        let sets = (0..ROTATE / bytes + 2)
            .map(|_| {
                Ok(Set {
                    qkv: stream.clone_htod(&qkv)?,
                    gates: stream.clone_htod(&gates)?,
                    state: stream.clone_htod(&state)?,
                    o: stream.clone_htod(&vec![f32::NAN; planes * dims.dv])?,
                    o16: stream.clone_htod(&vec![bf16::NAN; planes * dims.dv])?,
                    u: stream.clone_htod(&vec![f32::NAN; planes * dims.dv])?,
                    g_cum: stream.clone_htod(&vec![f32::NAN; planes])?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            levels: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Levels)?,
            chains: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Chains)?,
            on_device: PathsOnDevice::new(stream, &paths)?,
            scratch: stream.alloc_zeros(launch::scratch_len(dims, &batch))?,
            dims,
            batch,
            paths,
            sets,
        })
    }

    /// Sets of inputs; a launch on set `n` works on `n % sets()`.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// Bytes that verify leaves for commit, one layer: `u` and `g_cum`.
    pub fn tape_bytes(&self) -> usize {
        4 * (self.sets[0].u.len() + self.sets[0].g_cum.len())
    }

    /// Bytes of one state a node, one layer: what the serial way keeps.
    pub fn snapshot_bytes(&self) -> usize {
        4 * self.batch.rows() * self.dims.state_len()
    }

    /// Whether the device can run a variant on this shape.
    pub fn fits(&self, stream: &Arc<CudaStream>, variant: Variant) -> bool {
        let (columns, schedule) = match variant {
            Variant::FusedA(columns, schedule) | Variant::FusedB(columns, schedule) => (columns, schedule),
            Variant::Split | Variant::Commit => return true,
        };
        let tree = if schedule == Schedule::Levels { &self.levels } else { &self.chains };
        let most = self.batch.trees().iter().map(DraftTree::len).max().unwrap_or(0);
        let limit = Kernels::on(stream.context()).map(|kernels| kernels.shared_limit());
        let needed = match variant {
            Variant::FusedB(..) => fused::shared_bytes::<bf16>(tree, most, columns),
            _ => fused::shared_bytes::<f32>(tree, most, columns),
        };
        needed.zip(limit.ok()).is_some_and(|(bytes, limit)| bytes <= limit)
    }

    /// One launch of `variant` on set `n`.
    ///
    /// # Errors
    /// From the launcher.
    pub fn launch(&mut self, stream: &Arc<CudaStream>, variant: Variant, n: usize) -> Result<()> {
        let at = n % self.sets.len();
        let set = &mut self.sets[at];
        let (dims, batch) = (self.dims, &self.batch);
        let tree = |s| if s == Schedule::Levels { &self.levels } else { &self.chains };
        macro_rules! fused {
            ($o:ident, $columns:expr, $schedule:expr) => {{
                let buffers = fused::FusedBuffers {
                    qkv: set.qkv.as_view(),
                    gates: set.gates.as_view(),
                    state: set.state.as_view(),
                    o: set.$o.as_view_mut(),
                    u: set.u.as_view_mut(),
                    g_cum: set.g_cum.as_view_mut(),
                };
                fused::verify(stream, dims, batch, tree($schedule), $columns, buffers)?
            }};
        }
        match variant {
            Variant::Split => {
                let buffers = launch::VerifyBuffers {
                    qkv: set.qkv.as_view(),
                    gates: set.gates.as_view(),
                    state: set.state.as_view(),
                    scratch: &mut self.scratch,
                    o: set.o.as_view_mut(),
                    u: set.u.as_view_mut(),
                    g_cum: set.g_cum.as_view_mut(),
                };
                launch::verify(stream, dims, batch, &self.levels, buffers)?;
            }
            Variant::FusedA(columns, schedule) => fused!(o, columns, schedule),
            Variant::FusedB(columns, schedule) => fused!(o16, columns, schedule),
            Variant::Commit => {
                let buffers = launch::CommitBuffers {
                    qkv: set.qkv.as_view(),
                    gates: set.gates.as_view(),
                    u: set.u.as_view(),
                    state: set.state.as_view_mut(),
                };
                launch::commit(stream, dims, &self.paths, &self.on_device, buffers)?;
            }
        }
        Ok(())
    }

    /// `o` and `u` of set 0 after one launch of `variant`, widened.
    ///
    /// # Errors
    /// From the launcher or the driver.
    pub fn outputs(&mut self, stream: &Arc<CudaStream>, variant: Variant) -> Result<(Vec<f32>, Vec<f32>)> {
        let set = &mut self.sets[0];
        stream.memcpy_htod(&vec![f32::NAN; set.u.len()], &mut set.u)?;
        stream.memcpy_htod(&vec![f32::NAN; set.o.len()], &mut set.o)?;
        self.launch(stream, variant, 0)?;
        let set = &self.sets[0];
        let o = match variant {
            Variant::FusedB(..) => stream.clone_dtoh(&set.o16)?.into_iter().map(bf16::to_f32).collect(),
            _ => stream.clone_dtoh(&set.o)?,
        };
        Ok((o, stream.clone_dtoh(&set.u)?))
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
