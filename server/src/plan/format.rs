//! `response_format` and `grammar`: what the text must look like.

use canopy_e2e::engine::Constraint;
use serde_json::{Map, Value};

use super::check::{closed, missing, shown, unknown};
use crate::error::ApiError;

/// Longest grammar and longest schema, in bytes.
const LONGEST: usize = 64 * 1024;
const FORMATS: &str = "text, json_object or json_schema";

pub(super) fn constraint(format: Option<&Value>, grammar: Option<&str>) -> Result<Constraint, ApiError> {
    let constraint = match format {
        None => Constraint::None,
        Some(format) => response_format(format)?,
    };
    match (constraint, grammar) {
        (constraint, None) => Ok(constraint),
        (_, Some("")) => Err(ApiError::field("grammar", "a grammar", "an empty string")),
        (_, Some(grammar)) if grammar.len() > LONGEST => {
            let expected = format!("at most {LONGEST} bytes");
            Err(ApiError::field("grammar", expected, format!("{} bytes", grammar.len())))
        }
        (Constraint::None, Some(grammar)) => Ok(Constraint::Grammar(grammar.to_owned())),
        (_, Some(_)) => Err(ApiError::field("grammar", "null with a response_format", "a grammar")),
    }
}

fn response_format(format: &Value) -> Result<Constraint, ApiError> {
    let Value::Object(fields) = format else {
        return Err(ApiError::field("response_format", r#"{"type": ...}"#, shown(format)));
    };
    let kind = fields.get("type").ok_or_else(|| missing("response_format.type"))?;
    let allowed: &[&str] = if kind == "json_schema" { &["type", "json_schema"] } else { &["type"] };
    closed("response_format", Some(format), allowed)?;
    match kind.as_str() {
        Some("text") => Ok(Constraint::None),
        Some("json_object") => Ok(Constraint::JsonObject),
        Some("json_schema") => json_schema(fields),
        _ => Err(ApiError::field("response_format.type", FORMATS, shown(kind))),
    }
}

fn json_schema(format: &Map<String, Value>) -> Result<Constraint, ApiError> {
    const FIELD: &str = "response_format.json_schema";
    let value = format.get("json_schema").ok_or_else(|| missing(FIELD))?;
    let Value::Object(fields) = value else {
        return Err(ApiError::field(FIELD, r#"{"name", "schema"}"#, shown(value)));
    };
    for (name, value) in fields {
        let (expected, holds) = match name.as_str() {
            "name" | "description" => ("a string", value.is_string() || value.is_null()),
            "strict" => ("true or false", value.is_boolean() || value.is_null()),
            "schema" => ("a JSON Schema", value.is_object()),
            _ => {
                return Err(unknown(format!("{FIELD}.{name}"), "name, description, schema or strict"));
            }
        };
        if !holds {
            return Err(ApiError::field(format!("{FIELD}.{name}"), expected, shown(value)));
        }
    }
    let schema = fields.get("schema").ok_or_else(|| missing(format!("{FIELD}.schema")))?;
    let bytes = schema.to_string().len();
    if bytes > LONGEST {
        let expected = format!("at most {LONGEST} bytes");
        return Err(ApiError::field(format!("{FIELD}.schema"), expected, format!("{bytes} bytes")));
    }
    Ok(Constraint::JsonSchema(schema.clone()))
}
