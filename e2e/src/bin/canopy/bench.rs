//! `canopy bench`: the modes side by side over the same prompts.
//!
//! Every repeat runs every prompt in every mode before it goes on to the next prompt, so that a machine that slows down
//! slows all modes. A prompt's rate is the median over the repeats; a row's rate is the median over its prompts, and its
//! ratio to `ar` the median over prompts of the ratio of the two. Before anything is reported the texts are compared.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use canopy_e2e::engine::{GenerateRequest, Mode, Speculation, StageTimes, StreamStats};
use serde_json::{Value, json};

use crate::against::{self, Difference, Kept};
use crate::engine_args::{EngineArgs, Ready, SamplingArgs, report_passes};
use crate::generate::stages_json;
use crate::matrix::{self, MatrixArgs};
use crate::record;

const PROMPTS: &str = include_str!("../../../models/canopy-tiny/prompts.json");

const EXAMPLE: &str = "\
Prompts are the embedded model's (kinds fixed, code, chat, textbook) or come from a file: a JSON list of
{\"kind\": ..., \"text\": ...}. Columns: tokens/s after the first token; times ar; acceptance length (tokens gained per
round); drafted nodes per round; percent of the tokens that the drafter and that lookups in the stream's own text brought
(the rest is the target's own next token of every round); milliseconds to the first token; milliseconds per token in each stage.
On the CPU the texts of all modes are equal byte for byte. Elsewhere a text may leave ar's where the two best tokens are nearly equal:
the widest such gap in ln p is shown, and one above 0.1 fails the run.

With --prompt-tokens prompts are random ids and every cell is a context, a number of streams and a mode. Columns: tokens/s of all streams
together and of each; times ar; acceptance length; drafted nodes a round; percent of the rounds in which nothing was drafted; milliseconds a
round, and of each stage in a run of its own in which every stage waits for the device; milliseconds until the last stream has its first token.

Synthetic acceptance (--synthetic-acceptance, --synthetic-curve) times random weights: drafts, trees, verify passes and commits are real,
what is accepted is drawn. Behind an accepted node the target's token is the drafter's best one with the depth's probability p, its second,
third ... best with the stated shares of 1 - p, otherwise none of the drafter's. A chain holds the best ones alone; a tree goes on with
every one it has a node for. Behind a node that was not the best all probabilities are multiplied by --synthetic-off-spine. Draws depend on the
seed, the stream and the position alone. Trees are built from the same probabilities.

Examples:
  canopy bench
  canopy bench --kinds fixed --limit 19 --repeats 5
  canopy bench --modes ar,tree --budget 31 --temperature 1 --json run.jsonl
  canopy bench --model ./Qwen3.5-9B --drafter ./Qwen3.5-9B-DFlash --prompts my-prompts.json
  canopy bench --prompt-tokens 64,256 --batch 1,2,4 --rounds 64
  canopy bench --model e2e/models/qwen3.5-9b --drafter e2e/models/qwen3.5-9b/drafter --random-weights 1 --device cuda \\
      --prompt-tokens 128,2048 --batch 1,2,4,8,16 --synthetic-acceptance 6.5 --json matrix.jsonl";

/// Compares the decoding modes over the same prompts
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Modes to compare
    #[arg(long, value_delimiter = ',', default_value = "ar,chain,tree,auto")]
    pub modes: Vec<Mode>,
    /// Most drafted nodes a round in tree mode
    #[arg(long, value_name = "NODES")]
    pub budget: Option<usize>,
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// A JSON file of prompts instead of the embedded ones
    #[arg(long, conflicts_with = "prompt_tokens", value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Kinds of prompts
    #[arg(long, value_delimiter = ',', default_value = "fixed,code,chat", conflicts_with = "prompt_tokens")]
    kinds: Vec<String>,
    /// Most prompts of a kind
    #[arg(long, default_value = "16", conflicts_with = "prompt_tokens", value_name = "PROMPTS")]
    limit: NonZeroUsize,
    /// Most tokens per prompt
    #[arg(long, default_value_t = 128, conflicts_with = "prompt_tokens", value_name = "TOKENS")]
    pub max_tokens: usize,
    /// Runs of each prompt in each mode
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..), value_name = "N")]
    pub repeats: u16,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Writes every prompt's tokens in the first mode, for `--against`
    #[arg(long, conflicts_with = "prompt_tokens", value_name = "FILE")]
    keep_tokens: Option<PathBuf>,
    /// Compares every prompt's tokens in the first mode with a file's that `--keep-tokens` wrote, and says of each
    /// difference how far apart the two best tokens were
    #[arg(long, conflicts_with = "prompt_tokens", value_name = "FILE")]
    against: Option<PathBuf>,
    /// Appends one JSON line per kind and mode, and per difference of `--against`
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(serde::Deserialize)]
struct Prompt {
    kind: String,
    text: String,
}

