//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;
use canopy_e2e::engine::Reasoning;

use crate::error::ApiError;
use crate::extract::Json;
use crate::plan::{self, ChatPlan, Prompt};
use crate::reasoning::{END, opens_thinking};
use crate::reply::Shape;
use crate::routes::generate::{Job, generate, limits};
use crate::routes::openapi::Errors;
use crate::state::AppState;
use crate::types::ChatRequest;
use crate::types::answer::{Answer, ChatChoice, ChatDelta};

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer; with `stream`, server-sent events of chunks",
         content((Answer<ChatChoice> = "application/json"), (Answer<ChatDelta> = "text/event-stream"))),
        Errors,
    ))]
pub async fn chat_completions(
    State(state): State<AppState>,
    Json(body): Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let ChatPlan { messages, variables, thinking_budget, mut plan } = plan::chat(body, &limits(&state)?)?;
    let tokenizer = &state.engine().model()?.tokenizer;
    let prompt = tokenizer.chat_prompt_with(&messages, &variables).map_err(|error| {
        ApiError::field("messages", "a conversation that the model's chat template takes", error)
    })?;
    let thinking = opens_thinking(&prompt);
    // Without a budget only a constraint has to know where the thought ends.
    if thinking && (thinking_budget.is_some() || plan.request.constraint != Default::default()) {
        plan.request.reasoning = Some(Reasoning { end: tokenizer.encode(END)?, budget: thinking_budget });
    }
    let job = Job { shape: Shape::Chat, prompt: Prompt::Text(prompt), field: "messages", thinking, plan };
    generate(state, job).await
}
