//! `canopy profile`: where the time of one round, and of one prefill pass, goes: kernel by kernel.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::Device;
use canopy_candle::{KernelTime, profiled, top_tokens};
use canopy_e2e::loader::{LoadOptions, load_target, resolve};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, PromptChunk, Target, VerifyStream};
use canopy_kernels::DraftTree;
use serde_json::json;

use crate::engine_args::{EngineArgs, random_ids};
use crate::record;

const EXAMPLE: &str = "\
A case is timed as it runs in the engine (rounds replayed from CUDA graphs), then with every kernel launched by itself, then with an event
before every launch. Kernels then cannot begin before the one ahead has ended, so their sum exceeds the time without events; times per
kernel are there on CUDA alone.

Example:
  canopy profile --model ./Qwen3.5-9B --random-weights 1 --device cuda --nodes 1,16 --prompt 2048 --context-tokens 128,8192";

/// Where the time of rounds and of prefill passes goes
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// Rows of a round's chain
    #[arg(long, value_delimiter = ',', value_name = "NODES")]
    nodes: Vec<NonZeroUsize>,
    /// Rows of a prefill pass
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    prompt: Vec<NonZeroUsize>,
    /// Committed tokens before
    #[arg(long, value_delimiter = ',', default_value = "128", value_name = "TOKENS")]
    context_tokens: Vec<usize>,
    /// Runs that are timed
    #[arg(long, default_value = "7", value_name = "N")]
    repeats: NonZeroUsize,
    /// Appends one JSON line per case
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs before the first timed one.
const WARM_UP: usize = 3;
/// Prompt rows of a pass on the way to a context.
const CHUNK: usize = 2048;

#[derive(Clone, Copy)]
enum Case {
    /// A chain of so many rows, verified and committed up to half.
    Round(usize),
    /// A prefill pass of so many rows.
    Prompt(usize),
}

impl Case {
    fn name(self) -> (&'static str, usize) {
        match self {
            Self::Round(rows) => ("round", rows),
            Self::Prompt(rows) => ("prompt", rows),
        }
    }

    fn run(self, target: &mut Qwen35, slot: usize) -> Result<()> {
        let vocab = target.vocab_size();
        let logits = match self {
            Self::Round(rows) => {
                let (tokens, tree) = (random_ids(vocab, rows, 7), DraftTree::chain(rows)?);
                let stream = VerifyStream { slot, tokens, tree, logits: LogitRows::All };
                target.verify(&[stream])?.logits
            }
            Self::Prompt(rows) => {
                let tokens = random_ids(vocab, rows, 8);
                let chunk = PromptChunk { slot, tokens, logits: LogitRows::Last, features: true };
                target.prefill(&[chunk])?.logits
            }
        };
        // a small copy back, as an accept walk needs
        top_tokens(&logits.context("no logits")?, 1)?.to_vec2::<u32>()?;
        if let Self::Round(rows) = self {
            target.commit(&[(0..rows.div_ceil(2)).collect()])?;
        }
        Ok(())
    }
}

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| profile(&args))
}

fn profile(args: &Args) -> Result<()> {
    let rounds = args.nodes.iter().map(|rows| Case::Round(rows.get()));
    let cases: Vec<Case> = rounds.chain(args.prompt.iter().map(|rows| Case::Prompt(rows.get()))).collect();
    let runs = WARM_UP + 2 * (args.repeats.get() + 1);
    let longest = cases.iter().map(|case| case.name().1).max().unwrap_or(1);
    let context = args.context_tokens.iter().max().copied().unwrap_or(0) + (runs + WARM_UP) * longest;
    let options = LoadOptions { slots: 1, context_len: Some(context), ..args.engine.options() };
    let mut target = load_target(&resolve(&options.target, options.offline)?, &options)?;
    let taps: Vec<usize> = (0..target.config().layers.len()).step_by(4).collect();
    target.set_taps(&taps)?;
    let device = args.engine.device()?;
    for &context in &args.context_tokens {
        for &case in &cases {
            one(args, &mut target, &device, case, context)?;
        }
    }
    Ok(())
}

/// Sorted milliseconds of runs after a warm-up.
fn times(target: &mut Qwen35, device: &Device, case: Case, runs: (usize, usize)) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(runs.1);
    for run in 0..runs.0 + runs.1 {
        device.synchronize()?;
        let clock = Instant::now();
        case.run(target, 0)?;
        device.synchronize()?;
        if run >= runs.0 {
            times.push(1e3 * clock.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn one(args: &Args, target: &mut Qwen35, device: &Device, case: Case, context: usize) -> Result<()> {
    target.reset(0)?;
    for part in random_ids(target.vocab_size(), context, 3).chunks(CHUNK) {
        let chunk = PromptChunk { slot: 0, tokens: part.to_vec(), logits: LogitRows::None, features: false };
        target.prefill(&[chunk])?;
    }
    let repeats = args.repeats.get();
    let graphs = times(target, device, case, (WARM_UP, repeats))?;
    target.set_graphs(false)?;
    let eager = times(target, device, case, (1, repeats))?;
    let ((), kernels) = profiled(device, || case.run(target, 0).map_err(Failed))?;
    target.set_graphs(!args.engine.no_graphs)?;
    let (what, rows) = case.name();
    let median = |times: &[f64]| times[times.len() / 2];
    let sum: f64 = kernels.iter().map(|kernel| kernel.us).sum();
    let launches: usize = kernels.iter().map(|kernel| kernel.launches).sum();
    canopy_e2e::say!(
        "{what} of {rows} rows after {context} tokens: {:.3} ms, {:.3} kernel by kernel; {launches} launches, {:.3} ms one after another",
        median(&graphs),
        median(&eager),
        1e-3 * sum
    );
    for KernelTime { symbol, launches, us } in &kernels {
        canopy_e2e::say!("  {us:10.1} us {:5.1} % {launches:5} x {symbol}", 1e2 * us / sum);
    }
    let Some(path) = &args.json else { return Ok(()) };
    let (commit, dirty) = record::commit();
    let kernels: Vec<_> = kernels
        .iter()
        .map(|kernel| json!({"kernel": kernel.symbol, "launches": kernel.launches, "us": kernel.us}))
        .collect();
    let line = json!({
        "schema": 1,
        "case": "e2e.profile",
        "what": what,
        "rows": rows,
        "context": context,
        "random_weights": args.engine.random_weights,
        "device": args.engine.device,
        "ms": median(&graphs),
        "ms_kernel_by_kernel": median(&eager),
        "ms_one_after_another": 1e-3 * sum,
        "launches": launches,
        "kernels": kernels,
        "machine": record::machine(),
        "commit": commit,
        "dirty": dirty,
        "time": record::unix_time(),
        "command": record::command(),
    });
    let appended = record::open(path).and_then(|mut file| writeln!(file, "{line}"));
    appended.with_context(|| path.display().to_string())
}

/// An error of a profiled run.
#[derive(Debug)]
struct Failed(anyhow::Error);

impl From<candle_core::Error> for Failed {
    fn from(error: candle_core::Error) -> Self {
        Self(error.into())
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl std::error::Error for Failed {}
