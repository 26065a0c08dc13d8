//! `GET /health` (is the process well?) and `GET /ready` (does it take requests?).

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::AppState;
use crate::types::answer::ErrorBody;

/// How the server is.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Status {
    /// `ok` or `ready`.
    pub status: &'static str,
}

/// 200 unless the engine's thread has ended or is stuck in a step.
#[utoipa::path(get, path = "/health", tag = "operations", responses(
    (status = 200, description = "The process is well", body = Status),
    (status = 503, description = "The engine has stopped or is stuck: restart the process", body = ErrorBody)))]
pub async fn health(State(state): State<AppState>) -> Result<Json<Status>, ApiError> {
    state.engine().health().check(state.config().stall_after)?;
    Ok(Json(Status { status: "ok" }))
}

/// 200 when the model is loaded and checked and the server is not going down.
#[utoipa::path(get, path = "/ready", tag = "operations", responses(
    (status = 200, description = "Requests are taken", body = Status),
    (status = 503, description = "Loading, going down, or not well", body = ErrorBody)))]
pub async fn ready(State(state): State<AppState>) -> Result<Json<Status>, ApiError> {
    state.check_ready()?;
    Ok(Json(Status { status: "ready" }))
}
