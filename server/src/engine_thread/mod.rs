//! The engine's thread: commands in, updates out.
//!
//! One thread owns the engine and runs it inside its own rayon pool. It never waits for a reader: an update goes into
//! the stream's bounded channel, and a stream whose reader is a full channel behind is ended. A reader that is gone
//! has closed its channel, so its stream is cancelled before the next step.

mod handle;
mod health;
mod runner;

use std::sync::Arc;

use canopy_e2e::constrain::{Compiler, Grammar};
use canopy_e2e::engine::{
    EmittedToken, Engine, EngineStats, Event, FinishReason, GenerateRequest, PromptToken, RoundReport,
    StreamId, StreamStats,
};
use canopy_e2e::tokenizer::Tokenizer;
use tokio::sync::{mpsc, oneshot};

use crate::error::ApiError;
use crate::telemetry::Metrics;
pub use handle::EngineHandle;
pub use health::Health;
use health::StoppedOnDrop;
use runner::Runner;

/// What the thread runs: the engine, or a toy in tests.
pub trait Rounds: Send {
    /// See [`Engine::submit_compiled`].
    fn submit(&mut self, request: GenerateRequest, grammar: Option<Grammar>) -> canopy_e2e::Result<StreamId>;
    /// See [`Engine::cancel`].
    fn cancel(&mut self, stream: StreamId);
    /// See [`Engine::load`].
    fn load(&self) -> (usize, usize);
    /// See [`Engine::stats`].
    fn stats(&self) -> EngineStats {
        let (running, waiting) = self.load();
        EngineStats { running, waiting, ..EngineStats::default() }
    }
    /// See [`Engine::step`].
    fn step(&mut self) -> canopy_e2e::Result<Vec<(StreamId, Event)>>;
}

impl Rounds for Engine {
    fn submit(&mut self, request: GenerateRequest, grammar: Option<Grammar>) -> canopy_e2e::Result<StreamId> {
        Engine::submit_compiled(self, request, grammar)
    }
    fn cancel(&mut self, stream: StreamId) {
        Engine::cancel(self, stream);
    }
    fn load(&self) -> (usize, usize) {
        Engine::load(self)
    }
    fn stats(&self) -> EngineStats {
        Engine::stats(self)
    }
    fn step(&mut self) -> canopy_e2e::Result<Vec<(StreamId, Event)>> {
        Engine::step(self)
    }
}

/// What handlers know of the served model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Name for `/v1/models`.
    pub name: String,
    /// Rows of the logits.
    pub vocab_size: usize,
    /// Tokens of prompt and answer together.
    pub context_len: usize,
    /// Whether a drafter is loaded.
    pub has_drafter: bool,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Compiles constraints for the tokenizer's vocabulary.
    pub grammars: Compiler,
    /// Unix seconds of the load.
    pub created: u64,
    /// What the self-check generated.
    pub self_check: String,
}

/// One step's news of one stream.
#[derive(Debug, Default)]
pub struct Update {
    /// Text that became whole.
    pub text: String,
    /// The prompt's tokens, when their log-probabilities were asked for.
    pub prompt: Vec<PromptToken>,
    /// Emitted tokens.
    pub tokens: Vec<EmittedToken>,
    /// The round, when asked for.
    pub round: Option<RoundReport>,
    /// The end, in a stream's last update.
    pub end: Option<End>,
}

/// How a stream ended.
#[derive(Debug)]
pub enum End {
    /// Whole.
    Done {
        /// Why.
        reason: FinishReason,
        /// Counters.
        stats: StreamStats,
    },
    /// By an error.
    Failed(ApiError),
}

/// Sizes of the thread's channels and pool.
#[derive(Clone, Copy, Debug)]
pub struct ThreadOptions {
    /// Compute threads.
    pub threads: usize,
    /// Updates a stream may be ahead of its reader.
    pub update_buffer: usize,
    /// Commands that may wait.
    pub command_buffer: usize,
}

/// A model that failed to load, or a thread that failed to start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The loader's or the engine's error.
    #[error(transparent)]
    Load(#[from] canopy_e2e::Error),
    /// The compute pool.
    #[error("{0} compute threads could not be started")]
    Pool(usize),
    /// The thread ended while loading.
    #[error("the engine's thread ended while loading the model")]
    Ended,
}

/// Starts the thread. `load` runs on it; the receiver tells how that went.
pub fn spawn(
    load: impl FnOnce() -> canopy_e2e::Result<(Box<dyn Rounds>, ModelInfo)> + Send + 'static,
    options: ThreadOptions,
    metrics: Arc<Metrics>,
) -> std::io::Result<(EngineHandle, oneshot::Receiver<Result<(), StartError>>)> {
    let (commands, inbox) = mpsc::channel(options.command_buffer);
    let (loaded, when_loaded) = oneshot::channel();
    let handle = EngineHandle::new(commands);
    let (model, health) = handle.shared();
    std::thread::Builder::new().name("engine".into()).spawn(move || {
        let _stopped = StoppedOnDrop(Arc::clone(&health));
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|at| format!("compute-{at}"))
            .build();
        let Ok(pool) = pool else {
            let _ = loaded.send(Err(StartError::Pool(options.threads)));
            return;
        };
        pool.install(|| match load() {
            Err(error) => {
                let _ = loaded.send(Err(error.into()));
            }
            Ok((rounds, info)) => {
                let _ = model.set(info);
                health.runs();
                let _ = loaded.send(Ok(()));
                Runner::new(rounds, inbox, health, metrics, options.update_buffer).run();
            }
        });
    })?;
    Ok((handle, when_loaded))
}
