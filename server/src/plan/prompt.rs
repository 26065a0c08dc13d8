//! The prompts of a completion.

use std::borrow::Cow;

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
    field: &str,
    context_len: usize,
) -> Result<GenerateRequest, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(field.to_owned(), "at least one token", "none"));
    }
    if prompt.len() >= context_len {
        return Err(ApiError::context_length(field.to_owned(), context_len, prompt.len()));
    }
    request.max_tokens = request.max_tokens.min(context_len - prompt.len());
    request.prompt = prompt;
    Ok(request)
}

/// A completion's prompts, at least one, each with the name that it has in the request.
pub type PromptList = Vec<(Cow<'static, str>, Prompt)>;

const EXPECTED: &str = "a string, token ids, or a list of either";

pub(super) fn prompts(value: Option<Value>, limits: &Limits<'_>) -> Result<PromptList, ApiError> {
    match value {
        Some(Value::String(text)) => Ok(vec![("prompt".into(), non_empty(text, "prompt")?)]),
        Some(Value::Array(items)) => match items.first() {
            None => Err(ApiError::field("prompt", EXPECTED, "an empty list")),
            Some(Value::Number(_)) => {
                Ok(vec![("prompt".into(), Prompt::Tokens(token_ids("prompt", &items, limits)?))])
            }
            Some(_) => items.into_iter().enumerate().map(|item| listed(item, limits)).collect(),
        },
        Some(other) => Err(ApiError::field("prompt", EXPECTED, shown(&other))),
        None => Err(missing("prompt")),
    }
}

/// A prompt that is an item of a list.
fn listed((at, item): (usize, Value), limits: &Limits<'_>) -> Result<(Cow<'static, str>, Prompt), ApiError> {
    let field = format!("prompt[{at}]");
    let prompt = match item {
        Value::String(text) => non_empty(text, &field)?,
        Value::Array(ids) if !ids.is_empty() => Prompt::Tokens(token_ids(&field, &ids, limits)?),
        other => return Err(ApiError::field(field, "a string or token ids", shown(&other))),
    };
    Ok((field.into(), prompt))
}

fn non_empty(text: String, field: &str) -> Result<Prompt, ApiError> {
    if text.is_empty() {
        return Err(ApiError::field(field.to_owned(), "at least one character", "an empty string"));
    }
    Ok(Prompt::Text(text))
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
