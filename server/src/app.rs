//! The router: routes, then what every answer gets.

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::config::Cors;
use crate::error::ApiError;
use crate::observe::{REQUEST_ID, observe};
use crate::routes;
use crate::state::AppState;

/// How long a browser may remember what other sites' pages may ask.
const CORS_MAX_AGE: Duration = Duration::from_secs(3600);

/// The whole service.
pub fn app(state: AppState) -> Router {
    let (documented, _) = routes::table(&state).split_for_parts();
    let router = Router::new()
        .merge(documented)
        .merge(routes::page::routes())
        .fallback(async |request: Request| ApiError::not_found(request.uri().path()))
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
        })
        .layer(DefaultBodyLimit::max(state.config().body_limit))
        .layer(CatchPanicLayer::custom(panicked));
    let router = match cors(&state.config().cors) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(from_fn_with_state(state.clone(), observe)).with_state(state)
}

/// Which other sites' pages may ask; none when no origin is set.
fn cors(cors: &Cors) -> Option<CorsLayer> {
    let origins: AllowOrigin = match cors {
        Cors::Off => return None,
        Cors::Any => Any.into(),
        Cors::Origins(origins) => {
            origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()).collect::<Vec<_>>().into()
        }
    };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE, REQUEST_ID])
        .expose_headers([REQUEST_ID, header::RETRY_AFTER])
        .max_age(CORS_MAX_AGE);
    Some(layer)
}

fn panicked(cause: Box<dyn std::any::Any + Send>) -> Response {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("a panic");
    ApiError::internal(format!("a handler panicked: {text}")).into_response()
}
