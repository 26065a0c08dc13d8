//! `canopy bench --prompt-tokens`: modes by number of streams and length of context, on random token ids.
//!
//! A cell is one context and one number of streams. Its first run in every mode reads the prompts and warms everything up;
//! the measured ones start from saved prefixes, so that all streams decode from one round to the next. Tokens are counted
//! over the rounds after the one in which the last stream had its first token. Every repeat runs every mode. Stage times come
//! from one more run, in which every stage waits for the device.

mod row;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash};
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use canopy_e2e::config::TargetConfig;
use canopy_e2e::device;
use canopy_e2e::engine::{
    EngineConfig, Event, GenerateRequest, Mode, Sampling, Speculation, StageTimes, StreamStats,
};
use canopy_e2e::loader::{LoadOptions, resolve};
use serde_json::json;

use self::row::Row;
use crate::bench::Args;
use crate::engine_args::Ready;
use crate::record;
use crate::synthetic::SyntheticArgs;

/// Random prompts instead of texts, by length and number of streams
#[derive(clap::Args)]
pub struct MatrixArgs {
    /// Runs prompts of these many random token ids instead of texts
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub prompt_tokens: Vec<NonZeroUsize>,
    /// With --prompt-tokens: streams that decode at once
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1",
        requires = "prompt_tokens",
        value_name = "STREAMS"
    )]
    pub batch: Vec<NonZeroUsize>,
    /// With --prompt-tokens: rounds of every run
    #[arg(long, default_value = "64", requires = "prompt_tokens", value_name = "N")]
    pub rounds: NonZeroUsize,
    /// With --prompt-tokens: prompt tokens of a round; when left out 128 on the CPU and 2,048 on CUDA
    #[arg(long, requires = "prompt_tokens", value_name = "TOKENS")]
    pub prefill_chunk: Option<usize>,
    /// With --prompt-tokens: no run for stage times
    #[arg(long, requires = "prompt_tokens")]
    pub no_stages: bool,
    #[command(flatten)]
    pub synthetic: SyntheticArgs,
}

/// Bytes of saved prefixes where the device does not say what it has.
const CACHE: usize = 256 << 20;

/// One run of all streams of a cell.
pub struct Run {
    /// Tokens of all streams within the window, its rounds and its seconds.
    tokens: usize,
    rounds: usize,
    seconds: f64,
    stats: Vec<StreamStats>,
    /// All tokens in the order in which they came.
    hash: DefaultHasher,
}

