//! `POST /v1/completions`.

use axum::extract::State;
use axum::response::Response;

use crate::error::ApiError;
use crate::extract::Json;
use crate::openai;
use crate::reply::Shape;
use crate::routes::generate::{Job, generate, limits};
use crate::state::AppState;
use crate::types::CompletionRequest;

/// Continues a prompt.
pub async fn completions(
    State(state): State<AppState>,
    Json(body): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let (prompt, plan) = openai::completion(body, &limits(&state)?)?;
    generate(state, Job { shape: Shape::Completion, prompt, field: "prompt", thinking: false, plan }).await
}
