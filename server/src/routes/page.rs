//! The page: the files of `server/static`, which `web/` builds, embedded in the binary. Nothing from elsewhere.

use axum::Router;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

use crate::error::ApiError;
use crate::state::AppState;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The build of `web/`; CI holds it against a fresh one.
#[derive(rust_embed::Embed)]
#[folder = "static/"]
struct Built;

/// The page's routes.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/", get(async |headers: HeaderMap| file("index.html", &headers)))
        .route("/post.html", get(async |headers: HeaderMap| file("post.html", &headers)))
        .route("/assets/{*path}", get(in_folder("assets")))
        .route("/results/{*path}", get(in_folder("results")))
}

/// A file's name as it stands in the path.
type Named = Result<Path<String>, PathRejection>;

fn in_folder(
    folder: &'static str,
) -> impl Fn(Named, HeaderMap) -> std::future::Ready<Response> + Clone + Send + 'static {
    move |path: Named, headers| {
        std::future::ready(match path {
            Ok(Path(path)) => file(&format!("{folder}/{path}"), &headers),
            Err(rejection) => ApiError::path(&rejection).into_response(),
        })
    }
}

/// One embedded file, or 304 for a reader who has it.
fn file(path: &str, request: &HeaderMap) -> Response {
    let Some(found) = Built::get(path) else {
        return ApiError::not_found(&format!("/{path}")).into_response();
    };
    let tag: String = found.metadata.sha256_hash()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let tag = format!("\"{tag}\"");
    // The names under assets/ change with their contents.
    let cache = if path.starts_with("assets/") { "public, max-age=31536000, immutable" } else { "no-cache" };
    let headers: [(HeaderName, &str); 6] = [
        (header::CONTENT_TYPE, content_type(path)),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, cache),
        (header::ETAG, &tag),
    ];
    let known = request.get(header::IF_NONE_MATCH).is_some_and(|given| given.as_bytes() == tag.as_bytes());
    if known {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, found.data.into_owned()).into_response()
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}
