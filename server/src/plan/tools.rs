//! `tools` and `tool_choice`.

use canopy_e2e::chat::tool_call_grammar;
use canopy_e2e::engine::Constraint;
use serde_json::Value;

use super::check::{closed, shown, unsupported};
use crate::error::ApiError;
use crate::types::{Object, ToolBody};

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
const CHOICES: &str = r#"none, auto, required or {"type": "function", "function": {"name": ...}}"#;

/// The tools that the model hears of, and what they make of the text.
pub(super) struct ToolUse {
    /// In OpenAI's form; empty when there are none or none may be called.
    pub tools: Vec<Value>,
    /// One call and nothing else, when one is demanded.
    pub constraint: Constraint,
}

pub(super) fn tool_use(
    bodies: Option<Vec<Object<ToolBody>>>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<ToolUse, ApiError> {
    let tools = tools(bodies)?;
    let demanded = match choice {
        None => None,
        Some(Value::String(word)) if word == "auto" => None,
        Some(Value::String(word)) if word == "none" => {
            return Ok(ToolUse { tools: Vec::new(), constraint: Constraint::None });
        }
        Some(Value::String(word)) if word == "required" => Some(None),
        Some(choice @ Value::Object(_)) => match choice.pointer("/function/name").and_then(Value::as_str) {
            Some(name) if choice["type"] == "function" => {
                closed("tool_choice", Some(choice), &["type", "function"])?;
                closed("tool_choice.function", choice.get("function"), &["name"])?;
                Some(Some(name))
            }
            _ => return Err(ApiError::field("tool_choice", CHOICES, shown(choice))),
        },
        Some(other) => return Err(ApiError::field("tool_choice", CHOICES, shown(other))),
    };
    let constraint = match demanded {
        None => Constraint::None,
        Some(name) => match tool_call_grammar(&tools, name) {
            Some(grammar) => Constraint::Grammar(grammar),
            None => {
                let got = name.map_or("no tools".to_owned(), |name| format!("{name:?}"));
                return Err(ApiError::field("tool_choice", "one of the tools", got));
            }
        },
    };
    if parallel == Some(false) && !tools.is_empty() && demanded.is_none() {
        let expected = "true, or a tool_choice that demands one call";
        return Err(unsupported("parallel_tool_calls", expected, false));
    }
    Ok(ToolUse { tools, constraint })
}

/// Checked tools in OpenAI's form.
pub fn tools(bodies: Option<Vec<Object<ToolBody>>>) -> Result<Vec<Value>, ApiError> {
    let bodies = bodies.unwrap_or_default();
    if bodies.len() > MAX_TOOLS {
        return Err(ApiError::field("tools", format!("at most {MAX_TOOLS}"), bodies.len()));
    }
    bodies.iter().enumerate().map(tool).collect()
}

fn tool((at, Object(body)): (usize, &Object<ToolBody>)) -> Result<Value, ApiError> {
    let Object(function) = &body.function;
    let name = &function.name;
    let fits = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if body.kind != "function" {
        return Err(ApiError::field(format!("tools[{at}].type"), "function", format!("{:?}", body.kind)));
    }
    if !fits {
        let expected = "1 to 64 letters, digits, underscores and dashes";
        return Err(ApiError::field(format!("tools[{at}].function.name"), expected, format!("{name:?}")));
    }
    if function.strict == Some(true) {
        return Err(unsupported(format!("tools[{at}].function.strict"), "false or left out", true));
    }
    serde_json::to_value(body).map_err(ApiError::internal)
}