/// What a prompt brought in one mode.
#[derive(Default)]
struct Runs {
    text: String,
    tokens: Vec<u32>,
    stats: Vec<StreamStats>,
}

impl Runs {
    fn rate(&self) -> f64 {
        median(self.stats.iter().map(StreamStats::decode_rate).collect())
    }
}

/// One line of the table.
struct Row {
    kind: String,
    mode: Mode,
    prompts: usize,
    rate: f64,
    low: f64,
    high: f64,
    ratio: Option<f64>,
    acceptance_length: f64,
    mean_budget: f64,
    /// Shares of the tokens that the drafter and that lookups brought.
    drafted: f64,
    looked_up: f64,
    first_token: f64,
    /// Seconds per token and stage.
    stages: StageTimes,
    /// Tokens that the stages' seconds are divided by.
    tokens: f64,
    texts_equal: bool,
    /// Of the tokens of all prompts: runs of one hash gave the same.
    tokens_hash: u64,
    /// Off the CPU: the widest near-tie at which a text left `ar`'s.
    tie: Option<f64>,
}

/// A gap in ln p that rounding off the CPU may close.
const NEAR_TIE: f64 = 0.1;

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| bench(&args))
}

/// The kinds of `prompts`, each once.
fn known(prompts: &[Prompt]) -> String {
    let mut kinds: Vec<&str> = prompts.iter().map(|prompt| prompt.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.join(", ")
}

fn bench(args: &Args) -> Result<()> {
    if !args.matrix.prompt_tokens.is_empty() {
        return matrix::run(args);
    }
    ensure!(!args.matrix.synthetic.is_set(), "--synthetic-acceptance: expected with --prompt-tokens alone");
    let prompts = prompts(args)?;
    // A file that cannot be written should not cost a whole run.
    if let Some(path) = &args.json {
        let opened = record::open(path);
        opened.with_context(|| format!("--json {}", path.display()))?;
    }
    let known_tokens = args.against.as_deref().map(against::read).transpose()?;
    let (mut kept, mut differences) = (Vec::new(), Vec::new());
    let mut ready = args.engine.load(&args.matrix.synthetic)?;
    let mut rows = Vec::new();
    for kind in &args.kinds {
        let texts: Vec<&str> = prompts.iter().filter(|p| &p.kind == kind).map(|p| p.text.as_str()).collect();
        let texts = &texts[..texts.len().min(args.limit.get())];
        ensure!(!texts.is_empty(), "--kinds: expected some of {}, got {kind}", known(&prompts));
        let (of_kind, first) = measure(args, &mut ready, kind, texts)?;
        rows.extend(of_kind);
        let first = texts.iter().zip(first);
        let now = first.map(|(&text, tokens)| Kept { kind: kind.clone(), text: text.into(), tokens });
        kept.extend(now);
    }
    print_table(&rows);
    report_passes(ready.engine.stats().passes);
    if let Some(known) = &known_tokens {
        differences = against::differences(known, &kept, |text, at| gap_at(args, &mut ready, text, at))?;
    }
    if let Some(path) = &args.keep_tokens {
        against::write(path, &kept)?;
    }
    if let Some(path) = &args.json {
        append(path, args, &ready.name, &rows, &differences).with_context(|| path.display().to_string())?;
    }
    if rows.iter().any(|row| !row.texts_equal && row.tie.is_none_or(|gap| gap > NEAR_TIE)) {
        bail!("the modes' texts differ");
    }
    ensure!(
        differences.iter().all(|apart| apart.gap.is_some_and(|gap| gap <= NEAR_TIE)),
        "--against: tokens differ where the best two are more than {NEAR_TIE} apart in ln p"
    );
    Ok(())
}

fn prompts(args: &Args) -> Result<Vec<Prompt>> {
    let json = match &args.prompts {
        Some(path) => fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => PROMPTS.to_owned(),
    };
    serde_json::from_str(&json).context("--prompts: expected a JSON list of objects with kind and text")
}

/// All modes over one kind's prompts, and every prompt's tokens in the first mode.
fn measure(args: &Args, ready: &mut Ready, kind: &str, texts: &[&str]) -> Result<(Vec<Row>, Vec<Vec<u32>>)> {
    let mut runs: Vec<Vec<Runs>> =
        args.modes.iter().map(|_| texts.iter().map(|_| Runs::default()).collect()).collect();
    for repeat in 0..usize::from(args.repeats) {
        for (prompt, text) in texts.iter().enumerate() {
            let ids = ready.encode(text)?;
            for step in 0..args.modes.len() {
                // Whoever comes first after a change of prompt pays for cold caches: that goes around.
                let index = (step + repeat) % args.modes.len();
                let mode = args.modes[index];
                let budget = args.budget.filter(|_| mode == Mode::Tree);
                let request = GenerateRequest {
                    sampling: args.sampling.sampling(),
                    speculation: Speculation { mode, budget },
                    ..GenerateRequest::new(ids.clone(), args.max_tokens)
                };
                let got = ready.engine.run(request)?;
                let runs = &mut runs[index][prompt];
                runs.text = got.text;
                runs.tokens = got.tokens.iter().map(|token| token.id).collect();
                runs.stats.push(got.stats);
            }
        }
    }
    let base = args.modes.iter().position(|&mode| mode == Mode::Ar);
    let summarise = |index: usize| row(kind, args.modes[index], &runs[index], base.map(|base| &runs[base]));
    let mut rows: Vec<Row> = (0..args.modes.len()).map(summarise).collect();
    if let Some(base) = base.filter(|_| args.engine.device != "cpu") {
        for (row, runs_of) in rows.iter_mut().zip(&runs).filter(|(row, _)| !row.texts_equal) {
            row.tie = Some(widest_tie(args, ready, texts, &runs[base], runs_of)?);
        }
    }
    let first = runs.into_iter().next().unwrap_or_default();
    Ok((rows, first.into_iter().map(|runs| runs.tokens).collect()))
}

/// Where a mode's tokens first leave `ar`'s, how far apart the two best tokens were there: the largest such gap in ln p.
fn widest_tie(args: &Args, ready: &mut Ready, texts: &[&str], base: &[Runs], runs: &[Runs]) -> Result<f64> {
    let mut widest = 0f64;
    for (text, (base, runs)) in texts.iter().zip(base.iter().zip(runs)) {
        let Some(at) = against::first_difference(&base.tokens, &runs.tokens) else { continue };
        widest = widest.max(gap_at(args, ready, text, at)?.unwrap_or(0.0));
    }
    Ok(widest)
}

/// How far apart in ln p the two best tokens are at a place of `ar`'s text, if it is that long.
fn gap_at(args: &Args, ready: &mut Ready, text: &str, at: usize) -> Result<Option<f64>> {
    let request = GenerateRequest {
        sampling: args.sampling.sampling(),
        speculation: Speculation { mode: Mode::Ar, budget: None },
        logprobs: Some(2),
        ..GenerateRequest::new(ready.encode(text)?, args.max_tokens)
    };
    let got = ready.engine.run(request)?;
    Ok(match got.tokens.get(at).map(|token| token.top.as_slice()) {
        Some([(_, best), (_, second), ..]) => Some(f64::from(*best) - f64::from(*second)),
        _ => None,
    })
}

fn row(kind: &str, mode: Mode, runs: &[Runs], base: Option<&Vec<Runs>>) -> Row {
    // One token has no rate: the first comes from the prompt.
    let timed = |runs: &&Runs| runs.stats.iter().all(|stats| stats.completion_tokens > 1);
    let mut rates: Vec<f64> = runs.iter().filter(timed).map(Runs::rate).collect();
    rates.sort_by(f64::total_cmp);
    let pairs = base.map(|base| runs.iter().zip(base).filter(|(runs, _)| timed(runs)));
    let ratio = pairs.map(|pairs| median(pairs.map(|(runs, base)| runs.rate() / base.rate()).collect()));
    let all = || runs.iter().flat_map(|runs| &runs.stats);
    let (mut stages, mut tokens) = (StageTimes::default(), 0);
    for stats in all() {
        stages += stats.stages;
        tokens += stats.completion_tokens;
    }
    let sum = |count: fn(&StreamStats) -> usize| all().map(count).sum::<usize>() as f64;
    let rounds = sum(|stats| stats.rounds).max(1.0);
    Row {
        kind: kind.into(),
        mode,
        prompts: runs.len(),
        rate: median(rates.clone()),
        low: quantile(&rates, 0.1),
        high: quantile(&rates, 0.9),
        ratio,
        acceptance_length: sum(|stats| stats.committed) / rounds,
        mean_budget: (sum(|stats| stats.nodes) - rounds) / rounds,
        drafted: sum(|stats| stats.drafted_tokens) / (tokens as f64).max(1.0),
        looked_up: sum(|stats| stats.lookup_tokens) / (tokens as f64).max(1.0),
        first_token: median(all().map(|stats| stats.first_token).collect()),
        stages,
        tokens: tokens as f64,
        texts_equal: base.is_none_or(|base| runs.iter().zip(base).all(|(a, b)| a.text == b.text)),
        tokens_hash: hash(runs),
        tie: None,
    }
}

fn hash(runs: &[Runs]) -> u64 {
    let mut hasher = DefaultHasher::new();
    runs.iter().for_each(|runs| runs.tokens.hash(&mut hasher));
    hasher.finish()
}

fn print_table(rows: &[Row]) {
    canopy_e2e::say!(
        "{:<9} {:<6} {:>9} {:>6} {:>7} {:>6} {:>5} {:>5} {:>9} | ms per token {:>6} {:>6} {:>6} {:>6} {:>6} | text",
        "prompts",
        "mode",
        "tokens/s",
        "x ar",
        "accept",
        "nodes",
        "dr %",
        "lk %",
        "first ms",
        "draft",
        "build",
        "verify",
        "accept",
        "commit"
    );
    for row in rows {
        let ms = 1e3 / row.tokens.max(1.0);
        canopy_e2e::say!(
            "{:<9} {:<6} {:>9.1} {:>6} {:>7.2} {:>6.1} {:>5.0} {:>5.0} {:>9.1} | {:>19.3} {:>6.3} {:>6.3} {:>6.3} {:>6.3} | {}",
            format!("{} {}", row.kind, row.prompts),
            row.mode.name(),
            row.rate,
            row.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}")),
            row.acceptance_length,
            row.mean_budget,
            row.drafted * 1e2,
            row.looked_up * 1e2,
            row.first_token * 1e3,
            row.stages.draft * ms,
            row.stages.build * ms,
            row.stages.verify * ms,
            row.stages.accept * ms,
            row.stages.commit * ms,
            match row.tie {
                _ if row.texts_equal => "equal".into(),
                Some(gap) if gap <= NEAR_TIE => format!("near-ties, widest {gap:.4}"),
                Some(gap) => format!("DIFFERS by {gap:.4}"),
                None => "DIFFERS".into(),
            },
        );
    }
}

