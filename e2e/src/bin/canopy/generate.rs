//! `canopy generate`: text on the terminal as it comes, then a line of statistics.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use canopy_e2e::engine::{
    Chosen, Event, FinishReason, GenerateRequest, Mode, RoundReport, Speculation, StageTimes, StreamStats,
};
use canopy_e2e::tokenizer::ChatMessage;
use serde_json::{Value, json};

use crate::engine_args::{EngineArgs, Ready, SamplingArgs};
use crate::synthetic::SyntheticArgs;

const EXAMPLE: &str = "\
The text goes to stdout, the line of statistics to stderr. Every mode gives the same text; they differ in speed.

Examples:
  canopy generate \"def fibonacci(n):\"
  canopy generate --chat --max-tokens 200 \"Write a function that reverses a list.\"
  canopy generate --mode tree --budget 31 --temperature 0.8 --top-p 0.95 --seed 7 \"import os\"
  canopy generate --stop \"\\n\\n\" --json \"def add(a, b):\" | jq .stats
  canopy generate --model ./Qwen3.5-9B --drafter ./Qwen3.5-9B-DFlash \"Once upon a time\"
  canopy generate --model e2e/models/qwen3.5-9b --drafter e2e/models/qwen3.5-9b/drafter --random-weights 1 \\
      --device cuda --prompt-tokens 128 --synthetic-acceptance 6.5 --mode tree";

/// Continues a prompt
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    /// The text to continue
    #[arg(required_unless_present = "prompt_tokens")]
    prompt: Option<String>,
    /// Continues this many random token ids instead of a text, past every stop token
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["prompt", "chat", "system"])]
    prompt_tokens: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Wraps the prompt in the model's chat template
    #[arg(long)]
    chat: bool,
    /// A system message before the prompt; implies --chat
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens to generate
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    max_tokens: usize,
    /// ar, chain, tree or auto
    #[arg(long, default_value_t = Mode::Auto)]
    mode: Mode,
    /// Most drafted nodes a round
    #[arg(long, value_name = "NODES")]
    budget: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    /// Ends the text before this string; \n and \t are understood; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Goes on past the model's own stop tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Prints one JSON object with text, tokens and statistics instead
    #[arg(long)]
    json: bool,
    /// With --json: log-probabilities of this many alternatives per token
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<usize>,
    /// With --json: every round's tree and accepted path
    #[arg(long, requires = "json")]
    rounds: bool,
}

pub fn run(args: Args) -> Result<()> {
    args.engine.pool()?.install(|| generate(&args))
}

fn generate(args: &Args) -> Result<()> {
    let mut ready = args.engine.load(&args.synthetic)?;
    let request = request(args, &ready)?;
    if args.json {
        return print_json(args, &mut ready, request);
    }
    let mut out = std::io::stdout().lock();
    ready.engine.submit(request)?;
    loop {
        for (_, event) in ready.engine.step()? {
            match event {
                Event::Text { text, .. } => {
                    write!(out, "{text}")?;
                    out.flush()?;
                }
                Event::Prompt(_) | Event::Round(_) => {}
                Event::Failed(error) => return Err(error.into()),
                Event::Done { stats, .. } => {
                    writeln!(out)?;
                    eprintln!("{}", line(args.mode, &stats, ready.synthetic.as_deref()));
                    return Ok(());
                }
            }
        }
    }
}

fn prompt(args: &Args, ready: &Ready) -> Result<Vec<u32>> {
    if let Some(tokens) = args.prompt_tokens {
        return Ok(ready.random_prompt(tokens, args.sampling.seed));
    }
    let content = args.prompt.clone().unwrap_or_default();
    if !args.chat && args.system.is_none() {
        return ready.encode(&content);
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(ChatMessage { role: "system".into(), content: system.clone() });
    }
    messages.push(ChatMessage { role: "user".into(), content });
    ready.encode(&ready.tokenizer()?.chat_prompt(&messages)?)
}

fn request(args: &Args, ready: &Ready) -> Result<GenerateRequest> {
    Ok(GenerateRequest {
        stop: args.stop.iter().map(|stop| stop.replace("\\n", "\n").replace("\\t", "\t")).collect(),
        ignore_eos: args.ignore_eos || args.prompt_tokens.is_some(),
        sampling: args.sampling.sampling(),
        speculation: Speculation { mode: args.mode, budget: args.budget },
        logprobs: args.logprobs,
        report_rounds: args.rounds,
        ..GenerateRequest::new(prompt(args, ready)?, args.max_tokens)
    })
}

