//! Connections: accept, bound, time out, close.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::app::app;
use crate::shutdown::drained;
use crate::state::AppState;

/// What open connections get to take their last bytes once the streams have ended.
const LAST_BYTES: Duration = Duration::from_secs(5);
/// Bytes of a request's head; more is answered 431.
const LARGEST_HEAD: usize = 64 * 1024;
/// Wait after an accept that failed for want of files or memory.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Serves until `stop` and the drain after it. Connections that do not close by themselves are dropped.
///
/// HTTP/1.1; a proxy in front speaks TLS and newer versions.
pub async fn serve(
    listener: TcpListener,
    state: AppState,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = app(state.clone());
    let open = Arc::new(Semaphore::new(state.config().max_connections));
    let graceful = GracefulShutdown::new();
    let mut when_drained = std::pin::pin!(drained(state.clone(), stop));
    loop {
        let accepted = async {
            let place = Arc::clone(&open).acquire_owned().await;
            (place, listener.accept().await)
        };
        tokio::select! {
            () = &mut when_drained => break,
            (place, accepted) = accepted => match accepted {
                Ok((socket, _)) => {
                    let connection = graceful.watch(connection(socket, router.clone(), &state));
                    let counted = state.metrics().connection();
                    tokio::spawn(async move {
                        // A connection's own error is the peer's: a reset, a bad or late head.
                        if let Err(error) = connection.await {
                            tracing::debug!(%error, "a connection ended");
                        }
                        drop((place, counted));
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            },
        }
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_BYTES, graceful.shutdown()).await;
    Ok(())
}

type Service = TowerToHyperService<Router>;

fn connection(
    socket: TcpStream,
    router: Router,
    state: &AppState,
) -> http1::Connection<TokioIo<TcpStream>, Service> {
    // A socket that refuses the option still works, only slower.
    let _ = socket.set_nodelay(true);
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(state.config().header_timeout)
        .max_buf_size(LARGEST_HEAD)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router))
}
