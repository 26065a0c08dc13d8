//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::engine_thread::ModelInfo;
use crate::error::ApiError;
use crate::routes::openapi::Errors;
use crate::state::AppState;

/// The served models: one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The model.
    pub data: Vec<Model>,
}

/// A served model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Model {
    /// Its name in requests.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Unix seconds of the load.
    pub created: u64,
    /// `canopy`.
    pub owned_by: &'static str,
    /// Tokens of prompt and answer together.
    pub context_len: usize,
    /// Whether a drafter is loaded.
    pub drafter: bool,
}

/// The served model.
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses(
    (status = 200, description = "One model", body = ModelList), Errors))]
pub async fn list(State(state): State<AppState>) -> Result<Json<ModelList>, ApiError> {
    Ok(Json(ModelList { object: "list", data: vec![body(state.engine().model()?)] }))
}

/// The served model by name.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai",
    params(("id" = String, Path, description = "Name")),
    responses((status = 200, description = "The model", body = Model), Errors))]
pub async fn one(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::path(&rejection))?;
    find(&state, &id)
}

/// The served model by the name that it has on the hub.
#[utoipa::path(get, path = "/v1/models/{owner}/{name}", tag = "openai",
    params(("owner" = String, Path, description = "Owner"), ("name" = String, Path, description = "Name")),
    responses((status = 200, description = "The model", body = Model), Errors))]
pub async fn one_of_owner(
    State(state): State<AppState>,
    name: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path((owner, name)) = name.map_err(|rejection| ApiError::path(&rejection))?;
    find(&state, &format!("{owner}/{name}"))
}

fn find(state: &AppState, id: &str) -> Result<Json<Model>, ApiError> {
    let model = state.engine().model()?;
    if id == model.name { Ok(Json(body(model))) } else { Err(ApiError::model_not_found(id, &model.name)) }
}

fn body(model: &ModelInfo) -> Model {
    Model {
        id: model.name.clone(),
        object: "model",
        created: model.created,
        owned_by: "canopy",
        context_len: model.context_len,
        drafter: model.has_drafter,
    }
}
