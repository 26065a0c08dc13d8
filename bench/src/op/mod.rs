//! One op on the tensors of a file: for comparing with any other implementation.

mod example;
pub(crate) mod file;
pub(crate) mod rooms;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use canopy_candle::{Solve, Variant};
use clap::{Args, ValueEnum};

pub use example::{ExampleArgs, example};

const HELP: &str = "\
Tensors in the input file (f32, bf16 or f16; counts and indices i32, i64 or u32):
  every tree room    parents [N] (node ids within their own tree, -1 for a root), and for several trees
                     cu_nodes [B + 1] (first row of every tree, then N) and slots [B] (-1 = padding);
                     without them: one tree on slot 0
  tree_gdn           qkv [N, 2 Hk Dk + Hv Dv], gates [N, 2, Hv], state [slots, Hv, Dv, Dk];
                     with paths [P] and, for several trees, cu_paths [B + 1]: commits afterwards
                     -> o, u [N, Hv, Dv], g_cum [N, Hv]; committed: state
  tree_gdn_serial    the inputs of tree_gdn -> o [N, Hv, Dv], snapshots [N, Hv, Dv, Dk]; committed: state
  gdn_prefill        qkv, gates, state as tree_gdn's; of several prompts cu_rows [B + 1] and slots [B]
                     -> o [N, Hv, Dv], state
  tree_conv          x [N, C], weight [C, 4], conv_state [slots, 3, C]; paths as above
                     -> out [N, C]; committed: conv_state
  gates              ab [N, 2, Hv], a_log [Hv], dt_bias [Hv] -> out [N, 2, Hv]
  tree_attention     q [N, Hq, D], k_cache, v_cache [slots, capacity, Hkv, D], prefix_lens [B] -> out [N, Hq, D]
  block_attention    q [B block_size, Hq, D], k_cache, v_cache as above, slots [B], context_lens [B],
                     optional window [1] (absent = none), causal [1] (absent or 0 = bidirectional) -> out
                     (on CUDA the caches and q are rounded to bf16)
  kv_compact         cache [slots, capacity, Hkv, D] or [slots, capacity, width], prefix_lens [B], paths -> cache

Example:
  canopy-bench example tree_gdn --out in.safetensors
  canopy-bench op tree_gdn --input in.safetensors --out out.safetensors --solve forward
  canopy-bench op tree_gdn --input in.safetensors --out out.safetensors --device cuda --design blocked-b-v32";

/// `canopy-bench op ROOM --input F --out G`.
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct OpArgs {
    /// Which kernel
    pub room: Room,
    /// Input tensors, named as on the room's contract page
    #[arg(long, value_name = "F.safetensors")]
    pub input: PathBuf,
    /// Where the outputs go
    #[arg(long, value_name = "G.safetensors")]
    pub out: PathBuf,
    /// Form of the delta rule (tree_gdn): walk (the CPU's default), solve (CUDA's), or a solver's name
    #[arg(long, value_name = "V")]
    pub variant: Option<String>,
    /// Solver of the triangular system (tree_gdn; implies --variant solve, whose default is forward): dense, forward,
    /// blocked64, blocked32, blocked16, neumann, squaring, level, chains
    #[arg(long, value_name = "S")]
    pub solve: Option<String>,
    /// Where it runs
    #[arg(long, default_value = "cpu")]
    pub device: DeviceArg,
    /// CUDA kernel by the name that `canopy-bench sweep` gives it (tree_gdn: split-f32, split-dense, fused-a-v32-levels, fused-b-v32-chains,
    /// fused-wide-v32, blocked-b-v64, serial-snapshots-v32, serial-chain-v128, commit-in-fused-a-v32 ..., heads of 128; gdn_prefill:
    /// prefill-a, prefill-b); outputs in the design's own type
    #[arg(long, value_name = "D")]
    pub design: Option<String>,
}

