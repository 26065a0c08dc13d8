//! The messages of a conversation.

use canopy_e2e::tokenizer::ChatMessage;
use serde_json::Value;

use super::check::{missing, neutral, shown};
use crate::error::ApiError;
use crate::types::ChatMessageBody;

/// Checked messages.
pub fn messages(bodies: Option<Vec<ChatMessageBody>>) -> Result<Vec<ChatMessage>, ApiError> {
    let bodies = bodies.ok_or_else(|| missing("messages"))?;
    if bodies.is_empty() {
        return Err(ApiError::field("messages", "at least one message", "an empty list"));
    }
    bodies.into_iter().enumerate().map(|(at, body)| message(at, body)).collect()
}

fn message(at: usize, body: ChatMessageBody) -> Result<ChatMessage, ApiError> {
    let field = |name: &str| format!("messages[{at}].{name}");
    let role = match body.role.as_deref() {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant")) => role,
        Some(other) => {
            let expected = "system, developer, user or assistant";
            return Err(ApiError::field(field("role"), expected, format!("{other:?}")));
        }
        None => return Err(missing(field("role"))),
    };
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let unsupported = [
        ("refusal", body.refusal, false),
        ("audio", body.audio, false),
        ("function_call", body.function_call, false),
        ("tool_call_id", body.tool_call_id.map(Value::from), false),
        ("annotations", body.annotations, true),
        ("tool_calls", body.tool_calls, true),
    ];
    for (name, value, may_be_empty_list) in unsupported {
        neutral(field(name), value, |value| may_be_empty_list && empty(value), "null")?;
    }
    Ok(ChatMessage { role: role.to_owned(), content: content(at, body.content)? })
}

fn content(at: usize, value: Option<Value>) -> Result<String, ApiError> {
    let field = format!("messages[{at}].content");
    let parts = match value {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(ApiError::field(field, "a string or a list of text parts", shown(&other))),
        None => return Err(missing(field)),
    };
    let mut text = String::new();
    for (part_at, part) in parts.iter().enumerate() {
        let Some(part) = part.as_object() else {
            return Err(ApiError::field(format!("{field}[{part_at}]"), "a text part", shown(part)));
        };
        if part.get("type").and_then(Value::as_str) != Some("text") {
            let got = part.get("type").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].type"), "text", got));
        }
        let Some(piece) = part.get("text").and_then(Value::as_str) else {
            let got = part.get("text").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].text"), "a string", got));
        };
        text.push_str(piece);
    }
    Ok(text)
}
