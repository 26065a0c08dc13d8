//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;

use crate::error::ApiError;
use crate::extract::Json;
use crate::openai::{self, Prompt};
use crate::reasoning::opens_thinking;
use crate::reply::Shape;
use crate::routes::generate::{Job, generate, limits};
use crate::state::AppState;
use crate::types::ChatRequest;

/// Answers a conversation.
pub async fn chat_completions(
    State(state): State<AppState>,
    Json(body): Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let (messages, plan) = openai::chat(body, &limits(&state)?)?;
    let prompt = state.engine().model()?.tokenizer.chat_prompt(&messages).map_err(|error| {
        ApiError::field("messages", "a conversation that the model's chat template takes", error)
    })?;
    let thinking = opens_thinking(&prompt);
    let job = Job { shape: Shape::Chat, prompt: Prompt::Text(prompt), field: "messages", thinking, plan };
    generate(state, job).await
}
