//! The routes.

pub mod chat;
pub mod completions;
pub mod generate;
pub mod health;
pub mod metrics;
pub mod models;
pub mod page;

use crate::state::AppState;

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
