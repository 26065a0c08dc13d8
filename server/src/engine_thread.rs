//! The engine's thread: commands in, updates out.
//!
//! One thread owns the engine and runs it inside its own rayon pool. It never waits for a reader: an update goes into
//! the stream's bounded channel, and a stream whose reader is a full channel behind is ended. A reader that is gone
//! has closed its channel, so its stream is cancelled before the next step.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use canopy_e2e::engine::{
    EmittedToken, Engine, Event, FinishReason, GenerateRequest, PromptToken, RoundReport, StreamId,
    StreamStats,
};
use canopy_e2e::tokenizer::Tokenizer;
use tokio::sync::{mpsc, oneshot};

use crate::error::ApiError;
use crate::queue::Permit;
use crate::telemetry::Metrics;

/// What the thread runs: the engine, or a toy in tests.
pub trait Rounds: Send {
    /// See [`Engine::submit`].
    fn submit(&mut self, request: GenerateRequest) -> canopy_e2e::Result<StreamId>;
    /// See [`Engine::cancel`].
    fn cancel(&mut self, stream: StreamId);
    /// See [`Engine::load`].
    fn load(&self) -> (usize, usize);
    /// See [`Engine::step`].
    fn step(&mut self) -> canopy_e2e::Result<Vec<(StreamId, Event)>>;
}

impl Rounds for Engine {
    fn submit(&mut self, request: GenerateRequest) -> canopy_e2e::Result<StreamId> {
        Engine::submit(self, request)
    }
    fn cancel(&mut self, stream: StreamId) {
        Engine::cancel(self, stream);
    }
    fn load(&self) -> (usize, usize) {
        Engine::load(self)
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
    /// Unix seconds of the load.
    pub created: u64,
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

struct Submit {
    request: GenerateRequest,
    permit: Permit,
    reply: oneshot::Sender<Result<mpsc::Receiver<Update>, ApiError>>,
}

enum Command {
    Submit(Box<Submit>),
    EndAll(ApiError),
}

/// Where the thread stands, readable without it.
#[derive(Debug)]
pub struct Health {
    state: AtomicU8,
    born: Instant,
    /// Milliseconds from `born` to the start of the step in progress; 0 between steps.
    step_started: AtomicU64,
}

const LOADING: u8 = 0;
const RUNNING: u8 = 1;
const STOPPED: u8 = 2;

impl Health {
    /// An error when the thread has ended or a step takes longer than `stall_after`.
    pub fn check(&self, stall_after: Duration) -> Result<(), ApiError> {
        if self.state.load(Ordering::Acquire) == STOPPED {
            return Err(ApiError::engine_down("has stopped"));
        }
        let started = self.step_started.load(Ordering::Relaxed);
        if started > 0 && self.born.elapsed() > Duration::from_millis(started) + stall_after {
            return Err(ApiError::engine_down("does not come back from a step"));
        }
        Ok(())
    }

    fn step_starts(&self) {
        let now = self.born.elapsed().as_millis() as u64;
        self.step_started.store(now.max(1), Ordering::Relaxed);
    }

    fn step_ends(&self) {
        self.step_started.store(0, Ordering::Relaxed);
    }
}

/// Talks to the engine's thread. The thread ends when the last handle is gone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    model: Arc<OnceLock<ModelInfo>>,
    health: Arc<Health>,
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
    let health = Arc::new(Health {
        state: AtomicU8::new(LOADING),
        born: Instant::now(),
        step_started: AtomicU64::new(0),
    });
    let handle = EngineHandle { commands, model: Arc::default(), health };
    let (model, health) = (Arc::clone(&handle.model), Arc::clone(&handle.health));
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
                health.state.store(RUNNING, Ordering::Release);
                let _ = loaded.send(Ok(()));
                Runner {
                    rounds,
                    inbox,
                    health,
                    metrics,
                    streams: HashMap::new(),
                    buffer: options.update_buffer,
                }
                .run();
            }
        });
    })?;
    Ok((handle, when_loaded))
}

struct StoppedOnDrop(Arc<Health>);

impl Drop for StoppedOnDrop {
    fn drop(&mut self) {
        self.0.state.store(STOPPED, Ordering::Release);
    }
}

impl EngineHandle {
    /// The served model, or 503 while it is being loaded.
    pub fn model(&self) -> Result<&ModelInfo, ApiError> {
        self.model.get().ok_or_else(ApiError::loading)
    }

