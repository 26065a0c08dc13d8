//! The router: routes, then what every answer gets.

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use subtle::ConstantTimeEq as _;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument as _;

use crate::error::{ApiError, Cause};
use crate::routes;
use crate::state::AppState;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// The whole service.
pub fn app(state: AppState) -> Router {
    let v1 = Router::new()
        .route("/v1/completions", post(routes::completions::completions))
        .route("/v1/chat/completions", post(routes::chat::chat_completions))
        .route("/v1/models", get(routes::models::list))
        .route("/v1/models/{*id}", get(routes::models::one))
        .route_layer(from_fn_with_state(state.clone(), authorize));
    Router::new()
        .merge(v1)
        .merge(routes::page::routes())
        .route("/health", get(routes::health::health))
        .route("/ready", get(routes::health::ready))
        .route("/metrics", get(routes::metrics::metrics))
        .fallback(async |request: Request| ApiError::not_found(request.uri().path()))
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
        })
        .layer(DefaultBodyLimit::max(state.config().body_limit))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(state.clone(), observe))
        .with_state(state)
}

/// Checks the bearer key where one is set. The scheme word is case-insensitive, the key is not.
async fn authorize(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if let Some(key) = &state.config().api_key {
        let given = request.headers().get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        if !given.is_some_and(|given| bool::from(given.ct_eq(key.as_bytes()))) {
            return ApiError::unauthorized().into_response();
        }
    }
    next.run(request).await
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, key) = value.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then(|| key.trim_ascii_start())
}

/// Gives the request its id and its span, counts and logs the answer.
async fn observe(
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
        state.metrics().request(route, status.as_u16());
        let millis = started.elapsed().as_secs_f64() * 1e3;
        match response.extensions().get::<Cause>() {
            Some(Cause(cause)) if status.is_server_error() => {
                tracing::error!(status = status.as_u16(), millis, cause, "answered");
            }
            Some(Cause(cause)) => tracing::info!(status = status.as_u16(), millis, cause, "answered"),
            None if method == Method::POST => tracing::info!(status = status.as_u16(), millis, "answered"),
            None => tracing::debug!(status = status.as_u16(), millis, "answered"),
        }
        response
    }
    .instrument(span)
    .await
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

fn panicked(cause: Box<dyn std::any::Any + Send>) -> Response {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("a panic");
    ApiError::internal(format!("a handler panicked: {text}")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_word_may_be_in_any_case_and_the_key_may_not() {
        assert_eq!(bearer(b"Bearer AbC"), Some(&b"AbC"[..]));
        assert_eq!(bearer(b"bEARER  AbC"), Some(&b"AbC"[..]));
        assert_eq!(bearer(b"Basic AbC"), None);
        assert_eq!(bearer(b"Bearer"), None);
        assert_ne!(bearer(b"Bearer abc"), Some(&b"AbC"[..]));
    }
}
