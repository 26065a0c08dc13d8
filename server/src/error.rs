//! The one error type of the HTTP layer, answered in OpenAI's shape.

use std::borrow::Cow;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::types::answer::{ErrorBody, ErrorDetail};

/// An answer that is not 2xx. `error_type` strings are part of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable name of the class, `error.type` in the body.
    pub error_type: &'static str,
    /// What is wrong, for a person.
    pub message: String,
    /// The request's field, where there is one.
    pub param: Option<Cow<'static, str>>,
    /// Stable name of the case, where a class has several.
    pub code: Option<&'static str>,
    /// When to come back.
    pub retry_after: Option<Duration>,
    /// The cause, for the log only.
    pub cause: Option<String>,
}

/// The cause of an error answer, carried to the log by the response.
#[derive(Clone, Debug)]
pub struct Cause(pub String);

impl ApiError {
    fn new(status: StatusCode, error_type: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            error_type,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
            cause: None,
        }
    }

    /// 400: the request cannot be understood or served as asked.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 about one field: what would be right and what came.
    pub fn field(
        param: impl Into<Cow<'static, str>>,
        expected: impl AsRef<str>,
        got: impl std::fmt::Display,
    ) -> Self {
        let param = param.into();
        let message = format!("{param}: expected {}, got {got}", expected.as_ref());
        Self { param: Some(param), code: Some("invalid_value"), ..Self::invalid(message) }
    }

    /// 400: the prompt does not fit the context.
    pub fn context_length(param: String, context_len: usize, got: usize) -> Self {
        let expected = format!("at most {} prompt tokens in a context of {context_len}", context_len - 1);
        Self {
            code: Some("context_length_exceeded"),
            ..Self::field(param, expected, format!("{got} tokens"))
        }
    }

    /// 401: no key or a wrong one.
    pub fn unauthorized() -> Self {
        let message = "send the server's key as `Authorization: Bearer KEY`";
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
        }
    }

    /// 404: no such model.
    pub fn model_not_found(asked: &str, served: &str) -> Self {
        let message = format!("model: expected {served:?}, got {asked:?}");
        Self {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404: no such route.
    pub fn not_found(path: &str) -> Self {
        let message = format!("no route {path}");
        Self { code: Some("not_found"), ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message) }
    }

    /// 405: the route has other methods.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("no method {method} on {path}");
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self { code: Some("method_not_allowed"), ..Self::new(status, "invalid_request_error", message) }
    }

    /// 408: the body did not come in time.
    pub fn body_timeout(limit: Duration) -> Self {
        let message = format!("the request body did not come within {} s", limit.as_secs());
        let status = StatusCode::REQUEST_TIMEOUT;
        Self { code: Some("request_timeout"), ..Self::new(status, "invalid_request_error", message) }
    }

    /// 413: the body is larger than the limit.
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        Self { code: Some("body_too_large"), ..Self::new(status, "invalid_request_error", message) }
    }

    /// 415: the body is not declared as JSON.
    pub fn content_type(got: Option<&str>) -> Self {
        let message = format!("content-type: expected application/json, got {}", got.unwrap_or("none"));
        Self {
            param: Some("content-type".into()),
            code: Some("unsupported_media_type"),
            ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
        }
    }

    /// 415: the body is compressed.
    pub fn content_encoding(got: &str) -> Self {
        let message = format!("content-encoding: expected none, got {got:?}");
        Self {
            param: Some("content-encoding".into()),
            code: Some("unsupported_media_type"),
            ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
        }
    }

    /// 400: the path is no text.
    pub fn path(rejection: &PathRejection) -> Self {
        Self { code: Some("invalid_utf8"), ..Self::invalid(format!("the path: {}", rejection.body_text())) }
    }

    /// 400: what the request asks for leaves no token to choose, which shows only while it is generated.
    pub fn no_token(position: usize) -> Self {
        let message = format!(
            "no token can be chosen after position {position} of prompt and answer: expected one that format, grammar and \
             logit_bias allow, found within the limits of a grammar's work, got none"
        );
        Self { code: Some("invalid_value"), ..Self::invalid(message) }
    }

    /// 429: every slot and every waiting place is taken.
    pub fn overloaded(running_and_waiting: usize, retry_after: Duration) -> Self {
        let message = format!("{running_and_waiting} streams are running or waiting; try again later");
        Self {
            code: Some("overloaded"),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded_error", message)
        }
    }

    /// 503: the model is not there yet.
    pub fn loading() -> Self {
        Self {
            code: Some("loading"),
            retry_after: Some(Duration::from_secs(1)),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "the model is being loaded")
        }
    }

    /// 503: the server is going down.
    pub fn draining() -> Self {
        let message = "the server is shutting down; running requests finish, new ones are refused";
        Self {
            code: Some("shutting_down"),
            retry_after: Some(Duration::from_secs(5)),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", message)
        }
    }

    /// 503: the engine's thread ended or does not come back from a step.
    pub fn engine_down(what: &'static str) -> Self {
        let message = format!("the engine {what}");
        Self {
            code: Some("engine_down"),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", message)
        }
    }

    /// 504: the generation took longer than a request may.
    pub fn timed_out() -> Self {
        let message = "the generation took longer than this server gives a request (--request-timeout)";
        Self {
            code: Some("generation_timeout"),
            ..Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message)
        }
    }

    /// 500; the cause goes to the log only.
    pub fn internal(cause: impl std::fmt::Display) -> Self {
        let message = "internal error; the log has the cause under this answer's x-request-id";
        Self {
            code: Some("internal"),
            cause: Some(cause.to_string()),
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    /// The body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                kind: self.error_type,
                param: self.param.as_deref().map(str::to_owned),
                code: self.code,
            },
        }
    }

    /// The same error under the name that the caller's wire format has for the field.
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            if let Some(rest) = self.message.strip_prefix(from) {
                self.message = format!("{to}{rest}");
            }
            self.param = Some(to.to_owned().into());
        }
        self
    }
}

