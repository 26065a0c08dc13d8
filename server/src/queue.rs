//! Admission: one permit per stream that runs or waits; without one the answer is 429.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Weight of the newest stream in the running mean of stream durations.
const NEWEST: f64 = 0.2;

/// Counts the streams that run or wait.
#[derive(Clone, Debug)]
pub struct Queue {
    permits: Arc<Semaphore>,
    capacity: u32,
    slots: usize,
    mean_seconds: Arc<Mutex<Option<f64>>>,
    refused: Arc<AtomicU64>,
}

/// A place in the queue, held until the stream's end.
#[derive(Debug)]
pub struct Permit {
    _permit: OwnedSemaphorePermit,
    since: Instant,
    mean_seconds: Arc<Mutex<Option<f64>>>,
}

impl Queue {
    /// A queue for `slots` running and `max_waiting` waiting streams.
    pub fn new(slots: usize, max_waiting: usize) -> Self {
        let capacity = u32::try_from(slots + max_waiting).unwrap_or(u32::MAX >> 4);
        Self {
            permits: Arc::new(Semaphore::new(capacity as usize)),
            capacity,
            slots,
            mean_seconds: Arc::default(),
            refused: Arc::default(),
        }
    }

    /// A place, or 429 with the time after which one is likely free.
    pub fn admit(&self) -> Result<Permit, ApiError> {
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => Ok(self.permit(permit)),
            Err(_) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Err(ApiError::overloaded(self.in_flight(), self.retry_after()))
            }
        }
    }

    /// `places` places or none.
    pub fn admit_all(&self, places: usize) -> Result<Vec<Permit>, ApiError> {
        (0..places).map(|_| self.admit()).collect()
    }

    /// Streams that fit, running and waiting.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    fn permit(&self, permit: OwnedSemaphorePermit) -> Permit {
        Permit { _permit: permit, since: Instant::now(), mean_seconds: Arc::clone(&self.mean_seconds) }
    }

    /// Streams that run or wait.
    pub fn in_flight(&self) -> usize {
        self.capacity as usize - self.permits.available_permits()
    }

    /// Requests answered 429.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Comes back when no stream runs or waits.
    pub async fn idle(&self) {
        // The semaphore is never closed, so the only way out is having every permit.
        let _ = self.permits.acquire_many(self.capacity).await;
    }

    /// The mean time until one of the slots is free.
    fn retry_after(&self) -> Duration {
        let mean = self.mean_seconds.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or(1.0);
        Duration::from_secs_f64((mean / self.slots as f64).clamp(1.0, 60.0))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let seconds = self.since.elapsed().as_secs_f64();
        let mut mean = self.mean_seconds.lock().unwrap_or_else(PoisonError::into_inner);
        *mean = Some(mean.map_or(seconds, |mean| mean + NEWEST * (seconds - mean)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stream_too_many_is_refused_until_one_ends() {
        let queue = Queue::new(1, 1);
        let first = queue.admit().unwrap();
        let _second = queue.admit().unwrap();
        let refusal = queue.admit().unwrap_err();
        assert_eq!(refusal.status, axum::http::StatusCode::TOO_MANY_REQUESTS);
        assert!(refusal.retry_after.unwrap() >= Duration::from_secs(1));
        assert_eq!((queue.in_flight(), queue.refused()), (2, 1));
        drop(first);
        assert!(queue.admit().is_ok());
    }

    #[tokio::test]
    async fn idle_waits_for_the_last_stream() {
        let queue = Queue::new(1, 0);
        let permit = queue.admit().unwrap();
        let waiting = tokio::spawn({
            let queue = queue.clone();
            async move { queue.idle().await }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        drop(permit);
        tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap();
    }
}