impl Run {
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Bytes of memory: the device's in use, else this process's.
fn used(args: &Args) -> Result<Option<usize>> {
    Ok(match device::memory(&args.engine.device()?)? {
        Some((free, total)) => Some(total - free),
        None => record::resident_bytes(),
    })
}

pub fn run(args: &Args) -> Result<()> {
    let matrix = &args.matrix;
    let (slots, longest) = (largest(&matrix.batch), largest(&matrix.prompt_tokens));
    let context_len = match args.engine.context {
        Some(context_len) => context_len,
        None => (longest + most_tokens(args)).min(longest_context(args)?),
    };
    let options = LoadOptions { slots, context_len: Some(context_len), ..args.engine.options() };
    let (before, clock) = (used(args)?, Instant::now());
    let usual = EngineConfig::on(&args.engine.device);
    let config = EngineConfig {
        prefill_chunk: matrix.prefill_chunk.unwrap_or(usual.prefill_chunk),
        cache_bytes: CACHE,
        cache_page: usize::MAX,
        ..usual
    };
    let mut ready = args.engine.load_with(&options, config, &matrix.synthetic)?;
    if let Some((free, _)) = device::memory(&args.engine.device()?)? {
        ready.engine.set_cache_bytes(free - free / 4);
    }
    let after = used(args)?;
    let (sizes, mib) = (ready.sizes, |bytes: usize| bytes as f64 / f64::from(1 << 20));
    let taken = after.zip(before).map_or(0, |(after, before)| after.saturating_sub(before));
    canopy_e2e::say!(
        "loaded in {:.1} s: {:.0} MiB taken; weights {:.0} MiB, a slot of {context_len} tokens {:.1} MiB, 1,000 tokens {:.2} MiB",
        clock.elapsed().as_secs_f64(),
        mib(taken),
        mib(sizes.weights()),
        mib(sizes.slot(context_len)),
        mib(1000 * sizes.token()),
    );
    canopy_e2e::say!("{}", Row::HEAD);
    for &context in &matrix.prompt_tokens {
        for &batch in &matrix.batch {
            let rows = cell(args, &mut ready, context.get(), batch.get())?;
            let base = rows.iter().find(|row| row.mode == Mode::Ar).map(Row::rate);
            let peak = used(args)?.zip(before).map(|(now, before)| now.saturating_sub(before));
            for row in &rows {
                canopy_e2e::say!("{}", row.line(base));
                if let Some(path) = &args.json {
                    let mut line = row.json(args, &ready, base);
                    line["slots"] = json!(slots);
                    line["context_len"] = json!(context_len);
                    line["memory_bytes"] = json!({
                        "loaded": taken,
                        "now": peak,
                        "saved_prefixes": ready.engine.stats().cache.bytes,
                    });
                    // Since the engine started, so that the last cell's are those of the whole run.
                    let passes = ready.engine.stats().passes;
                    line["passes"] = json!({
                        "replayed": passes.replayed,
                        "recorded": passes.recorded,
                        "plain": passes.plain,
                        "refused": passes.refused,
                        "kept": passes.kept,
                    });
                    let written = record::open(path).and_then(|mut file| writeln!(file, "{line}"));
                    written.with_context(|| path.display().to_string())?;
                }
            }
        }
    }
    if let Some(stated) = &ready.synthetic {
        canopy_e2e::say!("{stated}");
    }
    Ok(())
}

/// Rounds that a run may have before all of its streams decode.
const EARLY: usize = 16;
/// Tokens of the longest rounds.
const BLOCK: usize = 16;

/// Most tokens that a stream may gain in a run's rounds.
fn most_tokens(args: &Args) -> usize {
    (args.matrix.rounds.get() + EARLY) * BLOCK
}

/// The model's own limit.
fn longest_context(args: &Args) -> Result<usize> {
    let files = resolve(&args.engine.model, args.engine.offline)?;
    let what = files.path("config.json").display().to_string();
    Ok(TargetConfig::from_json(&what, &files.require("config.json")?)?.max_position_embeddings)
}

fn largest(sizes: &[NonZeroUsize]) -> usize {
    sizes.iter().map(|size| size.get()).max().unwrap_or(1)
}

fn cell(args: &Args, ready: &mut Ready, context: usize, batch: usize) -> Result<Vec<Row>> {
    let seed = |stream: usize| args.sampling.seed + (stream + 1000 * batch + 100_000 * context) as u64;
    let prompts: Vec<Vec<u32>> =
        (0..batch).map(|stream| ready.random_prompt(context, seed(stream))).collect();
    let new = |&mode| Row { mode, batch, context, runs: Vec::new(), first_token: None, stages: None };
    let mut rows: Vec<Row> = args.modes.iter().map(new).collect();
    let repeats = usize::from(args.repeats);
    for repeat in 0..=repeats + usize::from(!args.matrix.no_stages) {
        ready.engine.settle_stages(repeat > repeats);
        for row in &mut rows {
            let request = |stream: usize| GenerateRequest {
                ignore_eos: true,
                sampling: Sampling {
                    seed: seed(stream) + 10_000_000 * repeat as u64,
                    ..args.sampling.sampling()
                },
                speculation: Speculation {
                    mode: row.mode,
                    budget: args.budget.filter(|_| row.mode == Mode::Tree),
                },
                ..GenerateRequest::new(prompts[stream].clone(), most_tokens(args))
            };
            let requests: Vec<_> = (0..batch).map(request).collect();
            let mut run = decode(ready, requests.clone(), args.matrix.rounds.get())?;
            if run.rounds == 0 {
                // The first streams were at their ends before the last one had read its prompt: from saved prefixes all start at once.
                read(ready, &requests)?;
                run = decode(ready, requests, args.matrix.rounds.get())?;
            }
            match repeat {
                0 if run.stats.iter().all(|stats| stats.cached_tokens == 0) => {
                    row.first_token = run.stats.iter().map(|stats| stats.first_token).reduce(f64::max);
                }
                0 => {}
                _ if repeat > repeats => row.stages = Some(stages(&run.stats)),
                _ => row.runs.push(run),
            }
        }
    }
    ready.engine.settle_stages(false);
    let whole = |row: &Row| row.runs.iter().all(|run| run.rounds > 0 && run.seconds > 0.0);
    ensure!(rows.iter().all(whole), "{}", no_window(args, ready, context, batch));
    Ok(rows)
}

/// Why the streams of a cell were never all decoding, and what would do.
fn no_window(args: &Args, ready: &Ready, context: usize, batch: usize) -> String {
    let (tokens, room) = (most_tokens(args), ready.engine.max_prompt() + 1);
    if context + tokens > room {
        return format!(
            "--context: expected room for {tokens} tokens after prompts of {context}, got {room}"
        );
    }
    let (cache, mib) = (ready.engine.stats().cache, |bytes: usize| bytes.div_ceil(1 << 20));
    let each = ready.sizes.state + context * ready.sizes.token();
    format!(
        "--batch: expected saved prefixes of {batch} prompts of {context} tokens, {} MiB, within the {} MiB beside the pools (room for {}), got {} saved",
        mib(batch * each),
        mib(cache.budget),
        cache.budget / each.max(1),
        cache.entries,
    )
}

/// Reads the prompts of requests and saves them, one stream's after the other's.
fn read(ready: &mut Ready, requests: &[GenerateRequest]) -> Result<()> {
    for request in requests {
        ready.engine.run(GenerateRequest { max_tokens: 1, ..request.clone() })?;
    }
    Ok(())
}

/// Runs requests for `rounds` rounds of all of them, or until the first one ends, and cancels them.
fn decode(ready: &mut Ready, requests: Vec<GenerateRequest>, rounds: usize) -> Result<Run> {
    let mut open = HashSet::new();
    for request in requests {
        open.insert(ready.engine.submit(request)?);
    }
    let (count, mut started) = (open.len(), HashSet::new());
    let hash = DefaultHasher::new();
    let mut run = Run { tokens: 0, rounds: 0, seconds: 0.0, stats: Vec::new(), hash };
    let mut clock: Option<Instant> = None;
    while !open.is_empty() {
        let events = ready.engine.step()?;
        run.rounds += usize::from(clock.is_some());
        for (stream, event) in events {
            match event {
                Event::Text { tokens, .. } => {
                    started.insert(stream);
                    tokens.iter().for_each(|token| token.id.hash(&mut run.hash));
                    run.tokens += if clock.is_some() { tokens.len() } else { 0 };
                }
                Event::Done { stats, .. } => {
                    open.remove(&stream);
                    run.stats.push(stats);
                }
                Event::Failed(error) => return Err(error.into()),
                Event::Prompt(_) | Event::Round(_) => {}
            }
        }
        if !run.stats.is_empty() || run.rounds == rounds {
            if let Some(clock) = clock.take() {
                run.seconds = clock.elapsed().as_secs_f64();
            }
            open.iter().for_each(|&stream| ready.engine.cancel(stream));
        } else if clock.is_none() && started.len() == count {
            clock = Some(Instant::now());
        }
    }
    Ok(run)
}

/// Seconds a round by stage, over all streams.
fn stages(stats: &[StreamStats]) -> StageTimes {
    let (mut sum, mut rounds) = (StageTimes::default(), 0);
    for stats in stats {
        sum += stats.stages;
        rounds += stats.rounds;
    }
    let each = 1.0 / rounds.max(1) as f64;
    StageTimes {
        prefill: 0.0,
        draft: sum.draft * each,
        build: sum.build * each,
        verify: sum.verify * each,
        accept: sum.accept * each,
        commit: sum.commit * each,
    }
}