impl From<canopy_e2e::Error> for ApiError {
    fn from(error: canopy_e2e::Error) -> Self {
        match error {
            canopy_e2e::Error::Request { field, expected, got } => Self::field(field, expected, got),
            canopy_e2e::Error::Full { running, waiting } => {
                Self::overloaded(running + waiting, Duration::from_secs(1))
            }
            canopy_e2e::Error::NoToken { position, .. } => {
                Self { cause: Some(error.to_string()), ..Self::no_token(position) }
            }
            other => Self::internal(other),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        let cause = self.cause.unwrap_or(self.message);
        response.extensions_mut().insert(Cause(cause));
        response
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_error_has_openais_shape_and_names_the_field() {
        let body = ApiError::field("top_p", "above 0 and at most 1", 2).body();
        let expected = json!({"error": {
            "message": "top_p: expected above 0 and at most 1, got 2",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }});
        assert_eq!(serde_json::to_value(body).unwrap(), expected);
    }

    #[test]
    fn an_internal_error_keeps_its_cause_out_of_the_body() {
        let response = ApiError::internal("secret path").into_response();
        assert_eq!(response.extensions().get::<Cause>().unwrap().0, "secret path");
        assert!(!format!("{:?}", ApiError::internal("secret path").body()).contains("secret"));
    }

    #[test]
    fn a_refusal_says_when_to_come_back() {
        let response = ApiError::overloaded(3, Duration::from_millis(1200)).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
    }

    #[test]
    fn a_field_takes_the_wire_formats_name() {
        let error = ApiError::field("prompt", "x", "y").renamed("prompt", "messages");
        assert_eq!(
            (error.param.as_deref(), error.message.as_str()),
            (Some("messages"), "messages: expected x, got y")
        );
    }
}
