//! `POST /v1/completions`.

use axum::extract::State;
use axum::response::Response;

use crate::error::ApiError;
use crate::extract::Json;
use crate::plan;
use crate::reply::Shape;
use crate::routes::generate::{Job, generate, limits};
use crate::routes::openapi::Errors;
use crate::state::AppState;
use crate::types::CompletionRequest;
use crate::types::answer::{Answer, CompletionChoice};

/// Continues prompts.
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = CompletionRequest,
    responses(
        (status = 200, description = "The texts; with `stream`, server-sent events",
         content((Answer<CompletionChoice> = "application/json"), (String = "text/event-stream"))),
        Errors,
    ))]
pub async fn completions(
    State(state): State<AppState>,
    Json(body): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let (prompts, plan) = plan::completion(body, &limits(&state)?)?;
    let job = Job { shape: Shape::Completion, prompts, thinking: false, tools: Vec::new(), plan };
    generate(state, job).await
}
