//! The page at `/`: three embedded files, nothing from elsewhere.

use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::state::AppState;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page's routes.
pub fn routes() -> Router<AppState> {
    let file = |kind: &'static str, text: &'static str| get(async move || embedded(kind, text));
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("../../static/index.html")))
        .route("/page.css", file("text/css; charset=utf-8", include_str!("../../static/page.css")))
        .route("/page.js", file("text/javascript; charset=utf-8", include_str!("../../static/page.js")))
}

fn embedded(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}