/// The line of statistics.
fn line(mode: Mode, stats: &StreamStats, synthetic: Option<&str>) -> String {
    let rate = stats.decode_rate();
    let synthetic = synthetic.map_or(String::new(), |stated| format!("; {stated}"));
    format!(
        "[{mode}: {} tokens after {} of prompt, {rate:.1} tokens/s, first token {:.0} ms, {} rounds, acceptance length \
         {:.2}, {:.1} drafted nodes a round{synthetic}]",
        stats.completion_tokens,
        stats.prompt_tokens,
        stats.first_token * 1e3,
        stats.rounds,
        stats.acceptance_length(),
        stats.mean_budget(),
    )
}

fn print_json(args: &Args, ready: &mut Ready, request: GenerateRequest) -> Result<()> {
    let got = ready.engine.run(request)?;
    let tokens = got.tokens.iter().map(|token| {
        let top = token.top.iter().map(|&(id, logprob)| json!({"id": id, "logprob": logprob}));
        match token.logprob {
            None => json!(token.id),
            Some(logprob) => json!({"id": token.id, "logprob": logprob, "top": top.collect::<Vec<_>>()}),
        }
    });
    let reason = match got.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::TimedOut => "timeout",
    };
    let mut object = json!({
        "model": ready.name,
        "mode": args.mode.name(),
        "text": got.text,
        "finish_reason": reason,
        "tokens": tokens.collect::<Vec<_>>(),
        "stats": stats_json(&got.stats),
        "synthetic": ready.synthetic,
    });
    if args.rounds {
        object["rounds"] = got.rounds.iter().map(round_json).collect();
    }
    canopy_e2e::say!("{object}");
    Ok(())
}

fn round_json(round: &RoundReport) -> Value {
    let node = |node: &canopy_e2e::engine::ReportedNode| json!({"token": node.token, "parent": node.parent, "prob": node.prob});
    let nodes: Vec<Value> = round.nodes.iter().map(node).collect();
    json!({"start": round.start, "nodes": nodes, "path": round.path, "bonus": round.bonus})
}

/// A stream's counters as JSON.
pub fn stats_json(stats: &StreamStats) -> Value {
    let budgets: serde_json::Map<String, Value> =
        stats.budgets.iter().map(|(budget, rounds)| (budget.to_string(), json!(rounds))).collect();
    json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "tokens_per_s": stats.decode_rate(),
        "first_token_s": stats.first_token,
        "total_s": stats.total,
        "rounds": stats.rounds,
        "drafted_rounds": stats.drafted_rounds,
        "drafted_tokens": stats.drafted_tokens,
        "lookup_rounds": stats.lookup_rounds,
        "lookup_tokens": stats.lookup_tokens,
        "acceptance_length": stats.acceptance_length(),
        "mean_budget": stats.mean_budget(),
        "rounds_by_budget": budgets,
        "choices": choices_json([stats]),
        "stages_s": stages_json(&stats.stages, 1.0),
    })
}

/// Rounds by what was verified and why, over all streams; what came most often is first.
pub fn choices_json<'a>(stats: impl IntoIterator<Item = &'a StreamStats>) -> Value {
    let mut all = BTreeMap::new();
    for (&chosen, &rounds) in stats.into_iter().flat_map(|stats| &stats.choices) {
        *all.entry(chosen).or_insert(0) += rounds;
    }
    let mut all: Vec<(Chosen, usize)> = all.into_iter().collect();
    all.sort_by_key(|&(_, rounds)| Reverse(rounds));
    let choice = |(Chosen { shape, nodes, reason }, rounds)| json!({"shape": shape.name(), "nodes": nodes, "reason": reason.name(), "rounds": rounds});
    all.into_iter().map(choice).collect()
}

/// Stage times, each times `scale`.
pub fn stages_json(stages: &StageTimes, scale: f64) -> Value {
    json!({
        "prefill": stages.prefill * scale,
        "draft": stages.draft * scale,
        "build": stages.build * scale,
        "verify": stages.verify * scale,
        "accept": stages.accept * scale,
        "commit": stages.commit * scale,
    })
}
