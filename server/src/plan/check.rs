//! What the checks share.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// A whole number within bounds, or none.
pub(super) fn ranged(
    name: &'static str,
    value: Option<i64>,
    low: i64,
    high: i64,
) -> Result<Option<i64>, ApiError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            let expected =
                if high == i64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
            Err(ApiError::field(name, expected, value))
        }
        value => Ok(value),
    }
}

/// Accepts a field that is left out or has the one value that changes nothing.
pub(super) fn neutral<T: serde::Serialize>(
    name: impl Into<String>,
    value: Option<T>,
    is_neutral: impl FnOnce(&T) -> bool,
    expected: &str,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !is_neutral(&value) => {
            let got = serde_json::to_value(&value).unwrap_or_default();
            let expected = format!("{expected} (nothing else is supported)");
            Err(unsupported(name, expected, shown(&got)))
        }
        _ => Ok(()),
    }
}

/// Accepts a switch that is left out or stands where it changes nothing.
pub(super) fn only(name: &'static str, value: Option<bool>, neutral_value: bool) -> Result<(), ApiError> {
    neutral(name, value, |&value| value == neutral_value, &neutral_value.to_string())
}

/// 400: the value means something that this server does not do.
pub(super) fn unsupported(
    name: impl Into<String>,
    expected: impl AsRef<str>,
    got: impl std::fmt::Display,
) -> ApiError {
    ApiError { code: Some("unsupported_value"), ..ApiError::field(name.into(), expected, got) }
}

/// 400: the field is not known.
pub(super) fn unknown(name: impl Into<String>, expected: impl AsRef<str>) -> ApiError {
    let name = name.into();
    let got = format!("the field {name}");
    ApiError { code: Some("unknown_field"), ..ApiError::field(name, expected, got) }
}

/// Refuses a field of an object that is none of these; what is no object has none.
pub(super) fn closed(name: &str, value: Option<&Value>, known: &[&str]) -> Result<(), ApiError> {
    let mut fields = value.and_then(Value::as_object).into_iter().flat_map(Map::keys);
    match fields.find(|field| !known.contains(&field.as_str())) {
        Some(field) => Err(unknown(format!("{name}.{field}"), known.join(" or "))),
        None => Ok(()),
    }
}

/// 400: the field has to be there.
pub fn missing(field: impl Into<String>) -> ApiError {
    let field = field.into();
    ApiError {
        code: Some("missing_field"),
        param: Some(field.clone().into()),
        ..ApiError::invalid(format!("{field}: a value is needed"))
    }
}

/// A value as an error message shows it.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
