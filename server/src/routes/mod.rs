//! The routes, each with what the OpenAPI document says of it.

pub mod chat;
pub mod completions;
pub mod generate;
pub mod health;
pub mod info;
pub mod metrics;
pub mod models;
pub mod openapi;
pub mod page;
pub mod tokens;

use axum::middleware::from_fn_with_state;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::authorize;
use crate::state::AppState;

/// Every route but the page's: those of `/v1` and their like ask for a key where keys are set.
pub fn table(state: &AppState) -> OpenApiRouter<AppState> {
    keyed().route_layer(from_fn_with_state(state.clone(), authorize)).merge(open())
}

fn keyed() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(completions::completions))
        .routes(routes!(chat::chat_completions))
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(models::one_of_owner))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(info::info))
}

fn open() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::openapi))
}

/// Unix seconds.
pub fn unix_now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Text that no other answer of this or an earlier process has.
pub fn unique(state: &AppState) -> String {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64);
    format!("{nanos:016x}{:08x}", state.next_answer())
}
