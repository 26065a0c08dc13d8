//! Small seeded inputs, to try an op or another implementation with.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use clap::Args;

use super::Room;

const HELP: &str = "\
Example:
  canopy-bench example gates --out in.safetensors --seed 7
  canopy-bench op gates --input in.safetensors --out out.safetensors";

/// `canopy-bench example ROOM --out F`.
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct ExampleArgs {
    /// Which op
    pub room: Room,
    /// Where the inputs go
    #[arg(long, value_name = "F.safetensors")]
    pub out: PathBuf,
    /// Other seeds give other values
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Size of the delta rule's heads; CUDA's kernels take 128
    #[arg(long, default_value_t = 16)]
    pub head: usize,
}

/// Two trees with five nodes and one, on slots 1 and 0; the first accepts nodes 0, 1, 3.
const PARENTS: [i32; 6] = [-1, 0, 0, 1, 1, -1];

struct Writer {
    seed: u64,
    head: usize,
    tensors: HashMap<String, Tensor>,
}

impl Writer {
    /// Values between `low` and `high`.
    fn float(&mut self, name: &str, shape: &[usize], low: f32, high: f32) -> Result<()> {
        let uniform = |seed: &mut u64| {
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (*seed >> 40) as f32 / (1u64 << 24) as f32
        };
        let len = shape.iter().product();
        let values = (0..len).map(|_| low + (high - low) * uniform(&mut self.seed)).collect::<Vec<_>>();
        self.tensors.insert(name.into(), Tensor::from_vec(values, shape, &Device::Cpu)?);
        Ok(())
    }

    fn ints(&mut self, name: &str, values: &[i32]) -> Result<()> {
        self.tensors.insert(name.into(), Tensor::new(values, &Device::Cpu)?);
        Ok(())
    }

    fn trees(&mut self) -> Result<()> {
        self.ints("parents", &PARENTS)?;
        self.ints("cu_nodes", &[0, 5, 6])?;
        self.ints("slots", &[1, 0])
    }

    /// Rows, gates and two slots of the delta rule, two key heads and four value heads.
    fn rule(&mut self, rows: usize) -> Result<()> {
        let size = self.head;
        self.float("qkv", &[rows, (2 * 2 + 4) * size], -1.0, 1.0)?;
        self.float("gates", &[rows, 2, 4], -0.5, 0.0)?;
        let beta = self.tensors["gates"].narrow(1, 1, 1)?.affine(-2.0, 0.0)?;
        let gates = Tensor::cat(&[&self.tensors["gates"].narrow(1, 0, 1)?, &beta], 1)?;
        self.tensors.insert("gates".into(), gates);
        self.float("state", &[2, 4, size, size], -1.0, 1.0)
    }

    fn paths(&mut self) -> Result<()> {
        self.ints("paths", &[0, 1, 3, 0])?;
        self.ints("cu_paths", &[0, 3, 4])
    }
}

/// Writes inputs for `args.room`.
///
/// # Errors
/// When the file cannot be written.
pub fn example(args: &ExampleArgs) -> Result<()> {
    let mut file = Writer { seed: args.seed, head: args.head, tensors: HashMap::new() };
    let rows = PARENTS.len();
    match args.room {
        Room::TreeGdn | Room::TreeGdnSerial => {
            file.trees()?;
            file.paths()?;
            file.rule(rows)?;
        }
        Room::GdnPrefill => {
            file.ints("cu_rows", &[0, 5, 6])?;
            file.ints("slots", &[1, 0])?;
            file.rule(rows)?;
        }
        Room::TreeConv => {
            file.trees()?;
            file.paths()?;
            file.float("x", &[rows, 24], -1.0, 1.0)?;
            file.float("weight", &[24, 4], -1.0, 1.0)?;
            file.float("conv_state", &[2, 3, 24], -1.0, 1.0)?;
        }
        Room::Gates => {
            file.float("ab", &[rows, 2, 4], -3.0, 3.0)?;
            file.float("a_log", &[4], -1.0, 2.0)?;
            file.float("dt_bias", &[4], -1.0, 1.0)?;
        }
        Room::TreeAttention => {
            file.trees()?;
            file.ints("prefix_lens", &[7, 3])?;
            file.float("q", &[rows, 4, 16], -1.0, 1.0)?;
            file.float("k_cache", &[2, 16, 2, 16], -1.0, 1.0)?;
            file.float("v_cache", &[2, 16, 2, 16], -1.0, 1.0)?;
        }
        Room::BlockAttention => {
            file.ints("slots", &[1, 0])?;
            file.ints("context_lens", &[7, 3])?;
            file.ints("window", &[6])?;
            file.ints("causal", &[0])?;
            file.float("q", &[2 * 4, 4, 16], -1.0, 1.0)?;
            file.float("k_cache", &[2, 16, 2, 16], -1.0, 1.0)?;
            file.float("v_cache", &[2, 16, 2, 16], -1.0, 1.0)?;
        }
        Room::KvCompact => {
            file.trees()?;
            file.paths()?;
            file.ints("prefix_lens", &[7, 3])?;
            file.float("cache", &[2, 16, 2, 16], -1.0, 1.0)?;
        }
    }
    canopy_e2e::files::save_tensors(&file.tensors, &args.out)
        .with_context(|| format!("output {}", args.out.display()))
}
