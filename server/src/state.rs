//! What every handler sees: handles only.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::compiling::Compilations;
use crate::config::Config;
use crate::engine_thread::EngineHandle;
use crate::error::ApiError;
use crate::queue::Queue;
use crate::telemetry::Metrics;

/// Shared by all requests; cheap to clone.
#[derive(Clone, Debug)]
pub struct AppState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    engine: EngineHandle,
    queue: Queue,
    compilations: Compilations,
    metrics: Arc<Metrics>,
    draining: AtomicBool,
    answers: AtomicU64,
}

impl AppState {
    /// The state of one server.
    pub fn new(config: Config, engine: EngineHandle, metrics: Arc<Metrics>) -> Self {
        let queue = Queue::new(config.slots, config.max_waiting);
        let (draining, answers) = (AtomicBool::new(false), AtomicU64::new(0));
        let compilations = Compilations::for_this_machine();
        Self(Arc::new(Inner { config, engine, queue, compilations, metrics, draining, answers }))
    }

    /// What the server runs with.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The engine's thread.
    pub fn engine(&self) -> &EngineHandle {
        &self.0.engine
    }

    /// Admission.
    pub fn queue(&self) -> &Queue {
        &self.0.queue
    }

    /// Constraints that are being compiled.
    pub fn compilations(&self) -> &Compilations {
        &self.0.compilations
    }

    /// Counters.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// From now on new generations are answered 503.
    pub fn drain(&self) {
        self.0.draining.store(true, Ordering::Release);
    }

    /// An error while going down, loading, or without a working engine.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        if self.0.draining.load(Ordering::Acquire) {
            return Err(ApiError::draining());
        }
        self.engine().health().check(self.config().stall_after)?;
        self.engine().model().map(drop)
    }

    /// A number that no other answer of this process has.
    pub fn next_answer(&self) -> u64 {
        self.0.answers.fetch_add(1, Ordering::Relaxed)
    }
}
