//! What every request gets: an id, a span, a line in the log, a count.

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument as _;

use crate::error::Cause;
use crate::routes;
use crate::state::AppState;

/// The header that carries a request's id in and out.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// Gives the request its id and its span, counts and logs the answer.
pub async fn observe(
    State(state): State<AppState>,
    matched: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let id = request_id(&request).unwrap_or_else(|| new_request_id(&state));
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let span = tracing::info_span!("request", request_id = id.to_str().unwrap_or_default(), %method, path);
    async move {
        let started = std::time::Instant::now();
        let mut response = next.run(request).await;
        response.headers_mut().insert(REQUEST_ID, id);
        let route = matched.as_ref().map_or("unmatched", MatchedPath::as_str);
        let status = response.status();
        let seconds = started.elapsed().as_secs_f64();
        state.metrics().request(route, status.as_u16(), seconds);
        log(&response, &method, seconds * 1e3);
        response
    }
    .instrument(span)
    .await
}

fn log(response: &Response, method: &Method, millis: f64) {
    let status = response.status().as_u16();
    match response.extensions().get::<Cause>() {
        Some(Cause(cause)) if response.status().is_server_error() => {
            tracing::error!(status, millis, cause, "answered");
        }
        Some(Cause(cause)) => tracing::info!(status, millis, cause, "answered"),
        None if method == Method::POST => tracing::info!(status, millis, "answered"),
        None => tracing::debug!(status, millis, "answered"),
    }
}

/// The caller's own id, if it is short and printable.
fn request_id(request: &Request) -> Option<HeaderValue> {
    let id = request.headers().get(REQUEST_ID)?;
    let text = id.to_str().ok()?;
    let fit =
        (1..=LONGEST_REQUEST_ID).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    fit.then(|| id.clone())
}

fn new_request_id(state: &AppState) -> HeaderValue {
    HeaderValue::try_from(format!("req-{}", routes::unique(state)))
        .unwrap_or_else(|_| HeaderValue::from_static("req"))
}
