//! The kernels around the delta rule at the 9B model's widths: convolution, its commit, gates and the gated norm, checked against the CPU's and timed.

use std::sync::Arc;

use anyhow::{Result, ensure};
use canopy_kernels::gates::launch::GateBuffers;
use canopy_kernels::glue::launch::{Norm, Rows};
use canopy_kernels::tree_conv::launch::ConvBuffers;
use canopy_kernels::{ConvDims, DraftTree, gates, glue, tree_conv};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;
use serde_json::{Value, json};

use super::gdn::{self, ROTATE, distance, noise};
use super::launches::Trees;
use super::timer::{self, Pace};

/// Sets of buffers at most: small rows stay in the L2 cache whatever is done.
const MOST_SETS: usize = 200;

/// Added to a mean square, as the model does.
const EPS: f32 = 1e-6;

/// One kernel around the delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowKernel {
    /// f32 rows in, bf16 rows out.
    Conv,
    /// The same with the gates in its launch, as the engine runs it.
    ConvGates,
    /// The accepted path's last three rows into the pool.
    ConvCommit,
    /// Log gates and write strengths.
    Gates,
    /// RMSNorm of every head times the gate, bf16 rows out.
    GatedNorm,
}

impl RowKernel {
    /// Every one.
    const ALL: [Self; 5] = [Self::Conv, Self::ConvGates, Self::ConvCommit, Self::Gates, Self::GatedNorm];

    /// Name and case in results.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Conv => ("conv-f32-bf16", "tree_conv.verify"),
            Self::ConvGates => ("conv-gates-f32-bf16", "tree_conv.verify"),
            Self::ConvCommit => ("conv-commit-f32", "tree_conv.commit"),
            Self::Gates => ("gates-f32", "gates"),
            Self::GatedNorm => ("gated-norm-f32-bf16", "gated_rms_norm"),
        }
    }

    /// How far its outputs may be from the CPU's, relative.
    fn bound(self) -> f64 {
        match self {
            Self::Conv | Self::ConvGates | Self::GatedNorm => 1e-2,
            Self::ConvCommit => 0.0,
            Self::Gates => 1e-5,
        }
    }
}

/// Inputs on the host, the same for every set.
struct Host {
    x: Vec<f32>,
    weight: Vec<f32>,
    conv_state: Vec<f32>,
    ab: Vec<f32>,
    /// `A_log`, then `dt_bias`.
    heads: [Vec<f32>; 2],
    o: Vec<f32>,
    z: Vec<f32>,
    norm: Vec<f32>,
}

/// Buffers of one call of each kernel.
struct Set {
    x: CudaSlice<f32>,
    conv_state: CudaSlice<f32>,
    conv: CudaSlice<bf16>,
    ab: CudaSlice<f32>,
    gates: CudaSlice<f32>,
    o: CudaSlice<f32>,
    z: CudaSlice<f32>,
    y: CudaSlice<bf16>,
}

/// The kernels on one (tree, batch) shape.
struct RowCase {
    dims: ConvDims,
    trees: Trees,
    host: Host,
    weight: CudaSlice<f32>,
    heads: [CudaSlice<f32>; 2],
    norm: CudaSlice<f32>,
    sets: Vec<Set>,
}

