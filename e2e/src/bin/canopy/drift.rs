//! `canopy drift`: the state after many tokens committed through draft trees, beside the state of plain decoding.
//!
//! Both commit the same tokens: plain decoding's own greedy text. Every round verifies a random tree, one random path of
//! which carries the text, and commits that path: chains, siblings and roots alone, in all lengths.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use canopy_candle::{TopRow, top_tokens};
use canopy_e2e::config::TargetConfig;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load_target, load_tokenizer, resolve};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_kernels::DraftTree;
use serde_json::json;

use crate::engine_args::{EngineArgs, random_ids};
use crate::logits::Form;
use crate::record;

const EXAMPLE: &str = "\
A line for every kind of state with its largest relative distance |tree - plain| / |plain| over all layers. Fails when one is above --bound.

Examples:
  canopy drift --tokens 200
  canopy drift --device cuda --rows f32 --tokens 1000
  canopy drift --model e2e/models/qwen3.5-9b --random-weights 1 --device cuda --prompt-tokens 128";

/// Compares the state after draft trees with plain decoding's
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// The text to continue
    #[arg(long, default_value = "def fibonacci(n):", value_name = "TEXT")]
    prompt: String,
    /// Continues this many random token ids instead
    #[arg(long, value_name = "TOKENS")]
    prompt_tokens: Option<usize>,
    /// Tokens to commit after the prompt
    #[arg(long, default_value_t = 1000, value_name = "TOKENS")]
    tokens: usize,
    /// Nodes of every tree, the root included
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(2..=256), value_name = "NODES")]
    nodes: u16,
    /// Form of the delta rule in the trees; the device's own when left out. Plain decoding always has the device's own
    #[arg(long, value_enum)]
    variant: Option<Form>,
    /// Largest relative distance allowed
    #[arg(long, default_value_t = 1e-3, value_name = "X")]
    bound: f64,
    /// Appends one JSON line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Tokens of a prompt per pass.
const CHUNK: usize = 128;
const SLOT: usize = 0;

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| drift(&args))
}

fn drift(args: &Args) -> Result<()> {
    ensure!(args.tokens > 0, "--tokens: expected at least 1, got 0");
    let files = resolve(&args.engine.model, args.engine.offline)?;
    let mut options = args.engine.options();
    let load = |options: &LoadOptions| load_target(&files, options);
    let prompt = match args.prompt_tokens {
        Some(count) => random_ids(config(&files)?.vocab_size, count, 1),
        None => load_tokenizer(&files, &config(&files)?)?.encode(&args.prompt)?,
    };
    ensure!(!prompt.is_empty(), "--prompt: expected at least one token, got none");
    options.context_len =
        Some(args.engine.context.unwrap_or(prompt.len() + args.tokens + usize::from(args.nodes)));
    let mut target = load(&options)?;
    let (text, plain) = plainly(&mut target, &prompt, args.tokens)?;
    if let Some(form) = args.variant {
        drop(target);
        options.variant = Some(form.into());
        target = load(&options)?;
    }
    let trees = through_trees(&mut target, &prompt, &text, args.nodes.into())?;
    let rows = compare(&plain, &target.state_tensors(SLOT)?)?;
    canopy_e2e::say!(
        "{} tokens after {} of prompt in {} rounds of {} nodes: {:.2} a round, {} of the target's picks were others",
        args.tokens,
        prompt.len(),
        trees.rounds,
        args.nodes,
        args.tokens as f64 / trees.rounds as f64,
        trees.others
    );
    for (kind, distance) in &rows {
        canopy_e2e::say!("{kind:<10} {distance:.3e}");
    }
    if let Some(path) = &args.json {
        append(path, args, &trees, &rows).with_context(|| path.display().to_string())?;
    }
    let worst = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    ensure!(worst <= args.bound, "expected at most {:e}, got {worst:.3e}", args.bound);
    Ok(())
}

fn config(files: &ModelFiles) -> Result<TargetConfig> {
    let what = files.path("config.json").display().to_string();
    Ok(TargetConfig::from_json(&what, &files.require("config.json")?)?)
}

/// Reads the prompt into the empty slot; the token after it.
fn read(target: &mut Qwen35, prompt: &[u32]) -> Result<u32> {
    target.reset(SLOT)?;
    let mut last = None;
    for part in prompt.chunks(CHUNK) {
        let tree = DraftTree::chain(part.len())?;
        let stream = VerifyStream { slot: SLOT, tokens: part.to_vec(), tree, logits: LogitRows::Last };
        last = target.verify(&[stream])?.logits;
        target.commit(&[(0..part.len()).collect()])?;
    }
    Ok(best(&last.context("the target returned no logits")?)?[0])
}

