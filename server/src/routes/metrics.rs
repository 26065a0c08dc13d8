//! `GET /metrics`, Prometheus text.

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use crate::state::AppState;

/// The counters.
pub async fn metrics(State(state): State<AppState>) -> impl IntoResponse {
    let text = state.metrics().render(state.queue().in_flight());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}
