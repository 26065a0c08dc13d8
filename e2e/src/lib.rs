//! Qwen3.5 with a DFlash drafter and DDTree draft trees.

pub mod cache;
pub mod chat;
pub mod config;
pub mod constrain;
pub mod device;
pub mod draft;
pub mod embedded;
pub mod engine;
mod error;
pub mod files;
pub mod hub;
pub mod loader;
pub mod model;
pub mod pool;
pub mod sampling;
pub mod target;
pub mod threads;
pub mod tokenizer;
pub mod tree;
pub mod weights;

pub use error::{Error, Result};
