//! One mode of a cell: its figures as text and as a record.

use std::hash::{DefaultHasher, Hash, Hasher};

use canopy_e2e::engine::{Mode, StageTimes, StreamStats};
use serde_json::{Value, json};

use super::Run;
use crate::bench::{Args, median};
use crate::engine_args::Ready;
use crate::generate::{choices_json, stages_json};
use crate::record;

/// One mode of a cell.
pub struct Row {
    pub mode: Mode,
    /// Streams.
    pub batch: usize,
    /// Tokens of a prompt.
    pub context: usize,
    /// The measured runs.
    pub runs: Vec<Run>,
    /// Seconds to the last stream's first token, prompts read in full.
    pub first_token: Option<f64>,
    /// Seconds a round by stage.
    pub stages: Option<StageTimes>,
}

impl Row {
    /// Names of the columns.
    pub const HEAD: &str = "context streams mode    tokens/s  per stream   x ar accept  nodes plain %  ms a round | draft  build verify accept commit | first token ms";

    /// Tokens per second of all streams, the median over the runs.
    pub fn rate(&self) -> f64 {
        median(self.runs.iter().map(Run::rate).collect())
    }

    fn round_ms(&self) -> f64 {
        median(self.runs.iter().map(|run| 1e3 * run.seconds / run.rounds as f64).collect())
    }

    fn sum(&self, count: impl Fn(&StreamStats) -> usize) -> f64 {
        self.runs.iter().flat_map(|run| &run.stats).map(count).sum::<usize>() as f64
    }

    fn rounds(&self) -> f64 {
        self.sum(|stats| stats.rounds).max(1.0)
    }

    fn acceptance_length(&self) -> f64 {
        self.sum(|stats| stats.committed) / self.rounds()
    }

    fn mean_budget(&self) -> f64 {
        (self.sum(|stats| stats.nodes) - self.rounds()) / self.rounds()
    }

    /// Share of the rounds in which nothing was drafted.
    fn plain(&self) -> f64 {
        self.sum(|stats| stats.budgets.get(&0).copied().unwrap_or(0)) / self.rounds()
    }

    /// The row as text; `base` is `ar`'s rate.
    pub fn line(&self, base: Option<f64>) -> String {
        let ratio = base.map_or("-".into(), |base| format!("{:.2}", self.rate() / base));
        let stages = self.stages.map_or("no run".into(), |s| {
            let stages = [s.draft, s.build, s.verify, s.accept, s.commit];
            stages.map(|seconds| format!("{:6.3}", 1e3 * seconds)).join(" ")
        });
        format!(
            "{:7} {:7} {:<6} {:9.1} {:11.1} {ratio:>6} {:6.2} {:6.1} {:7.0} {:11.3} | {stages} | {}",
            self.context,
            self.batch,
            self.mode.name(),
            self.rate(),
            self.rate() / self.batch as f64,
            self.acceptance_length(),
            self.mean_budget(),
            1e2 * self.plain(),
            self.round_ms(),
            self.first_token.map_or("from a saved prefix".into(), |seconds| format!("{:.1}", 1e3 * seconds)),
        )
    }

    /// A hash of the tokens of all runs.
    fn tokens_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.runs.iter().for_each(|run| run.hash.finish().hash(&mut hasher));
        hasher.finish()
    }

    /// Rounds by drafted nodes, all runs together.
    fn budgets(&self) -> Value {
        let mut all = std::collections::BTreeMap::<usize, usize>::new();
        for (&budget, &rounds) in self.runs.iter().flat_map(|run| &run.stats).flat_map(|stats| &stats.budgets)
        {
            *all.entry(budget).or_default() += rounds;
        }
        let all: serde_json::Map<String, Value> =
            all.into_iter().map(|(budget, rounds)| (budget.to_string(), json!(rounds))).collect();
        all.into()
    }

    /// The row as a record; `base` is `ar`'s rate.
    pub fn json(&self, args: &Args, ready: &Ready, base: Option<f64>) -> Value {
        let (commit, dirty) = record::commit();
        let mut rates: Vec<f64> = self.runs.iter().map(Run::rate).collect();
        rates.sort_by(f64::total_cmp);
        let prompt = self.batch * self.context;
        json!({
            "schema": 1,
            "case": "e2e.matrix",
            "model": ready.name,
            "random_weights": args.engine.random_weights,
            "device": args.engine.device,
            "rows": format!("{:?}", args.engine.rows),
            "synthetic": args.matrix.synthetic.json(),
            "synthetic_line": ready.synthetic,
            "mode": self.mode.name(),
            "budget": args.budget,
            "streams": self.batch,
            "context": self.context,
            "rounds": args.matrix.rounds,
            "repeats": self.runs.len(),
            "tokens_per_s": self.rate(),
            "tokens_per_s_least": rates.first(),
            "tokens_per_s_most": rates.last(),
            "tokens_per_s_stream": self.rate() / self.batch as f64,
            "ratio_to_ar": base.map(|base| self.rate() / base),
            "acceptance_length": self.acceptance_length(),
            "mean_budget": self.mean_budget(),
            "plain_share": self.plain(),
            "rounds_by_budget": self.budgets(),
            "choices": choices_json(self.runs.iter().flat_map(|run| &run.stats)),
            "tokens_hash": format!("{:016x}", self.tokens_hash()),
            "host_walk": args.engine.host_walk,
            "host_build": args.engine.host_build,
            "ms_round": self.round_ms(),
            "stages_ms_round": self.stages.map(|stages| stages_json(&stages, 1e3)),
            "first_token_ms": self.first_token.map(|seconds| 1e3 * seconds),
            "prompt_tokens_per_s": self.first_token.map(|seconds| prompt as f64 / seconds),
            "threads": rayon::current_num_threads(),
            "machine": record::machine(),
            "commit": commit,
            "dirty": dirty,
            "time": record::unix_time(),
            "command": record::command(),
        })
    }
}