fn append(path: &Path, args: &Args, model: &str, rows: &[Row], differences: &[Difference<'_>]) -> Result<()> {
    let mut file = record::open(path)?;
    let (commit, dirty) = record::commit();
    let machine = record::machine();
    for row in rows {
        let line: Value = json!({
            "schema": 1,
            "case": "e2e.generate",
            "model": model,
            "kind": row.kind,
            "mode": row.mode.name(),
            "budget": args.budget,
            "prompts": row.prompts,
            "repeats": args.repeats,
            "max_tokens": args.max_tokens,
            "temperature": args.sampling.temperature,
            "tokens_per_s": row.rate,
            "p10": row.low,
            "p90": row.high,
            "ratio_to_ar": row.ratio,
            "acceptance_length": row.acceptance_length,
            "mean_budget": row.mean_budget,
            "drafted_share": row.drafted,
            "lookup_share": row.looked_up,
            "first_token_ms": row.first_token * 1e3,
            "stages_ms_per_token": stages_json(&row.stages, 1e3 / row.tokens.max(1.0)),
            "texts_equal": row.texts_equal,
            "tokens_hash": format!("{:016x}", row.tokens_hash),
            "widest_tie": row.tie,
            "device": args.engine.device,
            "graphs": !args.engine.no_graphs,
            "host_walk": args.engine.host_walk,
            "host_build": args.engine.host_build,
            "threads": rayon::current_num_threads(),
            "machine": machine,
            "commit": commit,
            "dirty": dirty,
            "time": record::unix_time(),
            "command": record::command(),
        });
        writeln!(file, "{line}")?;
    }
    for apart in differences {
        let mut line = apart.json();
        let about = json!({"schema": 1, "model": model, "mode": args.modes.first().map(|mode| mode.name()),
            "device": args.engine.device, "machine": machine, "commit": commit, "dirty": dirty,
            "time": record::unix_time(), "command": record::command()});
        line.extend(about.as_object().cloned().unwrap_or_default());
        writeln!(file, "{}", Value::from(line))?;
    }
    Ok(())
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// Linear between the two nearest of sorted `values`; 0 without any.
fn quantile(values: &[f64], q: f64) -> f64 {
    let place = q * values.len().saturating_sub(1) as f64;
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    let (low, high) = (at(place.floor() as usize), at(place.ceil() as usize));
    low + (high - low) * place.fract()
}