impl RowCase {
    /// `sequences` copies of `tree`.
    fn new(stream: &Arc<CudaStream>, tree: &DraftTree, sequences: usize) -> Result<Self> {
        let trees = gdn::trees(stream, tree, sequences)?;
        let (dims, rows, gdn) = (ConvDims::new(trees.dims.qkv_width())?, trees.batch.rows(), trees.dims);
        let values = |n: usize, seed: u64| noise(n, seed).collect::<Vec<f32>>();
        let plane = rows * gdn.v_heads * gdn.dv;
        let host = Host {
            x: values(rows * dims.channels, 1),
            weight: values(dims.channels * ConvDims::WIDTH, 2),
            conv_state: values(sequences * dims.state_len(), 3),
            ab: values(rows * 2 * gdn.v_heads, 4),
            heads: [values(gdn.v_heads, 5), values(gdn.v_heads, 6)],
            o: values(plane, 7),
            z: values(plane, 8),
            norm: values(gdn.dv, 9),
        };
        let [a_log, dt_bias] = &host.heads;
        let (weight, norm) = (stream.clone_htod(&host.weight)?, stream.clone_htod(&host.norm)?);
        let heads = [stream.clone_htod(a_log)?, stream.clone_htod(dt_bias)?];
        let mut sets = Vec::new();
        let bytes = 6 * host.x.len() + 4 * host.conv_state.len() + 8 * host.ab.len() + 10 * plane;
        for _ in 0..(ROTATE / bytes + 1).min(MOST_SETS) {
            sets.push(Set {
                x: stream.clone_htod(&host.x)?,
                conv_state: stream.clone_htod(&host.conv_state)?,
                conv: stream.clone_htod(&vec![bf16::NAN; host.x.len()])?,
                ab: stream.clone_htod(&host.ab)?,
                gates: stream.clone_htod(&vec![f32::NAN; host.ab.len()])?,
                o: stream.clone_htod(&host.o)?,
                z: stream.clone_htod(&host.z)?,
                y: stream.clone_htod(&vec![bf16::NAN; plane])?,
            });
        }
        Ok(Self { dims, trees, host, weight, heads, norm, sets })
    }

    /// One launch on set `n`, counted round.
    fn launch(&mut self, stream: &Arc<CudaStream>, kernel: RowKernel, n: usize) -> Result<()> {
        let at = n % self.sets.len();
        let Set { x, conv_state, conv, ab, gates, o, z, y } = &mut self.sets[at];
        let (gdn, batch, width) =
            (self.trees.dims, &self.trees.batch, self.trees.dims.v_heads * self.trees.dims.dv);
        let [a_log, dt_bias] = self.heads.each_ref().map(CudaSlice::as_view);
        let gates = GateBuffers { ab: ab.as_view(), a_log, dt_bias, out: gates.as_view_mut() };
        match kernel {
            RowKernel::Conv | RowKernel::ConvGates => {
                let buffers = ConvBuffers {
                    x: x.as_view(),
                    weight: self.weight.as_view(),
                    conv_state: conv_state.as_view(),
                    out: conv.as_view_mut(),
                    gates: (kernel == RowKernel::ConvGates).then_some(gates),
                };
                tree_conv::launch::verify(stream, self.dims, batch, self.trees.usual(), buffers)?;
            }
            RowKernel::ConvCommit => {
                let (paths, on_device) = self.trees.paths();
                let pool = &mut conv_state.as_view_mut();
                tree_conv::launch::commit(stream, self.dims, paths, on_device, &[x.as_view()], pool)?;
            }
            RowKernel::Gates => gates::launch::forward(stream, gates)?,
            RowKernel::GatedNorm => {
                let (weight, z) = (self.norm.as_view(), z.as_view());
                let norm = Norm { weight: &weight, eps: EPS, unit_offset: false };
                let z = Rows { data: &z, stride: width };
                glue::launch::gated_rms_norm(
                    stream,
                    norm,
                    gdn.v_heads,
                    &o.as_view(),
                    z,
                    &mut y.as_view_mut(),
                )?;
            }
        }
        Ok(())
    }

    /// The relative distance from the CPU's kernel after one launch on set 0.
    fn check(&mut self, stream: &Arc<CudaStream>, kernel: RowKernel) -> Result<f64> {
        self.launch(stream, kernel, 0)?;
        let parts = match kernel {
            RowKernel::ConvGates => &[RowKernel::Conv, RowKernel::Gates][..],
            _ => &[kernel],
        };
        let mut worst = 0f64;
        for &part in parts {
            let (far, bound) = (self.far(stream, part)?, part.bound());
            ensure!(far <= bound, "{}: {far:.1e} from the CPU's, bound {bound:.0e}", kernel.names().0);
            worst = worst.max(far);
        }
        Ok(worst)
    }

