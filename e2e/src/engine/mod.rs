//! The engine: rounds of draft, build, verify, accept, commit over all running streams.
//!
//! [`Engine::submit`] checks and queues a request, [`Engine::step`] runs one round. A round packs the draft trees of
//! all running streams, and prompt chunks of the streams that join, into one pass of the target. Each stream has a
//! slot of its own in the target and the drafter, and its text depends on nothing else.

mod accept;
mod auto;
mod calibrate;
mod choose;
mod drafts;
mod event;
mod learn;
mod plan;
mod prefill;
mod prefix;
mod request;
mod round;
mod rules;
mod run;
mod scheduler;
mod stats;
mod stop;
mod stream;
mod target_rows;
mod text;
mod walked;

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use candle_core::Tensor;
use canopy_kernels::DraftTree;

use crate::constrain::Compiler;
use crate::draft::Drafter;
use crate::target::Target;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
pub use accept::SyntheticAcceptance;
pub use auto::CostCurve;
use auto::Tuner;
pub use event::{
    EmittedToken, Event, FinishReason, PromptToken, ReportedNode, RoundReport, StreamId, TokenOrigin,
};
use prefix::PrefixCache;
use request::Limits;
pub use request::{GenerateRequest, Mode, Sampling, Speculation};
pub use rules::{Constraint, Penalties, Reasoning};
pub use run::Generation;
use scheduler::Waiting;
pub use stats::{CacheStats, Chosen, EngineStats, NodeShape, PassCounts, Reason, StageTimes, StreamStats};
pub use stop::StopMatcher;
use stream::Stream;
pub use text::{TextDecoder, TokenIds, TokenText};

/// Limits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Prompt tokens per round over all joining streams. Up to [`DraftTree::MAX_NODES`] they share the pass of the streams that decode; a
    /// multiple of that has parts of more than 128 tokens read by passes of their own, of so many rows while nothing else runs.
    pub prefill_chunk: usize,
    /// Rows of such a pass while other streams run, which wait for it once a round.
    pub prefill_beside: usize,
    /// Streams that may wait for a slot.
    pub max_waiting: usize,
    /// Tree budget when a request names none.
    pub default_budget: usize,
    /// Most nodes that `auto` may draft when a request names no budget.
    pub auto_budget: usize,
    /// Time a few passes at start, so that `auto` knows this machine's costs from the first round on. Without it
    /// the first rounds teach them.
    pub calibrate: bool,
    /// Bytes that saved prefixes may take; 0 saves none.
    pub cache_bytes: usize,
    /// Prefixes of whole multiples of this many tokens are saved, besides prompt ends; at least 1.
    pub cache_page: usize,
    /// A stated model says which drafted nodes are accepted, for timing a pair of random weights. Texts then mean nothing.
    pub synthetic: Option<SyntheticAcceptance>,
    /// Wait for the device after every stage, so that each stage's seconds are its own. Slows rounds down.
    pub settle_stages: bool,
    /// Walk every tree on the host, and read every draft there, even where the target could do without: to compare. Texts are the same.
    pub host_walk: bool,
    /// Build every tree on the host, even where the target could do without: to compare. Texts are the same.
    pub host_build: bool,
    /// Choose `auto`'s nodes before the draft in rounds that need no host, from rounds timed at start, where the target walks and
    /// [`Self::calibrate`] is set. `None`: on devices other than the CPU, which waits for nothing.
    pub ahead: Option<bool>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            prefill_chunk: 128,
            prefill_beside: 512,
            max_waiting: 64,
            default_budget: 16,
            auto_budget: 64,
            calibrate: true,
            cache_bytes: 0,
            cache_page: 256,
            synthetic: None,
            settle_stages: false,
            host_walk: false,
            host_build: false,
            ahead: None,
        }
    }
}

impl EngineConfig {
    /// Most rows of a pass that reads prompts alone.
    pub const MAX_PREFILL: usize = 8192;

    /// The defaults for the device of that name: prompts in passes of 2,048 rows on another than the CPU.
    pub fn on(device: &str) -> Self {
        let usual = Self::default();
        let prefill_chunk = if device == "cpu" { usual.prefill_chunk } else { 2048 };
        Self { prefill_chunk, ..usual }
    }

    fn check(&self) -> Result<()> {
        let refuse = |key: &str, message: String| {
            Err(Error::Config { what: "engine".into(), key: key.into(), message })
        };
        let (slice, most) = (DraftTree::MAX_NODES, Self::MAX_PREFILL);
        let whole = |rows: usize| rows.is_multiple_of(slice) && (slice..=most).contains(&rows);
        if !(1..=slice).contains(&self.prefill_chunk) && !whole(self.prefill_chunk) {
            let message = format!(
                "expected 1 to {slice}, or a multiple of it up to {most}, got {}",
                self.prefill_chunk
            );
            return refuse("prefill_chunk", message);
        }
        if !whole(self.prefill_beside) {
            let message = format!("expected a multiple of {slice} up to {most}, got {}", self.prefill_beside);
            return refuse("prefill_beside", message);
        }
        if self.cache_page == 0 {
            return refuse("cache_page", "expected at least 1, got 0".into());
        }
        for (key, budget) in [("default_budget", self.default_budget), ("auto_budget", self.auto_budget)] {
            if budget >= DraftTree::MAX_NODES {
                let message = format!("expected at most {}, got {budget}", DraftTree::MAX_NODES - 1);
                return refuse(key, message);
            }
        }
        Ok(())
    }
}

