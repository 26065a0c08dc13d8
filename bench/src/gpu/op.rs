//! `canopy-bench op ROOM --design NAME`: any CUDA variant of the delta rule on the tensors of a file.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use canopy_kernels::gdn_prefill::launch::{self as prefill, PrefillBuffers, SequencesOnDevice};
use canopy_kernels::tree_gdn::Schedule;
use canopy_kernels::{AcceptedPaths, GdnDims};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use super::launches::{Set, Trees};
use super::timer;
use super::variant::Variant;
use crate::op::file::{Inputs, write};
use crate::op::rooms::{Gdn, Outputs, Prompts};
use crate::op::{DeviceArg, OpArgs, Room};

/// Tiers of `gdn_prefill`.
const PREFILL: [&str; 2] = ["prefill-a", "prefill-b"];

/// The host's side of one file.
struct Host {
    dims: GdnDims,
    rows: usize,
    /// In f32, however the file has them.
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
    slots: usize,
}

impl Host {
    fn new(dims: GdnDims, qkv: &Tensor, gates: &Tensor, state: &Tensor) -> Result<Self> {
        let values =
            |tensor: &Tensor| Ok::<_, anyhow::Error>(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?);
        Ok(Self {
            dims,
            rows: qkv.dim(0)?,
            qkv: values(qkv)?,
            gates: values(gates)?,
            state: values(state)?,
            slots: state.dim(0)?,
        })
    }

    /// The rows as the kernels of bf16 read them.
    fn rounded(&self) -> Vec<bf16> {
        self.qkv.iter().copied().map(bf16::from_f32).collect()
    }

    fn plane(&self) -> usize {
        self.rows * self.dims.v_heads * self.dims.dv
    }

    /// Its buffers on the device, outputs full of NaN.
    fn set(&self, stream: &Arc<CudaStream>) -> Result<Set> {
        let nan = |len: usize| stream.clone_htod(&vec![f32::NAN; len]);
        Ok(Set {
            qkv: stream.clone_htod(&self.rounded())?,
            wide: Some(stream.clone_htod(&self.qkv)?),
            gates: stream.clone_htod(&self.gates)?,
            state: stream.clone_htod(&self.state)?,
            o: nan(self.plane())?,
            o16: stream.clone_htod(&vec![bf16::NAN; self.plane()])?,
            u: nan(self.plane())?,
            g_cum: nan(self.rows * self.dims.v_heads)?,
        })
    }

    /// `[N, Hv, Dv]`.
    fn values(&self, stream: &Arc<CudaStream>, plane: &CudaSlice<f32>) -> Result<Tensor> {
        let shape = (self.rows, self.dims.v_heads, self.dims.dv);
        Ok(Tensor::from_vec(stream.clone_dtoh(plane)?, shape, &Device::Cpu)?)
    }

    /// The same of bf16.
    fn halves(&self, stream: &Arc<CudaStream>, plane: &CudaSlice<bf16>) -> Result<Tensor> {
        let shape = (self.rows, self.dims.v_heads, self.dims.dv);
        Ok(Tensor::from_vec(stream.clone_dtoh(plane)?, shape, &Device::Cpu)?)
    }

    fn pool(&self, stream: &Arc<CudaStream>, state: &CudaSlice<f32>) -> Result<Tensor> {
        let shape = (self.slots, self.dims.v_heads, self.dims.dv, self.dims.dk);
        Ok(Tensor::from_vec(stream.clone_dtoh(state)?, shape, &Device::Cpu)?)
    }
}

/// The names of every design that a room has.
fn designs(room: Room) -> Vec<String> {
    match room {
        Room::TreeGdn => {
            Variant::all().into_iter().filter(|variant| !variant.is_commit()).map(Variant::name).collect()
        }
        Room::GdnPrefill => PREFILL.map(String::from).to_vec(),
        _ => Vec::new(),
    }
}

/// Runs `args.design` on the file and writes its outputs: `o` in the design's own type, the tape or the snapshots, and where the file has paths
/// the pool after their commit. A design that commits within its verify verifies the trees once before, for the tape.
///
/// # Errors
/// An unknown design, what the design refuses, or anything about the files.
pub fn run(args: &OpArgs) -> Result<()> {
    let (room, design) = (args.room.name(), args.design.as_deref().unwrap_or_default());
    if args.device != DeviceArg::Cuda || args.variant.is_some() || args.solve.is_some() {
        bail!(
            "{room}: --design, expected: --device cuda, and neither --variant nor --solve, got: other options"
        );
    }
    let known = designs(args.room);
    if !known.iter().any(|name| name == design) {
        bail!("{room}: --design, expected: one of {}, got: {design}", known.join(", "));
    }
    let stream = timer::stream().with_context(|| format!("{room}: a CUDA device"))?;
    let inputs = Inputs::read(room, &args.input, Device::Cpu)?;
    let outputs = match args.room {
        Room::GdnPrefill => prompts(&stream, &inputs, design)?,
        _ => trees(&stream, &inputs, design)?,
    };
    write(&args.out, outputs)
}

