//! `POST /tokenize` and `POST /detokenize`.

use axum::extract::State;
use canopy_e2e::chat::ChatInput;

use crate::error::ApiError;
use crate::extract::Json;
use crate::plan::{self, Prompt};
use crate::routes::chat::rendered;
use crate::routes::generate::{encode, limits};
use crate::routes::openapi::Errors;
use crate::state::AppState;
use crate::types::tokens::{DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest};

/// The tokens of a prompt or a conversation.
#[utoipa::path(post, path = "/tokenize", tag = "tokens", request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = TokenizeAnswer), Errors))]
pub async fn tokenize(
    State(state): State<AppState>,
    Json(body): Json<TokenizeRequest>,
) -> Result<axum::Json<TokenizeAnswer>, ApiError> {
    limits(&state)?.check_model(body.model.as_deref())?;
    let model = state.engine().model()?;
    let variables = plan::variables(body.chat_template_kwargs, None)?;
    let tools = plan::tools(body.tools)?;
    let tokens = match (body.prompt, body.messages) {
        (Some(_), None) if !tools.is_empty() => {
            return Err(ApiError::field("tools", "null beside a prompt", "tools"));
        }
        (Some(prompt), None) => encode(&state, Prompt::Text(prompt)).await?,
        (None, Some(messages)) => {
            let messages = plan::messages(Some(messages))?;
            rendered(&state, ChatInput { messages, tools, variables }).await?.tokens
        }
        (None, None) => return Err(plan::missing("prompt")),
        (Some(_), Some(_)) => return Err(ApiError::field("messages", "null beside a prompt", "messages")),
    };
    let token_strs = tokens.iter().map(|&token| model.tokenizer.token_text(token)).collect();
    let count = tokens.len();
    Ok(axum::Json(TokenizeAnswer { tokens, token_strs, count, max_model_len: model.context_len }))
}

/// The text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "tokens", request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = DetokenizeAnswer), Errors))]
pub async fn detokenize(
    State(state): State<AppState>,
    Json(body): Json<DetokenizeRequest>,
) -> Result<axum::Json<DetokenizeAnswer>, ApiError> {
    let limits = limits(&state)?;
    limits.check_model(body.model.as_deref())?;
    let tokens = body.tokens.ok_or_else(|| plan::missing("tokens"))?;
    if let Some(at) = tokens.iter().position(|&token| token as usize >= limits.vocab_size) {
        let expected = format!("a token id below {}", limits.vocab_size);
        return Err(ApiError::field(format!("tokens[{at}]"), expected, tokens[at]));
    }
    let prompt = state.engine().model()?.tokenizer.decode(&tokens)?;
    Ok(axum::Json(DetokenizeAnswer { prompt }))
}
