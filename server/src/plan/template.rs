//! Variables of the chat template.

use serde_json::{Map, Value};

use super::check::{shown, unsupported};
use crate::error::ApiError;

const THINKING: &str = "enable_thinking";
/// What templates are given anyway.
const GIVEN: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// `chat_template_kwargs` with `enable_thinking`, which has a field of its own too. That the template takes them is checked
/// when there is a template at hand.
pub fn variables(
    kwargs: Option<Map<String, Value>>,
    enable_thinking: Option<bool>,
) -> Result<Map<String, Value>, ApiError> {
    let field = |name: &str| format!("chat_template_kwargs.{name}");
    let mut variables = kwargs.unwrap_or_default();
    variables.retain(|_, value| !value.is_null());
    if let Some(name) = GIVEN.into_iter().find(|&name| variables.contains_key(name)) {
        return Err(unsupported(field(name), "no value", "one"));
    }
    match (variables.get(THINKING), enable_thinking) {
        (None, None) => {}
        (None, Some(on)) => {
            variables.insert(THINKING.to_owned(), on.into());
        }
        (Some(&Value::Bool(one)), other) if other.is_none_or(|other| other == one) => {}
        (Some(one), other) => {
            let expected = other.map_or("true or false".to_owned(), |other| other.to_string());
            return Err(ApiError::field(field(THINKING), expected, shown(one)));
        }
    }
    Ok(variables)
}
