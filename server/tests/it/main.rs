//! The server's integration tests.

mod bad_input; // every bad input: the status, the field named, the next request works
mod compiling; // constraints that take long to compile
mod connections; // late heads, floods, silence, deadlines
mod fuzz; // bodies that nobody would write
mod http; // routes, answers, headers, keys: no socket
mod known_failures; // kinds of failure of other servers, the engine over a scripted target
mod openai_fields; // every parameter of OpenAI's and others': honoured, refused by name, or without effect
mod openapi; // the document lists every route
mod overload; // 429, 413, drain, slow readers, a failing engine
mod pair; // the embedded pair behind the real routes
mod process; // the built binary: start-up errors, signals, faults
mod sse; // real sockets: chunks, disconnects
mod support; // a toy engine, a server on a free port, a plain HTTP client

/// The engine's own toy target and drafter, shared with canopy-e2e's tests.
#[allow(dead_code)]
#[path = "../../../e2e/tests/it/toy.rs"]
mod scripted;
