//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;
use canopy_e2e::chat::{ChatInput, ChatPrompt};
use canopy_e2e::engine::{Constraint, Reasoning};

use crate::error::ApiError;
use crate::extract::Json;
use crate::plan::{self, ChatPlan, Prompt};
use crate::reasoning::END;
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
    let ChatPlan { input, thinking_budget, mut plan } = plan::chat(body, &limits(&state)?)?;
    let tools = input.tools.clone();
    let ChatPrompt { tokens, save_at, thinking, .. } = rendered(&state, input).await?;
    plan.request.save_at = save_at;
    // Without a budget only a constraint has to know where the thought ends.
    if thinking && (thinking_budget.is_some() || plan.request.constraint != Constraint::None) {
        let end = state.engine().model()?.tokenizer.encode(END)?;
        plan.request.reasoning = Some(Reasoning { end, budget: thinking_budget });
    }
    let prompts = vec![("messages".into(), Prompt::Tokens(tokens))];
    let job = Job { shape: Shape::Chat, prompts, thinking, tools, plan };
    generate(state, job).await
}

/// A conversation through the model's template, off the async threads. Variables that the template does not take are refused,
/// but for `enable_thinking`, which clients send to every model.
pub async fn rendered(state: &AppState, input: ChatInput) -> Result<ChatPrompt, ApiError> {
    let tokenizer = state.engine().model()?.tokenizer.clone();
    let unknown = |name: &&String| *name != "enable_thinking" && !tokenizer.template_takes(name);
    if let Some(name) = input.variables.keys().find(unknown) {
        return Err(ApiError {
            code: Some("unknown_field"),
            ..ApiError::field(
                format!("chat_template_kwargs.{name}"),
                "a variable that the model's chat template takes",
                "another",
            )
        });
    }
    let prompt = tokio::task::spawn_blocking(move || tokenizer.chat(&input)).await;
    prompt.map_err(ApiError::internal)?.map_err(|error| {
        ApiError::field("messages", "a conversation that the model's chat template takes", error)
    })
}