/// The kernels that files can drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Room {
    /// Gated delta rule over draft trees
    TreeGdn,
    /// Its serial baseline
    TreeGdnSerial,
    /// The same rule over long chains, the state in place
    GdnPrefill,
    /// Causal convolution along root paths
    TreeConv,
    /// Log gates and write strengths
    Gates,
    /// Attention of drafted rows
    TreeAttention,
    /// Attention of draft blocks
    BlockAttention,
    /// Accepted rows to the front of the window
    KvCompact,
}

impl Room {
    /// The name that files, errors and the command line use.
    pub fn name(self) -> &'static str {
        match self {
            Self::TreeGdn => "tree_gdn",
            Self::TreeGdnSerial => "tree_gdn_serial",
            Self::GdnPrefill => "gdn_prefill",
            Self::TreeConv => "tree_conv",
            Self::Gates => "gates",
            Self::TreeAttention => "tree_attention",
            Self::BlockAttention => "block_attention",
            Self::KvCompact => "kv_compact",
        }
    }
}

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The CPU forwards
    Cpu,
    /// The CUDA kernels
    Cuda,
}

/// The names of the solvers.
fn solvers() -> String {
    let solvers = Variant::ALL.iter().filter(|(_, variant)| matches!(variant, Variant::Solve(_)));
    solvers.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

impl OpArgs {
    /// What `--variant` and `--solve` mean together; the build's default when neither is given.
    fn variant(&self) -> Result<Variant> {
        if self.room != Room::TreeGdn && (self.variant.is_some() || self.solve.is_some()) {
            bail!("{}: --variant and --solve, expected: tree_gdn only, got: them here", self.room.name());
        }
        match (self.variant.as_deref(), self.solve.as_deref()) {
            (None, None) if self.device == DeviceArg::Cuda => Ok(Variant::Solve(Solve::Forward)),
            (None, None) => Ok(Variant::from_env()?),
            (Some("solve"), None) => Ok(Variant::Solve(Solve::Forward)),
            (Some(variant), None) => match variant.parse() {
                Ok(variant) => Ok(variant),
                Err(_) => {
                    bail!("tree_gdn: --variant, expected: walk, solve or {}, got: {variant}", solvers())
                }
            },
            (None | Some("solve"), Some(solve)) => match solve.parse() {
                Ok(variant @ Variant::Solve(_)) => Ok(variant),
                _ => bail!("tree_gdn: --solve, expected: {}, got: {solve}", solvers()),
            },
            (Some(variant), Some(_)) => {
                bail!("tree_gdn: --solve, expected: --variant solve, got: --variant {variant}")
            }
        }
    }
}

/// Reads the inputs, runs the op, writes the outputs.
///
/// # Errors
/// A file that cannot be read or written, a missing, wrong or unknown tensor, a device without kernels, a design by name (`gpu::op`).
pub fn run(args: &OpArgs) -> Result<()> {
    let (room, variant) = (args.room, args.variant()?);
    if let Some(design) = &args.design {
        bail!("{}: --design, expected: a build with feature cuda, got: {design} in one without", room.name());
    }
    let device = match args.device {
        DeviceArg::Cpu => "cpu",
        DeviceArg::Cuda => "cuda",
    };
    let device = canopy_e2e::device::parse(device).with_context(|| format!("{}: --device", room.name()))?;
    let inputs = file::Inputs::read(room.name(), &args.input, device)?;
    let outputs = match room {
        Room::TreeGdn => rooms::tree_gdn(&inputs, variant)?,
        Room::TreeGdnSerial => rooms::tree_gdn_serial(&inputs)?,
        Room::GdnPrefill => rooms::gdn_prefill(&inputs)?,
        Room::TreeConv => rooms::tree_conv(&inputs)?,
        Room::Gates => rooms::gates(&inputs)?,
        Room::TreeAttention => rooms::tree_attention(&inputs)?,
        Room::BlockAttention => rooms::block_attention(&inputs)?,
        Room::KvCompact => rooms::kv_compact(&inputs)?,
    };
    file::write(&args.out, outputs)
}