    /// How far set 0's outputs are from the CPU's.
    fn far(&self, stream: &Arc<CudaStream>, kernel: RowKernel) -> Result<f64> {
        let (set, host, dims) = (&self.sets[0], &self.host, self.dims);
        let wide = |plane: &CudaSlice<bf16>| -> Result<Vec<f32>> {
            Ok(stream.clone_dtoh(plane)?.into_iter().map(bf16::to_f32).collect())
        };
        let (got, want) = match kernel {
            RowKernel::Conv | RowKernel::ConvGates => {
                let mut want = vec![0.0; host.x.len()];
                let batch = &self.trees.batch;
                tree_conv::cpu::verify(dims, batch, &host.x, &host.weight, &host.conv_state, &mut want)?;
                (wide(&set.conv)?, want)
            }
            RowKernel::ConvCommit => {
                let mut want = host.conv_state.clone();
                tree_conv::cpu::commit(dims, self.trees.paths().0, &host.x, &mut want)?;
                (stream.clone_dtoh(&set.conv_state)?, want)
            }
            RowKernel::Gates => {
                let mut want = vec![0.0; host.ab.len()];
                let [a_log, dt_bias] = &host.heads;
                gates::cpu::forward(self.trees.dims.v_heads, &host.ab, a_log, dt_bias, &mut want)?;
                (stream.clone_dtoh(&set.gates)?, want)
            }
            RowKernel::GatedNorm => {
                let mut want = vec![0.0; host.o.len()];
                let norm = glue::cpu::Norm { weight: &host.norm, eps: EPS, unit_offset: false };
                glue::cpu::gated_rms_norm(norm, &host.o, &host.z, &mut want)?;
                (wide(&set.y)?, want)
            }
        };
        distance(&got, &want)
    }

    /// Bytes that a launch reads and writes at least.
    fn bytes(&self, kernel: RowKernel) -> usize {
        let host = &self.host;
        match kernel {
            RowKernel::Conv => 6 * host.x.len() + 4 * (host.weight.len() + host.conv_state.len()),
            RowKernel::ConvGates => self.bytes(RowKernel::Conv) + self.bytes(RowKernel::Gates),
            RowKernel::ConvCommit => 8 * host.conv_state.len(),
            RowKernel::Gates => 8 * host.ab.len(),
            RowKernel::GatedNorm => 10 * host.o.len(),
        }
    }

    /// Checks and times some kernels; a row each.
    fn rows(
        &mut self,
        stream: &Arc<CudaStream>,
        shape: &str,
        kernels: &[RowKernel],
        pace: Pace,
    ) -> Result<Vec<Value>> {
        let (mut far, mut graphs) = (Vec::new(), Vec::new());
        let cold = self.sets.len().max(20);
        for &kernel in kernels {
            far.push(self.check(stream, kernel)?);
            graphs.push((timer::capture(stream, cold, |n| self.launch(stream, kernel, n))?, cold));
            graphs.push((timer::capture(stream, 20, |_| self.launch(stream, kernel, 0))?, 20));
        }
        let times = timer::interleaved(stream, &graphs, pace)?;
        let tree = &self.trees.batch.trees()[0];
        let row = |((kernel, far), times): ((&RowKernel, f64), &[timer::Timing])| {
            let (variant, case) = kernel.names();
            json!({"schema": 1, "case": case, "variant": variant, "shape": shape, "nodes": tree.len(), "depth": tree.max_depth(),
                "batch": self.trees.batch.sequences(), "dtype": "f32", "graph": true, "l2": "rotated", "bytes": self.bytes(*kernel),
                "us_median": times[0].us_median, "us_p10": times[0].us_p10, "us_p90": times[0].us_p90, "us_warm": times[1].us_median,
                "distance_o": far, "repeats": times[0].replays, "launches": cold})
        };
        Ok(kernels.iter().zip(far).zip(times.chunks_exact(2)).map(row).collect())
    }
}

/// Checks and times every kernel whose name is wanted on `sequences` copies of `tree`; a row each.
///
/// # Errors
/// A kernel outside its bound, or the driver.
pub fn rows(
    stream: &Arc<CudaStream>,
    (shape, tree): (&str, &DraftTree),
    sequences: usize,
    wants: impl Fn(&str) -> bool,
    pace: Pace,
) -> Result<Vec<Value>> {
    let kernels: Vec<RowKernel> =
        RowKernel::ALL.into_iter().filter(|kernel| wants(kernel.names().0)).collect();
    if kernels.is_empty() {
        return Ok(Vec::new());
    }
    RowCase::new(stream, tree, sequences)?.rows(stream, shape, &kernels, pace)
}
