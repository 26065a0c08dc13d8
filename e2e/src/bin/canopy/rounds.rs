//! `canopy rounds`: what one round of the target costs, by the size of its trees.
//!
//! Speed without acceptance: a round verifies one tree a stream and commits a path of half its depth. Tokens/s at an acceptance length L are L
//! over the round's time, whatever L is; a random model has no acceptance of its own.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use canopy_candle::top_tokens;
use canopy_e2e::loader::{LoadOptions, load_target, resolve};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_kernels::DraftTree;
use serde_json::{Value, json};

use crate::engine_args::{EngineArgs, report_passes};
use crate::record;

const EXAMPLE: &str = "\
Columns: streams; rows a stream (1 is plain decoding); committed tokens before; milliseconds a round, median, p10 and p90; times the
one-row round of the same streams and context; tokens/s of all streams together at one token a stream and round.

Examples:
  canopy rounds --nodes 1,8,16 --streams 1,2 --context-tokens 64
  canopy rounds --model ./Qwen3.5-9B --random-weights 1 --device cuda --nodes 1,16,64 --context 4096";

/// Times rounds of the target alone, for trees of given sizes
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// Nodes of a stream's tree, the root included
    #[arg(long, value_delimiter = ',', default_value = "1,8,16,32,64", value_name = "NODES")]
    nodes: Vec<NonZeroUsize>,
    /// Chains in place of trees
    #[arg(long)]
    chains: bool,
    /// Streams that share a round
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "STREAMS")]
    streams: Vec<NonZeroUsize>,
    /// Committed tokens of every stream before the first timed round
    #[arg(long, value_delimiter = ',', default_value = "128", value_name = "TOKENS")]
    context_tokens: Vec<usize>,
    /// Timed rounds
    #[arg(long, default_value = "20", value_name = "N")]
    repeats: NonZeroUsize,
    /// Appends one JSON line per case
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Rounds before the first timed one.
const WARM_UP: usize = 3;

/// One line of the table.
struct Row {
    streams: usize,
    nodes: usize,
    context: usize,
    /// Seconds a round, sorted.
    rounds: Vec<f64>,
}

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| rounds(&args))
}

fn rounds(args: &Args) -> Result<()> {
    let slots = args.streams.iter().map(|streams| streams.get()).max().unwrap_or(1);
    let options = LoadOptions { slots, ..args.engine.options() };
    let clock = Instant::now();
    let mut target = load_target(&resolve(&options.target, options.offline)?, &options)?;
    eprintln!("loaded in {:.1} s", clock.elapsed().as_secs_f64());
    let most = args.nodes.iter().map(|nodes| nodes.get()).max().unwrap_or(1);
    ensure!(most <= DraftTree::MAX_NODES, "--nodes: expected 1 to {}, got {most}", DraftTree::MAX_NODES);
    let mut rows: Vec<Row> = Vec::new();
    for &context in &args.context_tokens {
        let room = target.context_len().saturating_sub(most);
        ensure!(
            context <= room,
            "--context-tokens: expected at most {room} beside trees of {most} nodes, got {context}"
        );
        for &streams in &args.streams {
            prefill(&mut target, streams.get(), context)?;
            for &nodes in &args.nodes {
                let tree = tree(nodes.get(), args.chains)?;
                let row = time(&mut target, streams.get(), &tree, context, args.repeats.get())?;
                let base = rows.iter().find(|base| {
                    base.nodes == 1 && (base.streams, base.context) == (row.streams, row.context)
                });
                let ratio = base.map(|base| row.quantile(0.5) / base.quantile(0.5));
                canopy_e2e::say!("{}", row.line(ratio));
                if let Some(path) = &args.json {
                    let line = row.json(args, ratio);
                    let appended = record::open(path).and_then(|mut file| writeln!(file, "{line}"));
                    appended.with_context(|| path.display().to_string())?;
                }
                rows.push(row);
            }
        }
    }
    report_passes(target.pass_counts());
    Ok(())
}

