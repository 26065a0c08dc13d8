//! OpenAI-compatible HTTP server over canopy's engine.
//!
//! `config` says what runs, `engine_thread` owns the engine, `queue` decides who gets in, `compiling` makes grammars,
//! `serve` takes connections, `app` is the router, `types` the wire format, `plan` its checks, `reply` the answers.
//! Handlers hold handles and never block.

#![forbid(unsafe_code)]

pub mod app;
pub mod auth;
pub mod compiling;
pub mod config;
pub mod engine_thread;
pub mod error;
pub mod extract;
pub mod observe;
pub mod pair;
pub mod plan;
pub mod queue;
pub mod reasoning;
pub mod reply;
pub mod routes;
pub mod self_check;
pub mod serve;
pub mod shutdown;
pub mod state;
pub mod telemetry;
pub mod types;
