//! From the first signal to exit: refuse new generations, let running ones finish, stop listening.

use std::time::Duration;

use crate::error::ApiError;
use crate::state::AppState;

/// What open connections get to take their last bytes once the streams have ended.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// Comes back at Ctrl-C or SIGTERM.
pub async fn signal() {
    let interrupt = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::error!(%error, "Ctrl-C cannot be listened for");
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    let terminate = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(error) => {
                tracing::error!(%error, "SIGTERM cannot be listened for");
                std::future::pending::<()>().await;
            }
        }
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending::<()>();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}

/// Waits for `stop`, then until every stream has ended or the drain timeout is over. New generations are answered 503
/// meanwhile; the listener stays open for that.
pub async fn drained(state: AppState, stop: impl Future<Output = ()>) {
    stop.await;
    state.drain();
    let limit = state.config().drain_timeout;
    tracing::info!(streams = state.queue().in_flight(), "shutting down: running streams finish");
    if tokio::time::timeout(limit, state.queue().idle()).await.is_err() {
        tracing::warn!(streams = state.queue().in_flight(), "the drain timeout is over: streams are ended");
        state.engine().end_all(ApiError::draining()).await;
        let _ = tokio::time::timeout(LAST_BYTES, state.queue().idle()).await;
    }
}
