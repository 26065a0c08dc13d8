//! The engine: rounds of draft, build, verify, accept, commit over all running streams.

use std::sync::Arc;

use crate::Result;
use crate::draft::Drafter;
use crate::target::Target;
use crate::tokenizer::Tokenizer;

/// How a stream is decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// One token a round, no drafter.
    Ar,
    /// The drafter's top-1 chain.
    Chain,
    /// A DDTree of `budget` nodes.
    Tree,
    /// Budget and shape chosen from measured round cost and running acceptance; may be 0.
    #[default]
    Auto,
}

/// Speculation of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// How the stream is decoded.
    pub mode: Mode,
    /// Most non-root nodes of a round; `None` takes the mode's default.
    pub budget: Option<usize>,
}

/// Sampling of one request. Temperature 0 is argmax, ties to the lower token id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 or above.
    pub temperature: f32,
    /// In (0, 1].
    pub top_p: f32,
    /// 0 = off.
    pub top_k: usize,
    /// In [0, 1).
    pub min_p: f32,
    /// Keyed by position: the same seed gives the same text in every mode.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 }
    }
}

/// One generation.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Most generated tokens, at least 1.
    pub max_tokens: usize,
    /// Stop strings; the one that completes earliest in the text wins and is cut from it.
    pub stop: Vec<String>,
    /// Tokens that end the generation besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Go on past the model's own stop tokens.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// How the stream is decoded.
    pub speculation: Speculation,
    /// Log-probabilities of this many alternatives per emitted token; `None` = no log-probabilities.
    pub logprobs: Option<usize>,
    /// Report every round's tree and accepted path.
    pub report_rounds: bool,
}

/// Names a submitted request until its `Done` or `Failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// Where an emitted token came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenOrigin {
    /// A drafted node that the target accepted.
    Drafted,
    /// The target's own choice after the accepted path.
    Bonus,
}

/// One emitted token.
#[derive(Clone, Debug, PartialEq)]
pub struct EmittedToken {
    /// Id.
    pub id: u32,
    /// Where it came from.
    pub origin: TokenOrigin,
    /// ln p under the target's own distribution at temperature 1, when log-probabilities were asked for.
    pub logprob: Option<f32>,
    /// The most likely alternatives, best first.
    pub top: Vec<(u32, f32)>,
}

/// One node of a reported tree.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedNode {
    /// Token id.
    pub token: u32,
    /// Parent node, -1 for the root.
    pub parent: i32,
    /// The drafter's probability at this position; 1 for the root.
    pub prob: f32,
}

/// One round as the page shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundReport {
    /// Position of the root.
    pub start: usize,
    /// The tree.
    pub nodes: Vec<ReportedNode>,
    /// Accepted nodes, root first.
    pub path: Vec<usize>,
    /// The token after the path.
    pub bonus: u32,
}

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// max_tokens or the context's end.
    Length,
    /// Cancelled.
    Cancelled,
}

/// Seconds in each stage of a stream's rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// Prompt.
    pub prefill: f64,
    /// Drafter.
    pub draft: f64,
    /// Tree builder.
    pub build: f64,
    /// Target.
    pub verify: f64,
    /// Accept walk and sampling.
    pub accept: f64,
    /// States, caches, features.
    pub commit: f64,
}

/// A stream's counters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamStats {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Emitted tokens, the ending stop token not counted.
    pub completion_tokens: usize,
    /// Decode rounds.
    pub rounds: usize,
    /// Verified nodes, roots included.
    pub nodes: usize,
    /// Sum of accepted path lengths, roots included.
    pub committed: usize,
    /// Seconds from submission to the first token.
    pub first_token: f64,
    /// Seconds from submission to the end.
    pub total: f64,
    /// Seconds per stage.
    pub stages: StageTimes,
}

impl StreamStats {
    /// Mean accepted path length, root included: tokens gained per round.
    pub fn acceptance_length(&self) -> f64 {
        self.committed as f64 / self.rounds.max(1) as f64
    }
}

/// What a step tells about a stream.
#[derive(Debug)]
pub enum Event {
    /// New tokens and the text they complete (whole characters; may be empty while a stop string may be forming).
    Text {
        /// Text.
        text: String,
        /// Tokens.
        tokens: Vec<EmittedToken>,
    },
    /// One round, when asked for.
    Round(RoundReport),
    /// The end.
    Done {
        /// Why.
        reason: FinishReason,
        /// Counters.
        stats: StreamStats,
    },
    /// The end, by an error of this stream alone.
    Failed(crate::Error),
}

/// Limits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Prompt tokens per prefill chunk, at most [`canopy_kernels::DraftTree::MAX_NODES`].
    pub prefill_chunk: usize,
    /// Streams that may wait for a slot.
    pub max_waiting: usize,
    /// Tree budget when a request names none.
    pub default_budget: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { prefill_chunk: 128, max_waiting: 64, default_budget: 16 }
    }
}

/// Runs streams on one target and drafter. Blocking; one thread owns it.
pub struct Engine {
    _private: (),
}

impl Engine {
    /// An engine over a loaded pair.
    pub fn new(
        target: Box<dyn Target>,
        drafter: Option<Box<dyn Drafter>>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self> {
        let _ = (target, drafter, tokenizer, config);
        unimplemented!()
    }

    /// Checks a request and queues it.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<StreamId> {
        let _ = request;
        unimplemented!()
    }

    /// Ends a stream; its slot is free before the next step.
    pub fn cancel(&mut self, stream: StreamId) {
        let _ = stream;
    }

    /// Streams running and waiting.
    pub fn load(&self) -> (usize, usize) {
        unimplemented!()
    }

    /// One round over all running streams (and prefill chunks of the joining ones). Empty when idle.
    pub fn step(&mut self) -> Result<Vec<(StreamId, Event)>> {
        unimplemented!()
    }
}
