//! `GET /openapi.json`, generated from the wire types and the routes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::http::header;
use axum::response::IntoResponse;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, OpenApi, Ref, RefOr};
use utoipa::{IntoResponses, PartialSchema as _, ToSchema as _};

use super::{keyed, open};
use crate::types::answer::{Answer, ChatDelta, ErrorBody, ErrorDetail};

type Chunk = Answer<ChatDelta>;

const KEY: &str = "bearer";

static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_json().unwrap_or_default());

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "operations",
    responses((status = 200, description = "OpenAPI 3.1", content_type = "application/json", body = Object)))]
pub async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str())
}

/// The document over every route but the page's.
pub fn document() -> OpenApi {
    let (mut keyed, mut open) = (keyed().into_openapi(), open().into_openapi());
    for item in keyed.paths.paths.values_mut() {
        let operations = [item.get.as_mut(), item.post.as_mut()];
        for operation in operations.into_iter().flatten() {
            // A server without keys asks for none.
            let free = SecurityRequirement::default();
            operation.security = Some(vec![free, SecurityRequirement::new(KEY, [""; 0])]);
        }
    }
    open.merge(keyed);
    open.info = InfoBuilder::new()
        .title("canopy")
        .description(Some("OpenAI-compatible HTTP over tree speculative decoding."))
        .version(env!("CARGO_PKG_VERSION"))
        .build();
    // Of several bodies of one answer the routes list only the first one's types.
    let mut schemas = vec![
        (ErrorBody::name(), ErrorBody::schema()),
        (ErrorDetail::name(), ErrorDetail::schema()),
        (Chunk::name(), Chunk::schema()),
    ]
    .into_iter()
    .map(|(name, schema)| (name.into_owned(), schema))
    .collect::<Vec<_>>();
    Chunk::schemas(&mut schemas);
    let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    let components = ComponentsBuilder::from(open.components.take().unwrap_or_default())
        .security_scheme(KEY, bearer)
        .schemas_from_iter(schemas);
    open.components = Some(components.build());
    open
}

/// The answers that are not 2xx.
#[derive(Clone, Copy, Debug)]
pub struct Errors;

impl IntoResponses for Errors {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let errors = [
            (400, "The request cannot be understood or served as asked; `param` names the field."),
            (401, "No key or a wrong one."),
            (404, "Another model than the served one is asked for."),
            (408, "The body did not come in time."),
            (413, "The body is larger than the limit."),
            (415, "The body is not declared as JSON."),
            (429, "Every slot and waiting place is taken; `Retry-After` says when to come back."),
            (500, "Internal; the log has the cause under the answer's `x-request-id`."),
            (503, "Loading, shutting down, or the engine has stopped."),
            (504, "The generation took longer than a request may."),
        ];
        let response = |(status, description): (u16, &str)| {
            let schema = Ref::from_schema_name(ErrorBody::name());
            let content = ContentBuilder::new().schema(Some(schema)).build();
            let response =
                ResponseBuilder::new().description(description).content("application/json", content).build();
            (status.to_string(), RefOr::T(response))
        };
        errors.into_iter().map(response).collect()
    }
}