/// Runs streams on one target and drafter. Blocking; one thread owns it.
pub struct Engine {
    target: Box<dyn Target>,
    drafter: Option<Box<dyn Drafter>>,
    text: Arc<dyn TokenText>,
    prefixes: PrefixCache,
    grammars: Compiler,
    config: EngineConfig,
    limits: Limits,
    tuner: Tuner,
    next_id: u64,
    waiting: VecDeque<Waiting>,
    running: Vec<Stream>,
    free: Vec<usize>,
    events: Vec<(StreamId, Event)>,
    counters: Counters,
}

/// What [`EngineStats`] counts and nothing else knows.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    rounds: u64,
    failed_rounds: u64,
    unseen_rounds: u64,
    non_finite: u64,
}

impl Engine {
    /// An engine over a loaded pair. Every slot must be empty.
    ///
    /// # Errors
    /// When the configuration is out of range, the target has no slot, or the drafter's taps do not fit the target.
    pub fn new(
        target: Box<dyn Target>,
        drafter: Option<Box<dyn Drafter>>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self> {
        Self::with_text(target, drafter, tokenizer, config)
    }

    /// As [`Self::new`], with any vocabulary.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_text(
        mut target: Box<dyn Target>,
        mut drafter: Option<Box<dyn Drafter>>,
        text: Arc<dyn TokenText>,
        config: EngineConfig,
    ) -> Result<Self> {
        config.check()?;
        if target.slots() == 0 {
            let message = "expected at least 1, got 0".into();
            return Err(Error::Config { what: "engine".into(), key: "slots".into(), message });
        }
        if let Some(drafter) = &drafter {
            target.set_taps(drafter.taps())?;
        }
        let limits =
            Limits { vocab: target.vocab_size(), context: target.context_len(), drafter: drafter.is_some() };
        let tuner = calibrate::tuner(target.as_mut(), drafter.as_deref_mut(), config.calibrate)?;
        // A long part would end at every page.
        let page =
            if config.reads_long() { config.cache_page.max(config.prefill_chunk) } else { config.cache_page };
        // The lowest slot is taken first.
        let free = (0..target.slots()).rev().collect();
        let (waiting, running, events) = (VecDeque::new(), Vec::new(), Vec::new());
        let (counters, grammars) = (Counters::default(), Compiler::new(Arc::clone(&text)));
        let mut engine = Self {
            target,
            drafter,
            text,
            prefixes: PrefixCache::new(config.cache_bytes, page),
            grammars,
            config,
            limits,
            tuner,
            next_id: 0,
            waiting,
            running,
            free,
            events,
            counters,
        };
        if engine.can_plan_ahead() {
            engine.time_rounds()?;
        }
        Ok(engine)
    }

    /// One round over all running streams, prompt chunks of the joining ones in the same pass. Empty when idle.
    ///
    /// A stream whose logits are not finite ends with [`Event::Failed`], the others go on. When the pass itself
    /// fails or panics, every running stream ends so, their slots are emptied, and the waiting ones start with the
    /// next step.
    ///
    /// # Errors
    /// None at present: failures are events of the streams that they end.
    pub fn step(&mut self) -> Result<Vec<(StreamId, Event)>> {
        self.end_late();
        self.admit();
        if self.running.is_empty() {
            self.fail_stranded();
        } else {
            let span = tracing::debug_span!("round", streams = self.running.len()).entered();
            self.counters.rounds += 1;
            if let Some(read) = self.guarded(Self::read_long) {
                self.guarded(|engine| engine.round(read));
            }
            drop(span);
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// Runs a part of a round. When it fails or panics, every running stream ends and nothing else is told of it.
    fn guarded<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T>) -> Option<T> {
        let told = self.events.len();
        match contained(|| part(self)) {
            Ok(value) => Some(value),
            Err(error) => {
                self.counters.failed_rounds += 1;
                self.events.truncate(told);
                self.fail_all(&error);
                None
            }
        }
    }

    /// Most tokens of a prompt.
    pub fn max_prompt(&self) -> usize {
        self.limits.context.saturating_sub(1)
    }

    /// Counters since the engine started.
    pub fn stats(&self) -> EngineStats {
        let Counters { rounds, failed_rounds, unseen_rounds, non_finite } = self.counters;
        let mut passes = self.target.pass_counts();
        if let Some(drafter) = &self.drafter {
            passes += drafter.pass_counts();
        }
        EngineStats {
            slots: self.target.slots(),
            free_slots: self.free.len(),
            running: self.running.len(),
            waiting: self.waiting.len(),
            rounds,
            failed_rounds,
            unseen_rounds,
            non_finite,
            cache: self.prefixes.stats(),
            passes,
        }
    }

    /// Sets [`EngineConfig::settle_stages`] from the next round on.
    pub fn settle_stages(&mut self, settle: bool) {
        self.config.settle_stages = settle;
    }

    /// Sets [`EngineConfig::cache_bytes`]; nothing is dropped before the next prefix is saved.
    pub fn set_cache_bytes(&mut self, bytes: usize) {
        self.prefixes.set_budget(bytes);
    }

    /// Waits for the device of what a stage has left, when stages are to be told apart.
    fn settle(&self, left: Option<&Tensor>) -> Result<()> {
        match left.filter(|_| self.config.settle_stages) {
            Some(left) => Ok(left.device().synchronize()?),
            None => Ok(()),
        }
    }

    /// True when a drafter is loaded.
    pub fn has_drafter(&self) -> bool {
        self.limits.drafter
    }
}

/// Runs `work`; a panic in it becomes an error. Whoever calls this gives up what `work` was changing: the streams of a
/// round end and their slots are emptied, a slot that cannot be emptied is not used again.
fn contained<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)");
        Err(Error::Round(format!("a panic: {text}")))
    })
}
