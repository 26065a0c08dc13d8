//! The messages of a conversation.

use serde_json::{Map, Value, json};

use super::check::{closed, missing, neutral, shown};
use crate::error::ApiError;
use crate::types::{ChatMessageBody, Object};

/// Checked messages, as the chat template takes them.
pub fn messages(bodies: Option<Vec<Object<ChatMessageBody>>>) -> Result<Vec<Value>, ApiError> {
    let bodies = bodies.ok_or_else(|| missing("messages"))?;
    if bodies.is_empty() {
        return Err(ApiError::field("messages", "at least one message", "an empty list"));
    }
    bodies.into_iter().enumerate().map(|(at, Object(body))| message(at, body)).collect()
}

fn message(at: usize, body: ChatMessageBody) -> Result<Value, ApiError> {
    const ROLES: &str = "system, developer, user, assistant or tool";
    let field = |name: &str| format!("messages[{at}].{name}");
    let role = match body.role.as_deref() {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some(other) => return Err(ApiError::field(field("role"), ROLES, format!("{other:?}"))),
        None => return Err(missing(field("role"))),
    };
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    neutral(field("refusal"), body.refusal, |_| false, "null")?;
    neutral(field("audio"), body.audio, |_| false, "null")?;
    neutral(field("function_call"), body.function_call, |_| false, "null")?;
    neutral(field("annotations"), body.annotations, empty, "null")?;
    let calls = match body.tool_calls.filter(|calls| !empty(calls)) {
        Some(calls) if role == "assistant" => tool_calls(&field("tool_calls"), calls)?,
        Some(_) => return Err(ApiError::field(field("tool_calls"), "null but of an assistant", "calls")),
        None => Vec::new(),
    };
    if role != "tool" {
        neutral(field("tool_call_id"), body.tool_call_id.clone(), |_| false, "null")?;
    }
    // An assistant that called need not have said anything.
    let content = match body.content {
        None if !calls.is_empty() => String::new(),
        content => self::content(at, content)?,
    };
    let mut message = json!({"role": role, "content": content});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    let texts = [
        ("name", body.name),
        ("reasoning_content", body.reasoning_content),
        ("tool_call_id", body.tool_call_id),
    ];
    for (name, value) in texts {
        if let Some(value) = value {
            message[name] = value.into();
        }
    }
    Ok(message)
}

/// An assistant's calls with their arguments as objects, which is how templates walk them.
fn tool_calls(field: &str, calls: Value) -> Result<Vec<Value>, ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::field(field.to_owned(), "a list of calls", shown(&calls)));
    };
    let one = |(at, call): (usize, Value)| {
        closed(&format!("{field}[{at}]"), Some(&call), &["id", "type", "index", "function"])?;
        closed(&format!("{field}[{at}].function"), call.get("function"), &["name", "arguments"])?;
        // What is left out or null has the default; what has another type is not dropped in silence.
        let text = |name: &str, expected: &str| {
            let pointer = format!("/{}", name.replace('.', "/"));
            match call.pointer(&pointer) {
                None | Some(Value::Null) => Ok(None),
                Some(Value::String(text)) => Ok(Some(text.as_str())),
                Some(other) => Err(ApiError::field(format!("{field}[{at}].{name}"), expected, shown(other))),
            }
        };
        if let Some(index) = call.get("index").filter(|index| !index.is_u64() && !index.is_null()) {
            return Err(ApiError::field(format!("{field}[{at}].index"), "a whole number", shown(index)));
        }
        if let Some(kind) = call.get("type").filter(|kind| *kind != "function" && !kind.is_null()) {
            return Err(ApiError::field(format!("{field}[{at}].type"), "function", shown(kind)));
        }
        let name = text("function.name", "a string")?;
        let name = name.ok_or_else(|| missing(format!("{field}[{at}].function.name")))?;
        let expected = "a JSON object, as text";
        let arguments = text("function.arguments", expected)?.unwrap_or("{}");
        let parsed = serde_json::from_str::<Map<String, Value>>(arguments).map_err(|_| {
            ApiError::field(format!("{field}[{at}].function.arguments"), expected, shown(&arguments.into()))
        })?;
        let id = text("id", "a string")?.unwrap_or_default();
        Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": parsed}}))
    };
    calls.into_iter().enumerate().map(one).collect()
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
        if !part.is_object() {
            return Err(ApiError::field(format!("{field}[{part_at}]"), "a text part", shown(part)));
        }
        if part.get("type").and_then(Value::as_str) != Some("text") {
            let got = part.get("type").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].type"), "text", got));
        }
        closed(&format!("{field}[{part_at}]"), Some(part), &["type", "text"])?;
        let Some(piece) = part.get("text").and_then(Value::as_str) else {
            let got = part.get("text").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].text"), "a string", got));
        };
        text.push_str(piece);
    }
    Ok(text)
}
