//! `canopy logits`: a target's logits and states, files in and files out.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use canopy_e2e::loader::{self, LoadOptions, ModelSource, WeightDtype};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, PromptChunk, Target, VerifyStream};
use canopy_e2e::threads;
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::{Solve, Variant};
use serde::Deserialize;

use crate::engine_args::Rows;

const SLOT: usize = 0;

const EXAMPLE: &str = "\
Writes these f32 tensors to --out:
  logits           [positions, vocab]  one row per --ids token, or of the --last N
  tree_logits      [nodes, vocab]      one row per --tree-tokens node, after --ids
  round{r}.tree_logits                 the same for round r of --rounds
and, when a path was committed (--path or --rounds), the states after it:
  layer{i}.state [Hv, Dv, Dk]  layer{i}.conv_state [3, C]  layer{i}.k, layer{i}.v [tokens, Hkv, D]

Example: the embedded model reads three tokens, verifies a root with two children, and commits the second child:
  canopy logits --model embedded --ids 260,751,12 --tree-tokens 4,5,6 --tree-parents -1,0,0 --path 0,2 \\
      --out out.safetensors

A rounds file is a list; every round is verified and its path committed before the next:
  [{\"tokens\": [4, 5, 6], \"parents\": [-1, 0, 0], \"path\": [0, 2]},
   {\"tokens\": [7, 8], \"parents\": [-1, 0], \"path\": [0]}]";

/// Logits of given token ids, and of draft trees after them
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    /// `embedded`, a directory in Hugging Face layout, or owner/name on the hub
    #[arg(long, default_value = "embedded", value_name = "MODEL")]
    model: ModelSource,
    /// Token ids of the text, comma-separated; may be left out when there is a tree
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,...")]
    ids: Vec<u32>,
    /// Token ids of a draft tree's nodes, root first
    #[arg(long, value_delimiter = ',', requires = "tree_parents", value_name = "ID,ID,...")]
    tree_tokens: Vec<u32>,
    /// Parent of every node, -1 for the root
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        requires = "tree_tokens",
        value_name = "-1,N,..."
    )]
    tree_parents: Vec<i32>,
    /// Commits these nodes, root first, after verifying the tree
    #[arg(long, value_delimiter = ',', requires = "tree_tokens", value_name = "0,N,...")]
    path: Vec<usize>,
    /// Verifies and commits the rounds in this JSON file
    #[arg(long, conflicts_with = "tree_tokens", value_name = "F.json")]
    rounds: Option<PathBuf>,
    /// Keeps matrices in this dtype instead of the stored one
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Form of the delta rule; walk on the CPU and solve on CUDA when left out
    #[arg(long, value_enum)]
    variant: Option<Form>,
    /// What rows are rounded to before products and the delta rule on CUDA; the CPU takes them in f32
    #[arg(long, value_enum, default_value_t = Rows::F32)]
    rows: Rows,
    /// Tokens of --ids per pass; the logits do not depend on it. More than 256 are read as long prompts are
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    chunk: u16,
    /// Writes the logits of this many last --ids alone
    #[arg(long, value_name = "N")]
    last: Option<usize>,
    /// `cpu`, `cuda` or `cuda:N`
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Uses only what the hub's cache already holds
    #[arg(long)]
    offline: bool,
    /// The safetensors file to write
    #[arg(long, value_name = "F.safetensors")]
    out: PathBuf,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    Int8,
}

/// A form of the delta rule
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Form {
    /// Node by node; bits do not depend on how rows are grouped
    Walk,
    /// The closed form with one triangular solve
    Solve,
}

impl From<Form> for Variant {
    fn from(form: Form) -> Self {
        match form {
            Form::Walk => Self::Walk,
            Form::Solve => Self::Solve(Solve::Forward),
        }
    }
}

/// One verified tree and the path committed after it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Round {
    tokens: Vec<u32>,
    parents: Vec<i32>,
    #[serde(default)]
    path: Vec<usize>,
}

pub fn run(args: Args) -> Result<()> {
    threads::pool(None)?.install(|| compute(args))
}

