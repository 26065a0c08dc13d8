//! Model configurations, read from the `config.json` of a checkpoint and checked once.

mod table;
pub mod target;

pub use table::Table;
pub use target::{LayerKind, TargetConfig};
