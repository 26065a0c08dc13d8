//! The JSON extractor: bad input is answered in OpenAI's shape and names the field.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse as _;
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::state::AppState;
use crate::types::{Object, Unique};

/// A request body parsed as `T`.
#[derive(Clone, Copy, Debug)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let limit = state.config().body_timeout;
        let body = tokio::time::timeout(limit, Bytes::from_request(request, state))
            .await
            .map_err(|_| ApiError::body_timeout(limit))?
            .map_err(|rejection| {
                let response = rejection.into_response();
                match response.status() {
                    StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(state.config().body_limit),
                    _ => ApiError::invalid("the request body could not be read"),
                }
            })?;
        parse(&body).map(Self)
    }
}

/// `application/json` or `application/*+json`, parameters allowed; not compressed.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(coding) = headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity") {
        return Err(ApiError::content_encoding(&String::from_utf8_lossy(coding.as_bytes())));
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Err(ApiError::content_type(None)) };
    let text = value.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let subtype = essence.strip_prefix("application/").unwrap_or_default();
    if subtype == "json" || subtype.ends_with("+json") {
        return Ok(());
    }
    Err(ApiError::content_type(Some(text)))
}

/// Parses a body, which is a JSON object no key of which comes twice; an error is a 400 that names the field where there is
/// one.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| ApiError {
        code: Some("invalid_utf8"),
        ..ApiError::invalid(format!("the request body is not UTF-8 at byte {}", error.valid_up_to()))
    })?;
    let Object(value) = named(text)?;
    // What is read as it comes, such as a schema, keeps the last of two values; without a fault no path is written down.
    if serde_json::from_str::<Unique>(text).is_err() {
        named::<Unique>(text)?;
    }
    Ok(value)
}

/// Parses a text; an error names the field where there is one.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        field_error(path, error.inner())
    })?;
    deserializer.end().map_err(|error| not_json(&error))?;
    Ok(value)
}

fn not_json(error: &serde_json::Error) -> ApiError {
    ApiError {
        code: Some("invalid_json"),
        ..ApiError::invalid(format!("the request body is not valid JSON: {error}"))
    }
}

fn field_error(path: String, error: &serde_json::Error) -> ApiError {
    if !error.is_data() {
        return not_json(error);
    }
    let full = error.to_string();
    let message = in_json_terms(full.rsplit_once(" at line ").map_or(full.as_str(), |(message, _)| message));
    let named = message.split('`').nth(1).unwrap_or_default();
    let parent = path.strip_suffix(named).map_or(path.as_str(), |parent| parent.trim_end_matches('.'));
    let (code, field) = if message.starts_with("unknown field") {
        ("unknown_field", join(parent, named))
    } else if message.starts_with("missing field") {
        ("missing_field", join(&path, named))
    } else if message.starts_with("duplicate field") {
        ("duplicate_field", join(&path, named))
    } else if message.starts_with("unknown variant") {
        ("invalid_value", path)
    } else {
        ("invalid_type", if path == "." { String::new() } else { path })
    };
    if field.is_empty() {
        return ApiError { code: Some(code), ..ApiError::invalid(format!("the request body: {message}")) };
    }
    ApiError {
        code: Some(code),
        param: Some(field.clone().into()),
        ..ApiError::invalid(format!("{field}: {message}"))
    }
}

/// What was expected, as JSON calls it in place of the Rust type.
fn in_json_terms(message: &str) -> String {
    let out_of_range = message.starts_with("invalid value: integer");
    match message.rsplit_once("expected ") {
        Some((before, "i64")) if out_of_range => {
            format!("{before}expected an integer from {} to {}", i64::MIN, i64::MAX)
        }
        Some((before, "u32")) if out_of_range => {
            format!("{before}expected an integer from 0 to {}", u32::MAX)
        }
        Some((before, "i64" | "i32" | "u64" | "u32" | "u16" | "u8" | "usize")) => {
            format!("{before}expected an integer")
        }
        Some((before, "f64" | "f32")) => format!("{before}expected a number"),
        _ => message.to_owned(),
    }
}

