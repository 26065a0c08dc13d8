//! `canopy draft`: one draft of given token ids, files in and files out.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use canopy_e2e::draft::Drafter;
use canopy_e2e::tree::{BuildOptions, CandidateTree, Marginals, ddtree_from};

use crate::pair::PairArgs;

const EXAMPLE: &str = "\
The last id is the root; all before it are committed. Writes these tensors to --out:
  features          [n, taps * hidden]     f32  outputs of the target's tap layers for the n committed tokens
  context_features  [n, hidden]            f32  what the drafter makes of them: hidden_norm(fc(features))
  logits            [block_size - 1, vocab] f32 the drafter's rows for depths 1, 2, ...
  tree              [nodes, 3]             i64  token, parent, depth of every node; the root first, with parent -1
  log_prob          [nodes]                f32  ln of the drafter's probability of the whole path; 0 for the root

Example: a draft of the embedded pair after three committed tokens:
  canopy draft --model embedded --ids 565,1249,501,25 --budget 15 --out draft.safetensors";

/// One draft after given token ids, and its tree
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    pair: PairArgs,
    /// Token ids of the text, comma-separated; the last is the root
    #[arg(long, value_delimiter = ',', required = true, value_name = "ID,ID,...")]
    ids: Vec<u32>,
    /// Most nodes of the tree besides the root
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u8), value_name = "NODES")]
    budget: u8,
    /// The safetensors file to write
    #[arg(long, value_name = "F.safetensors")]
    out: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    let Some((&root, committed)) = args.ids.split_last() else { bail!("--ids: expected a root, got none") };
    let mut pair = args.pair.load()?;
    pair.check_length("--ids", args.ids.len(), 0)?;
    let (_, features) = pair.read(committed)?;
    let width = pair.drafter.config().hidden_size * pair.drafter.taps().len();
    let features = match features {
        Some(features) => features,
        None => Tensor::zeros((0, width), DType::F32, &Device::Cpu)?,
    };
    let context_features = match committed.len() {
        0 => Tensor::zeros((0, pair.drafter.config().hidden_size), DType::F32, &Device::Cpu)?,
        _ => pair.drafter.context_features(&features)?,
    };
    let logits = pair.draft(root)?;
    let options = BuildOptions { budget: args.budget.into(), ..Default::default() };
    let tree = ddtree_from(&Marginals::from_tensor(&logits, options)?, root, options)?;
    let log_prob: Vec<f32> = tree.joint_log_probs().iter().map(|&joint| joint as f32).collect();
    let tensors = HashMap::from([
        ("features", features.to_dtype(DType::F32)?),
        ("context_features", context_features.to_dtype(DType::F32)?),
        ("logits", logits),
        ("tree", rows(&tree)?),
        ("log_prob", Tensor::new(log_prob, &Device::Cpu)?),
    ]);
    canopy_e2e::files::save_tensors(&tensors, &args.out).with_context(|| args.out.display().to_string())
}

/// `[nodes, 3]`: token, parent, depth.
fn rows(tree: &CandidateTree) -> Result<Tensor> {
    let (parents, depths) = (tree.tree().parents(), tree.tree().depths());
    let rows = (0..parents.len())
        .flat_map(|node| [i64::from(tree.tokens()[node]), i64::from(parents[node]), i64::from(depths[node])]);
    Ok(Tensor::from_vec(rows.collect::<Vec<_>>(), (parents.len(), 3), &Device::Cpu)?)
}
