//! The integration binary of canopy-e2e.

mod config;
mod golden;
mod hub;
mod logits_cli;
mod support;
mod target;
mod tokenizer;
mod weights;
