//! Where the engine's thread stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::ApiError;

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

impl Default for Health {
    fn default() -> Self {
        Self { state: AtomicU8::new(LOADING), born: Instant::now(), step_started: AtomicU64::new(0) }
    }
}

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

    pub(super) fn runs(&self) {
        self.state.store(RUNNING, Ordering::Release);
    }

    pub(super) fn step_starts(&self) {
        let now = self.born.elapsed().as_millis() as u64;
        self.step_started.store(now.max(1), Ordering::Relaxed);
    }

    pub(super) fn step_ends(&self) {
        self.step_started.store(0, Ordering::Relaxed);
    }
}

/// Marks the thread as ended, however it ends.
pub(super) struct StoppedOnDrop(pub Arc<Health>);

impl Drop for StoppedOnDrop {
    fn drop(&mut self) {
        self.0.state.store(STOPPED, Ordering::Release);
    }
}
