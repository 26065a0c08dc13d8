//! OpenAI-compatible HTTP server over canopy's engine.
//!
//! `config` says what runs, `engine_thread` owns the engine, `queue` decides who gets in, `app` is the router, `types`
//! and `openai` are the wire format and its checks, `reply` the answers. Handlers hold handles and never block.

pub mod app;
pub mod config;
pub mod engine_thread;
pub mod error;
pub mod extract;
pub mod openai;
pub mod pair;
pub mod queue;
pub mod reasoning;
pub mod reply;
pub mod routes;
pub mod shutdown;
pub mod state;
pub mod telemetry;
pub mod types;