/// The best token of every row.
fn best(logits: &Tensor) -> Result<Vec<u32>> {
    let rows = top_tokens(&logits.to_dtype(DType::F32)?, 1)?.to_vec2::<u32>()?;
    let best = |words: &Vec<u32>| {
        let row = TopRow::new(words)?;
        row.best().next().map(|(token, _)| token).context("a row without a best token")
    };
    rows.iter().map(best).collect()
}

type States = Vec<(String, Tensor)>;

/// Greedy tokens one a round, and the state with `tokens` of them committed; one more token follows them.
fn plainly(target: &mut Qwen35, prompt: &[u32], tokens: usize) -> Result<(Vec<u32>, States)> {
    let mut text = vec![read(target, prompt)?];
    for _ in 0..tokens {
        let root = text[text.len() - 1];
        let tree = DraftTree::chain(1)?;
        let stream = VerifyStream { slot: SLOT, tokens: vec![root], tree, logits: LogitRows::All };
        let logits = target.verify(&[stream])?.logits.context("the target returned no logits")?;
        text.push(best(&logits)?[0]);
        target.commit(&[vec![0]])?;
    }
    Ok((text, target.state_tensors(SLOT)?))
}

struct Trees {
    rounds: usize,
    /// Rows of committed paths whose best token is not the text's next.
    others: usize,
}

/// Commits all of `text` but its last token through random trees.
fn through_trees(target: &mut Qwen35, prompt: &[u32], text: &[u32], nodes: usize) -> Result<Trees> {
    read(target, prompt)?;
    let vocab = target.vocab_size();
    let (mut done, mut trees) = (0, Trees { rounds: 0, others: 0 });
    while done + 1 < text.len() {
        let tree = DraftTree::bole(nodes, trees.rounds as u64)?;
        let mut tokens = random_ids(vocab, nodes, trees.rounds as u64 + 17);
        let end = tokens[0] as usize % nodes;
        let mut path = tree.path(end);
        path.truncate(text.len() - 1 - done);
        for (&node, &token) in path.iter().zip(&text[done..]) {
            tokens[node] = token;
        }
        let stream = VerifyStream { slot: SLOT, tokens, tree, logits: LogitRows::All };
        let logits = target.verify(&[stream])?.logits.context("the target returned no logits")?;
        let picks = best(&logits)?;
        let differs = |(&node, next): (&usize, &u32)| picks[node] != *next;
        trees.others += path.iter().zip(&text[done + 1..]).filter(|&pair| differs(pair)).count();
        done += path.len();
        trees.rounds += 1;
        target.commit(&[path])?;
    }
    Ok(trees)
}

/// The largest relative distance of every kind of state.
fn compare(plain: &States, trees: &States) -> Result<Vec<(String, f64)>> {
    let mut worst: Vec<(String, f64)> = Vec::new();
    for ((name, plain), (other, trees)) in plain.iter().zip(trees) {
        ensure!(name == other && plain.dims() == trees.dims(), "states differ in shape: {name}, {other}");
        let values = |tensor: &Tensor| -> Result<Vec<f32>> {
            Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        };
        let (plain, trees) = (values(plain)?, values(trees)?);
        ensure!(plain.iter().chain(&trees).all(|value| value.is_finite()), "{name}: not finite");
        let square = |value: f32| f64::from(value) * f64::from(value);
        let distance: f64 = plain.iter().zip(&trees).map(|(a, b)| square(a - b)).sum();
        let size: f64 = plain.iter().map(|&a| square(a)).sum();
        let relative = (distance / size.max(f64::MIN_POSITIVE)).sqrt();
        let kind = name.rsplit('.').next().unwrap_or(name);
        match worst.iter_mut().find(|row| row.0 == kind) {
            Some(row) => row.1 = row.1.max(relative),
            None => worst.push((kind.into(), relative)),
        }
    }
    Ok(worst)
}

fn append(path: &Path, args: &Args, trees: &Trees, rows: &[(String, f64)]) -> Result<()> {
    let (commit, dirty) = record::commit();
    let distances: serde_json::Map<_, _> =
        rows.iter().map(|(kind, distance)| (kind.clone(), json!(distance))).collect();
    let line = json!({
        "schema": 1,
        "case": "e2e.drift",
        "model": format!("{:?}", args.engine.model),
        "random_weights": args.engine.random_weights,
        "device": args.engine.device,
        "rows": format!("{:?}", args.engine.rows),
        "tokens": args.tokens,
        "nodes": args.nodes,
        "rounds": trees.rounds,
        "other_picks": trees.others,
        "relative_distance": distances,
        "bound": args.bound,
        "machine": record::machine(),
        "commit": commit,
        "dirty": dirty,
        "time": record::unix_time(),
        "command": record::command(),
    });
    Ok(writeln!(record::open(path)?, "{line}")?)
}