fn compute(args: Args) -> Result<()> {
    let rounds = rounds(&args)?;
    ensure!(!args.ids.is_empty() || !rounds.is_empty(), "--ids: expected token ids or a tree, got neither");
    let nodes: usize = rounds.iter().map(|round| round.tokens.len()).sum();
    let options = LoadOptions {
        target: args.model.clone(),
        dtype: match args.dtype {
            None => WeightDtype::Stored,
            Some(Dtype::F32) => WeightDtype::F32,
            Some(Dtype::Bf16) => WeightDtype::Bf16,
            Some(Dtype::Int8) => WeightDtype::Int8,
        },
        slots: 1,
        context_len: Some(args.ids.len() + nodes),
        offline: args.offline,
        device: args.device.clone(),
        variant: args.variant.map(Variant::from),
        rows: args.rows.into(),
        ..LoadOptions::default()
    };
    let files = loader::resolve(&options.target, options.offline)?;
    let loaded = loader::load_target(&files, &options);
    let mut target =
        loaded.with_context(|| format!("--ids and the trees: {} tokens in all", args.ids.len() + nodes))?;

    let mut tensors = HashMap::new();
    if !args.ids.is_empty() {
        let logits = text(&mut target, &args.ids, args.chunk.into())?;
        let rows = args.last.unwrap_or(args.ids.len()).min(args.ids.len());
        let logits = logits.narrow(0, args.ids.len() - rows, rows)?.contiguous()?;
        tensors.insert("logits".into(), logits);
    }
    let mut committed = false;
    for (index, round) in rounds.into_iter().enumerate() {
        let name = match args.rounds {
            Some(_) => format!("round{index}.tree_logits"),
            None => "tree_logits".into(),
        };
        let of_round = |flag: &str| match args.rounds {
            Some(_) => format!("round {index}"),
            None => flag.into(),
        };
        let tree = DraftTree::new(round.parents).with_context(|| of_round("--tree-parents"))?;
        tensors.insert(
            name,
            verify(&mut target, round.tokens, tree).with_context(|| of_round("--tree-tokens"))?,
        );
        if !round.path.is_empty() {
            target.commit(&[round.path]).with_context(|| of_round("--path"))?;
            committed = true;
        }
    }
    if committed {
        tensors.extend(target.state_tensors(SLOT)?);
    }
    canopy_e2e::files::save_tensors(&tensors, &args.out).with_context(|| args.out.display().to_string())?;
    Ok(())
}

fn rounds(args: &Args) -> Result<Vec<Round>> {
    if let Some(path) = &args.rounds {
        let json = std::fs::read(path).with_context(|| path.display().to_string())?;
        return serde_json::from_slice(&json).with_context(|| path.display().to_string());
    }
    if args.tree_tokens.is_empty() {
        return Ok(Vec::new());
    }
    let (tokens, parents) = (args.tree_tokens.clone(), args.tree_parents.clone());
    Ok(vec![Round { tokens, parents, path: args.path.clone() }])
}

/// Reads `ids` into the empty slot, `chunk` at a time, and returns a row of logits for each.
fn text(target: &mut Qwen35, ids: &[u32], chunk: usize) -> Result<Tensor> {
    let mut logits = Vec::new();
    for part in ids.chunks(chunk) {
        if chunk > DraftTree::MAX_NODES {
            let chunk =
                PromptChunk { slot: SLOT, tokens: part.to_vec(), logits: LogitRows::All, features: false };
            logits.push(target.prefill(&[chunk])?.logits.context("the target returned no logits")?);
            continue;
        }
        logits.push(verify(target, part.to_vec(), DraftTree::chain(part.len())?)?);
        target.commit(&[(0..part.len()).collect()])?;
    }
    Ok(Tensor::cat(&logits, 0)?)
}

fn verify(target: &mut Qwen35, tokens: Vec<u32>, tree: DraftTree) -> Result<Tensor> {
    let stream = VerifyStream { slot: SLOT, tokens, tree, logits: LogitRows::All };
    target.verify(&[stream])?.logits.context("the target returned no logits")
}
