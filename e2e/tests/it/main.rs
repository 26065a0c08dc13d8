//! The integration binary of canopy-e2e.

mod accept;
mod batch;
mod config;
mod ddtree;
mod draft_config;
mod drafter_cli;
mod drafter_golden;
mod drafter_rounds;
mod drafter_streams;
mod embedded;
mod golden;
mod hub;
mod limits;
mod loader;
mod logits_cli;
mod lossless;
mod rollback;
mod stop;
mod support;
mod target;
mod tokenizer;
mod toy;
mod weights;