fn join(parent: &str, field: &str) -> String {
    if parent.is_empty() || parent == "." { field.to_owned() } else { format!("{parent}.{field}") }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[allow(dead_code)]
        mode: String,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        #[allow(dead_code)]
        count: Option<i64>,
        #[allow(dead_code)]
        inner: Option<Object<Inner>>,
        #[allow(dead_code)]
        any: Option<serde_json::Value>,
    }

    fn error(body: &[u8]) -> (Option<String>, &'static str) {
        let error = parse::<Outer>(body).unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        (error.param.map(|param| param.into_owned()), error.code.unwrap())
    }

    #[test]
    fn every_bad_body_names_its_field() {
        let field = |name: &str| Some(name.to_owned());
        assert_eq!(error(br#"{"count": "x"}"#), (field("count"), "invalid_type"));
        assert_eq!(error(br#"{"count": 1.5}"#), (field("count"), "invalid_type"));
        let large = parse::<Outer>(br#"{"count": 18446744073709551615}"#).unwrap_err().message;
        assert!(large.ends_with("-9223372036854775808 to 9223372036854775807"), "{large}");
        let message = parse::<Outer>(br#"{"count": "x"}"#).unwrap_err().message;
        assert!(message.ends_with("expected an integer"), "{message}");
        assert_eq!(error(br#"{"cuont": 1}"#), (field("cuont"), "unknown_field"));
        assert_eq!(error(br#"{"inner": {"mode": 3}}"#), (field("inner.mode"), "invalid_type"));
        assert_eq!(error(br#"{"inner": {"mode": "a", "x": 3}}"#), (field("inner.x"), "unknown_field"));
        assert_eq!(error(br#"{"inner": {}}"#), (field("inner.mode"), "missing_field"));
        assert_eq!(error(br#"{"inner": 7}"#), (field("inner"), "invalid_type"));
        assert_eq!(error(br#"{"count": 1, "count": 2}"#), (field("count"), "duplicate_field"));
        assert_eq!(
            error(br#"{"inner": {"mode": "a", "mode": "b"}}"#),
            (field("inner.mode"), "duplicate_field")
        );
        assert_eq!(error(br#"{"inner": ["a"]}"#), (field("inner"), "invalid_type"));
        for list in [&b"[]"[..], b"[1, null]", b"[[1], {}]"] {
            assert_eq!(error(list), (None, "invalid_type"));
        }
        assert_eq!(error(b"3"), (None, "invalid_type"));
    }

    #[test]
    fn a_key_that_comes_twice_is_named_however_deep_and_however_written() {
        for (any, name) in [
            (r#"{"a": 1, "a": 1}"#, "any.a"),
            (r#"{"a": {"a": 1, "b": 2, "a": null}}"#, "any.a.a"),
            (r#"[0, {"b": [{"x y": 1, "x\u0020y": 2}]}]"#, "any[1].b[0].x y"),
            (r#"{"": 1, "": 2}"#, "any."),
            (r#"{"a": true, "b": {"c": 1.5, "d": [], "c": {}}, "b": 3}"#, "any.b.c"),
        ] {
            let text = format!(r#"{{"any": {any}}}"#);
            assert_eq!(error(text.as_bytes()), (Some(name.to_owned()), "duplicate_field"), "{text}");
        }
        let once =
            br#"{"any": {"a": {"a": 1}, "b": {"a": 1}, "A": [{"a": 1}, {"a": -1}, null, "a", 1e9, false]}}"#;
        assert!(parse::<Outer>(once).is_ok());
    }

    #[test]
    fn what_is_not_json_or_not_utf8_is_said_so() {
        for body in [&b"{"[..], b"", b"{\"count\": 1} x", b"{\"count\": NaN}", b"{'count': 1}"] {
            assert_eq!(error(body).1, "invalid_json", "{}", String::from_utf8_lossy(body));
        }
        assert_eq!(error(b"{\"count\": \"\xff\"}"), (None, "invalid_utf8"));
    }

    #[test]
    fn the_content_type_is_json() {
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            check_content_type(&headers)
        };
        assert!(check("application/json").is_ok());
        assert!(check("Application/JSON; charset=utf-8").is_ok());
        assert!(check("application/vnd.api+json").is_ok());
        assert_eq!(check("text/plain").unwrap_err().status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert_eq!(
            check_content_type(&HeaderMap::new()).unwrap_err().status,
            StatusCode::UNSUPPORTED_MEDIA_TYPE
        );
    }
}