/// Commits `context` tokens to each of the first slots.
fn prefill(target: &mut Qwen35, streams: usize, context: usize) -> Result<()> {
    const CHUNK: usize = 128;
    for slot in 0..streams {
        target.reset(slot)?;
        let mut left = context;
        while left > 0 {
            let count = left.min(CHUNK);
            let tree = DraftTree::chain(count)?;
            let tokens = tokens(target, count, left);
            target.verify(&[VerifyStream { slot, tokens, tree, logits: LogitRows::None }])?;
            target.commit(&[(0..count).collect()])?;
            left -= count;
        }
    }
    Ok(())
}

fn tokens(target: &Qwen35, count: usize, seed: usize) -> Vec<u32> {
    let vocab = target.vocab_size();
    (0..count).map(|i| ((i * 7919 + seed * 104_729 + 17) % vocab) as u32).collect()
}

fn tree(nodes: usize, chains: bool) -> Result<DraftTree> {
    Ok(if chains || nodes < 8 { DraftTree::chain(nodes)? } else { DraftTree::bole(nodes, nodes as u64)? })
}

fn time(
    target: &mut Qwen35,
    streams: usize,
    tree: &DraftTree,
    context: usize,
    repeats: usize,
) -> Result<Row> {
    let nodes = tree.len();
    let deepest = tree.depths().iter().position(|&depth| depth as usize == tree.max_depth());
    let path = tree.path(deepest.unwrap_or(0));
    let path = &path[..path.len().div_ceil(2)];
    let (mut rounds, mut last) = (Vec::new(), Instant::now());
    for round in 0..repeats + WARM_UP {
        let requests: Vec<VerifyStream> = (0..streams)
            .map(|slot| VerifyStream {
                slot,
                tokens: tokens(target, nodes, round * streams + slot),
                tree: tree.clone(),
                logits: LogitRows::All,
            })
            .collect();
        let verified = target.verify(&requests)?;
        let logits = verified.logits.context("verify returned no logits")?;
        // One small copy back, as an accept walk needs: the most likely token of every row.
        let best = top_tokens(&logits, 1)?.to_vec2::<u32>()?;
        ensure!(best.len() == streams * nodes, "verify returned {} rows of logits", best.len());
        // From one copy to the next lie one commit and one verify, on any device.
        if round >= WARM_UP {
            rounds.push(last.elapsed().as_secs_f64());
        }
        last = Instant::now();
        target.commit(&vec![path.to_vec(); streams])?;
    }
    rounds.sort_by(f64::total_cmp);
    Ok(Row { streams, nodes, context, rounds })
}

impl Row {
    fn quantile(&self, q: f64) -> f64 {
        self.rounds[((self.rounds.len() - 1) as f64 * q).round() as usize]
    }

    fn line(&self, ratio: Option<f64>) -> String {
        let ms = |q| 1e3 * self.quantile(q);
        let ratio = ratio.map_or(String::new(), |ratio| format!("{ratio:6.2}x"));
        let rate = self.streams as f64 / self.quantile(0.5);
        format!(
            "{:3} streams {:4} rows {:6} tokens {:8.3} ms ({:.3} to {:.3}) {ratio:>7} {rate:8.1} tok/s",
            self.streams,
            self.nodes,
            self.context,
            ms(0.5),
            ms(0.1),
            ms(0.9)
        )
    }

    fn json(&self, args: &Args, ratio: Option<f64>) -> Value {
        let (commit, dirty) = record::commit();
        json!({
            "schema": 1,
            "case": "e2e.round",
            "model": format!("{:?}", args.engine.model),
            "random_weights": args.engine.random_weights,
            "device": args.engine.device,
            "graphs": !args.engine.no_graphs,
            "streams": self.streams,
            "nodes": self.nodes,
            "chains": args.chains || self.nodes < 8,
            "context": self.context,
            "repeats": self.rounds.len(),
            "ms_median": 1e3 * self.quantile(0.5),
            "ms_p10": 1e3 * self.quantile(0.1),
            "ms_p90": 1e3 * self.quantile(0.9),
            "ratio_to_one_row": ratio,
            "machine": record::machine(),
            "commit": commit,
            "dirty": dirty,
            "time": record::unix_time(),
            "command": record::command(),
        })
    }
}