fn trees(stream: &Arc<CudaStream>, inputs: &Inputs, design: &str) -> Result<Outputs> {
    let Gdn { batch, paths, dims, qkv, gates, state } = Gdn::read(inputs)?;
    let variant =
        Variant::all().into_iter().find(|variant| variant.name() == design).context("a known design")?;
    let commits = paths.is_some();
    let paths = match paths {
        Some(paths) => paths.host().clone(),
        None => AcceptedPaths::new(&batch, &vec![Vec::new(); batch.sequences()])?,
    };
    let f32_rows = match variant {
        Variant::Wide(_) => true,
        Variant::Split | Variant::Series(_) | Variant::Snapshots(_) | Variant::Chain(_) => {
            qkv.dtype() != DType::BF16
        }
        _ => false,
    };
    let host = Host::new(dims, &qkv, &gates, &state)?;
    let trees = Trees::new(stream, dims, batch, paths, f32_rows)?;
    let (mut set, mut room) = (host.set(stream)?, trees.room(stream)?);
    let mut outputs = Vec::new();
    if let Variant::Round(columns) | Variant::RoundInOne(columns) = variant {
        if !commits {
            return Err(inputs.missing("paths", "I32", "[P]"));
        }
        let mut last = host.set(stream)?;
        trees.launch(stream, Variant::FusedA(columns, Schedule::Levels), &mut last, &mut room)?;
        trees.round(stream, columns, matches!(variant, Variant::RoundInOne(_)), &mut set, &last)?;
    } else {
        trees.reserve(stream, variant, &mut room)?;
        trees.launch(stream, variant, &mut set, &mut room)?;
        if commits {
            let commit = if matches!(variant, Variant::Snapshots(_)) {
                Variant::SnapshotCommit
            } else {
                Variant::Commit(32)
            };
            trees.launch(stream, commit, &mut set, &mut room)?;
        }
    }
    if commits {
        outputs.push(("state", host.pool(stream, &set.state)?));
    }
    if variant.tier_b() {
        outputs.push(("o", host.halves(stream, &set.o16)?));
    } else {
        outputs.push(("o", host.values(stream, &set.o)?));
    }
    if let (Variant::Snapshots(_), Some(snapshots)) = (variant, &room.snapshots) {
        let shape = (host.rows, dims.v_heads, dims.dv, dims.dk);
        outputs.push(("snapshots", Tensor::from_vec(stream.clone_dtoh(snapshots)?, shape, &Device::Cpu)?));
    } else {
        let g_cum =
            Tensor::from_vec(stream.clone_dtoh(&set.g_cum)?, (host.rows, dims.v_heads), &Device::Cpu)?;
        outputs.extend([("u", host.values(stream, &set.u)?), ("g_cum", g_cum)]);
    }
    Ok(outputs)
}

fn prompts(stream: &Arc<CudaStream>, inputs: &Inputs, design: &str) -> Result<Outputs> {
    let Prompts { sequences, dims, qkv, gates, state } = Prompts::read(inputs)?;
    let host = Host::new(dims, &qkv, &gates, &state)?;
    let on_device = SequencesOnDevice::new(stream, &sequences)?;
    let mut scratch = stream.alloc_zeros(prefill::scratch_len(dims, &sequences).max(1))?;
    let mut set = host.set(stream)?;
    macro_rules! run {
        ($o:ident) => {{
            let Set { qkv, gates, state, $o, .. } = &mut set;
            let buffers = PrefillBuffers {
                qkv: qkv.as_view(),
                gates: gates.as_view(),
                state: state.as_view_mut(),
                scratch: &mut scratch,
                o: $o.as_view_mut(),
            };
            prefill::forward(stream, dims, &sequences, &on_device, buffers)?;
        }};
    }
    let o = if design == PREFILL[0] {
        run!(o);
        host.values(stream, &set.o)?
    } else {
        run!(o16);
        host.halves(stream, &set.o16)?
    };
    Ok(vec![("state", host.pool(stream, &set.state)?), ("o", o)])
}
