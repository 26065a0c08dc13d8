//! Model configurations, read from the `config.json` of a checkpoint and checked once.

pub mod draft;
mod table;
pub mod target;

pub use draft::DraftConfig;
pub use table::Table;
pub use target::{LayerKind, TargetConfig};
