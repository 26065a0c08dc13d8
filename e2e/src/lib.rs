//! Qwen3.5 with a DFlash drafter and DDTree draft trees.

pub mod draft;
pub mod engine;
mod error;
pub mod loader;
pub mod model;
pub mod target;
pub mod tokenizer;
pub mod tree;

pub use error::{Error, Result};
