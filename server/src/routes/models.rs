//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::engine_thread::ModelInfo;
use crate::error::ApiError;
use crate::state::AppState;

/// The served model.
pub async fn list(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    let model = state.engine().model()?;
    Ok(Json(json!({"object": "list", "data": [body(model)]})))
}

/// The served model by name.
pub async fn one(State(state): State<AppState>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let model = state.engine().model()?;
    if id == model.name { Ok(Json(body(model))) } else { Err(ApiError::model_not_found(&id, &model.name)) }
}

fn body(model: &ModelInfo) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "canopy",
        "context_len": model.context_len,
        "drafter": model.has_drafter,
    })
}
