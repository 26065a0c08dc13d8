//! The prompt of a completion.

use canopy_e2e::engine::GenerateRequest;
use serde_json::Value;

use super::Limits;
use super::check::{missing, shown};
use crate::error::ApiError;

/// A prompt as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text to encode.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// The plan's request with its prompt, refused when it leaves no room for a token.
pub fn with_prompt(
    mut request: GenerateRequest,
    prompt: Vec<u32>,
    field: &'static str,
    context_len: usize,
) -> Result<GenerateRequest, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(field, "at least one token", "none"));
    }
    if prompt.len() >= context_len {
        return Err(ApiError::context_length(field, context_len, prompt.len()));
    }
    request.max_tokens = request.max_tokens.min(context_len - prompt.len());
    request.prompt = prompt;
    Ok(request)
}

pub(super) fn prompt(value: Option<Value>, limits: &Limits<'_>) -> Result<Prompt, ApiError> {
    const EXPECTED: &str = "a string, a list of one string, or token ids";
    match value {
        Some(Value::String(text)) => non_empty(text, "prompt".into()).map(Prompt::Text),
        Some(Value::Array(mut items)) => match items.first() {
            None => Err(ApiError::field("prompt", EXPECTED, "an empty list")),
            Some(Value::Number(_)) => token_ids("prompt", &items, limits).map(Prompt::Tokens),
            Some(Value::String(_) | Value::Array(_)) if items.len() > 1 => {
                Err(ApiError::field("prompt", "one prompt per request", format!("{} prompts", items.len())))
            }
            Some(Value::String(_) | Value::Array(_)) => match items.remove(0) {
                Value::Array(ids) if !ids.is_empty() => {
                    token_ids("prompt[0]", &ids, limits).map(Prompt::Tokens)
                }
                Value::String(text) => non_empty(text, "prompt[0]".into()).map(Prompt::Text),
                _ => Err(ApiError::field("prompt[0]", EXPECTED, "an empty list")),
            },
            Some(other) => Err(ApiError::field("prompt[0]", EXPECTED, shown(other))),
        },
        Some(other) => Err(ApiError::field("prompt", EXPECTED, shown(&other))),
        None => Err(missing("prompt")),
    }
}

fn non_empty(text: String, field: String) -> Result<String, ApiError> {
    if text.is_empty() {
        Err(ApiError::field(field, "at least one character", "an empty string"))
    } else {
        Ok(text)
    }
}

/// Checked token ids; an error names the one that is wrong.
pub fn token_ids(field: &str, items: &[Value], limits: &Limits<'_>) -> Result<Vec<u32>, ApiError> {
    let id = |(at, item): (usize, &Value)| match item.as_u64() {
        Some(id) if (id as usize) < limits.vocab_size => Ok(id as u32),
        _ => {
            let expected = format!("a token id below {}", limits.vocab_size);
            Err(ApiError::field(format!("{field}[{at}]"), expected, shown(item)))
        }
    };
    items.iter().enumerate().map(id).collect()
}
