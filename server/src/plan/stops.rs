//! What ends a generation.

use serde_json::Value;

use super::Limits;
use super::check::shown;
use crate::error::ApiError;

/// Most stop strings of a request, and the most bytes of one.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most stop tokens of a request.
const MAX_STOP_TOKENS: usize = 256;

pub(super) fn stops(value: Option<&Value>) -> Result<Vec<String>, ApiError> {
    const EXPECTED: &str = "a string or a list of strings";
    let one = |field: String, value: &Value| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(field, "at least one character", "none"))
        }
        Value::String(text) if text.len() > MAX_STOP_BYTES => {
            let expected = format!("at most {MAX_STOP_BYTES} bytes");
            Err(ApiError::field(field, expected, format!("{} bytes", text.len())))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(ApiError::field(field, EXPECTED, shown(other))),
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() > MAX_STOPS => {
            Err(ApiError::field("stop", format!("at most {MAX_STOPS} strings"), items.len()))
        }
        Some(Value::Array(items)) => {
            items.iter().enumerate().map(|(at, item)| one(format!("stop[{at}]"), item)).collect()
        }
        Some(value) => one("stop".into(), value).map(|stop| vec![stop]),
    }
}

pub(super) fn stop_tokens(ids: Option<&[u32]>, limits: &Limits<'_>) -> Result<Vec<u32>, ApiError> {
    let ids = ids.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        return Err(ApiError::field("stop_token_ids", format!("at most {MAX_STOP_TOKENS} ids"), ids.len()));
    }
    match ids.iter().enumerate().find(|&(_, &id)| id as usize >= limits.vocab_size) {
        Some((at, id)) => {
            let expected = format!("a token id below {}", limits.vocab_size);
            Err(ApiError::field(format!("stop_token_ids[{at}]"), expected, id))
        }
        None => Ok(ids.to_vec()),
    }
}