    /// Where the thread stands.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Hands a request to the engine; an error of the request comes back before any update.
    pub async fn submit(
        &self,
        request: GenerateRequest,
        permit: Permit,
    ) -> Result<mpsc::Receiver<Update>, ApiError> {
        let (reply, answer) = oneshot::channel();
        let stopped = || ApiError::engine_down("has stopped");
        let command = Command::Submit(Box::new(Submit { request, permit, reply }));
        self.commands.send(command).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Ends every stream with `error`.
    pub async fn end_all(&self, error: ApiError) {
        // A closed channel means that the thread, and with it every stream, has ended.
        let _ = self.commands.send(Command::EndAll(error)).await;
    }
}

struct Stream {
    updates: mpsc::Sender<Update>,
    decoding: bool,
    permit: Permit,
}

impl Stream {
    /// Gives the place back, then the last update, so that whoever reads the end finds the place free.
    fn end(self, last: Update) {
        drop(self.permit);
        // A reader that left or fell behind sees its channel end.
        let _ = self.updates.try_send(last);
    }
}

struct Runner {
    rounds: Box<dyn Rounds>,
    inbox: mpsc::Receiver<Command>,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    streams: HashMap<StreamId, Stream>,
    buffer: usize,
}

impl Runner {
    fn run(mut self) {
        while self.take_commands() {
            self.cancel_abandoned();
            self.report_load();
            if !self.streams.is_empty() && !self.step() {
                break;
            }
        }
    }

    /// Waits for a command when idle, takes all that wait otherwise. False when every handle is gone.
    fn take_commands(&mut self) -> bool {
        if self.streams.is_empty() {
            match self.inbox.blocking_recv() {
                Some(command) => self.obey(command),
                None => return false,
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submit) => self.submit(*submit),
            Command::EndAll(error) => {
                let streams: Vec<StreamId> = self.streams.keys().copied().collect();
                streams.into_iter().for_each(|stream| self.rounds.cancel(stream));
                self.fail_all(&error);
            }
        }
    }

    fn submit(&mut self, submit: Submit) {
        let Submit { request, permit, reply } = submit;
        if reply.is_closed() {
            return;
        }
        let answer = match self.rounds.submit(request) {
            Err(error) => {
                drop(permit);
                Err(error.into())
            }
            Ok(stream) => {
                let (updates, receiver) = mpsc::channel(self.buffer);
                self.streams.insert(stream, Stream { updates, decoding: false, permit });
                Ok(receiver)
            }
        };
        // When the caller is gone the receiver is dropped here, and the stream is cancelled before the next step.
        let _ = reply.send(answer);
        self.report_load();
    }

    fn cancel_abandoned(&mut self) {
        let rounds = &mut self.rounds;
        let metrics = &self.metrics;
        self.streams.retain(|&id, stream| {
            let abandoned = stream.updates.is_closed();
            if abandoned {
                rounds.cancel(id);
                metrics.cancelled();
            }
            !abandoned
        });
    }

    /// One step and its news. False after a panic: nothing is known about the engine then.
    fn step(&mut self) -> bool {
        self.health.step_starts();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.rounds.step()));
        self.health.step_ends();
        match outcome {
            Ok(Ok(events)) => self.deliver(events),
            Ok(Err(error)) => {
                tracing::error!(%error, "a step failed; its streams are ended");
                let streams: Vec<StreamId> = self.streams.keys().copied().collect();
                streams.into_iter().for_each(|stream| self.rounds.cancel(stream));
                self.fail_all(&ApiError::internal(error));
            }
            Err(_) => {
                tracing::error!("a step panicked; the engine has stopped");
                self.fail_all(&ApiError::internal("a step panicked"));
                return false;
            }
        }
        true
    }

    fn deliver(&mut self, events: Vec<(StreamId, Event)>) {
        self.report_load();
        if events.is_empty() && self.rounds.load() == (0, 0) {
            self.fail_all(&ApiError::internal("the engine lost its streams"));
            return;
        }
        let mut updates: BTreeMap<StreamId, Update> = BTreeMap::new();
        for (stream, event) in events {
            let update = updates.entry(stream).or_default();
            match event {
                Event::Text { text, tokens } => {
                    update.text.push_str(&text);
                    update.tokens.extend(tokens);
                }
                Event::Prompt(tokens) => update.prompt = tokens,
                Event::Round(round) => update.round = Some(round),
                Event::Done { reason, stats } => {
                    self.metrics.stream_done(reason, &stats);
                    update.end = Some(End::Done { reason, stats });
                }
                Event::Failed(error) => {
                    tracing::error!(%error, stream = stream.0, "a stream failed");
                    self.metrics.stream_failed();
                    update.end = Some(End::Failed(error.into()));
                }
            }
        }
        for (stream, update) in updates {
            self.send(stream, update);
        }
    }

    fn send(&mut self, id: StreamId, update: Update) {
        self.metrics.tokens(&update.tokens);
        if update.end.is_some() {
            if let Some(stream) = self.streams.remove(&id) {
                stream.end(update);
            }
            return;
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.decoding && !update.tokens.is_empty() {
            self.metrics.acceptance_length(update.tokens.len());
        }
        stream.decoding |= !update.tokens.is_empty();
        if stream.updates.try_send(update).is_err() {
            self.rounds.cancel(id);
            self.metrics.cancelled();
            self.streams.remove(&id);
        }
    }

    fn fail_all(&mut self, error: &ApiError) {
        for (_, stream) in self.streams.drain() {
            stream.end(Update { end: Some(End::Failed(error.clone())), ..Update::default() });
            self.metrics.stream_failed();
        }
    }

    fn report_load(&self) {
        let (running, waiting) = self.rounds.load();
        self.metrics.load(running, waiting);
    }
}
