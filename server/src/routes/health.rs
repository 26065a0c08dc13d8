//! `GET /health` (is the process well?) and `GET /ready` (does it take requests?).

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::AppState;

/// 200 unless the engine's thread has ended or is stuck in a step.
pub async fn health(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    state.engine().health().check(state.config().stall_after)?;
    Ok(Json(json!({"status": "ok"})))
}

/// 200 when the model is loaded and the server is not going down.
pub async fn ready(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    state.check_ready()?;
    Ok(Json(json!({"status": "ready"})))
}
