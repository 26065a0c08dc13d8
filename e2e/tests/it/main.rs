//! The integration binary of canopy-e2e.

mod config;
mod ddtree;
mod draft_config;
mod drafter_golden;
mod drafter_rounds;
mod drafter_streams;
mod golden;
mod hub;
mod loader;
mod logits_cli;
mod support;
mod target;
mod tokenizer;
mod weights;
