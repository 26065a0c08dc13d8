//! `canopy soak`: many requests one after the other, and whether memory stays flat.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use canopy_e2e::device;
use canopy_e2e::engine::{EngineConfig, GenerateRequest, Mode, Sampling, Speculation};
use canopy_e2e::loader::LoadOptions;
use serde_json::json;

use crate::engine_args::EngineArgs;
use crate::record;
use crate::synthetic::SyntheticArgs;

const EXAMPLE: &str = "\
Prompts are random token ids of 1 to --prompt-tokens tokens. Prints the memory in use (the device's, or this process's on the CPU) after
every tenth of the requests; fails when it grows by more than --growth-mib after the first quarter.

Examples:
  canopy soak --requests 40 --max-tokens 16
  canopy soak --device cuda --requests 200 --slots 4";

/// Runs many requests and watches memory
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    /// Requests in all
    #[arg(long, default_value = "200", value_name = "N")]
    requests: NonZeroUsize,
    /// Streams at once
    #[arg(long, default_value = "4", value_name = "STREAMS")]
    slots: NonZeroUsize,
    /// Longest prompt
    #[arg(long, default_value = "200", value_name = "TOKENS")]
    prompt_tokens: NonZeroUsize,
    /// Tokens per request
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    max_tokens: usize,
    /// Modes, in turn
    #[arg(long, value_delimiter = ',', default_value = "tree,auto,chain,ar")]
    modes: Vec<Mode>,
    /// Most growth after the first quarter of the requests
    #[arg(long, default_value_t = 32, value_name = "MIB")]
    growth_mib: usize,
    /// Appends one JSON line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const MIB: f64 = (1 << 20) as f64;

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| soak(&args))
}

fn used(args: &Args) -> Result<usize> {
    match device::memory(&args.engine.device()?)? {
        Some((free, total)) => Ok(total - free),
        None => record::resident_bytes().context("this system does not tell how much memory is in use"),
    }
}

fn soak(args: &Args) -> Result<()> {
    ensure!(!args.modes.is_empty(), "--modes: expected at least one, got none");
    let longest = args.prompt_tokens.get();
    let context_len = args.engine.context.unwrap_or(longest + args.max_tokens);
    let slots = args.slots.get();
    let options = LoadOptions { slots, context_len: Some(context_len), ..args.engine.options() };
    let mut ready =
        args.engine.load_with(&options, EngineConfig::on(&args.engine.device), &args.synthetic)?;
    let (requests, clock) = (args.requests.get(), Instant::now());
    let (mut memory, mut tokens, mut done) = (vec![(0, used(args)?)], 0, 0);
    while done < requests {
        let count = (requests.div_ceil(10)).min(requests - done);
        let request = |index: usize| GenerateRequest {
            ignore_eos: true,
            sampling: Sampling { seed: index as u64, ..Sampling::default() },
            speculation: Speculation { mode: args.modes[index % args.modes.len()], budget: None },
            ..GenerateRequest::new(
                ready.random_prompt(1 + index * 37 % longest, index as u64),
                args.max_tokens,
            )
        };
        let wanted: Vec<_> = (done..done + count).map(request).collect();
        for generation in ready.engine.run_all(wanted)? {
            tokens += generation?.tokens.len();
        }
        done += count;
        memory.push((done, used(args)?));
        canopy_e2e::say!("{done:6} requests {:10.1} MiB", used(args)? as f64 / MIB);
    }
    let stats = ready.engine.stats();
    ensure!(stats.free_slots == stats.slots, "{} of {} slots are free", stats.free_slots, stats.slots);
    let quarter = memory.iter().find(|(done, _)| 4 * done >= requests).map_or(0, |entry| entry.1);
    let grown = used(args)?.saturating_sub(quarter);
    canopy_e2e::say!(
        "{tokens} tokens in {:.1} s; grown by {:.1} MiB after the first quarter",
        clock.elapsed().as_secs_f64(),
        grown as f64 / MIB
    );
    if let Some(path) = &args.json {
        let (commit, dirty) = record::commit();
        let line = json!({
            "schema": 1,
            "case": "e2e.soak",
            "model": ready.name,
            "device": args.engine.device,
            "synthetic": args.synthetic.json(),
            "requests": requests,
            "slots": slots,
            "tokens": tokens,
            "memory_bytes": memory,
            "grown_bytes": grown,
            "machine": record::machine(),
            "commit": commit,
            "dirty": dirty,
            "time": record::unix_time(),
            "command": record::command(),
        });
        writeln!(record::open(path)?, "{line}").with_context(|| path.display().to_string())?;
    }
    ensure!(
        grown <= args.growth_mib << 20,
        "--growth-mib: expected at most {}, got {:.1}",
        args.growth_mib,
        grown as f64 / MIB
    );
    Ok(())
}
