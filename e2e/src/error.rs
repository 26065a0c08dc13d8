//! The one error type of this crate.

use std::path::PathBuf;

/// What can go wrong between a model directory and a generated token.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model's or the engine's configuration is missing something or contradicts itself.
    #[error("{what}: {key}: {message}")]
    Config {
        /// Which configuration.
        what: String,
        /// The key.
        key: String,
        /// Expected against got.
        message: String,
    },
    /// A weight file or a tensor in it.
    #[error("{path}: {tensor}: {message}", path = path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Expected against got.
        message: String,
    },
    /// A file that cannot be read.
    #[error("{path}: {cause}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said; part of the message, and so no source of its own.
        cause: std::io::Error,
    },
    /// A model that cannot be had from the hub.
    #[error("{repo}: {message}")]
    Hub {
        /// `owner/name`.
        repo: String,
        /// What went wrong and the way out.
        message: String,
    },
    /// The tokenizer or the chat template.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A request that cannot be served as asked; names the field.
    #[error("{field}: expected {expected}, got {got}")]
    Request {
        /// The request's field.
        field: &'static str,
        /// What would be right.
        expected: String,
        /// What came.
        got: String,
    },
    /// Every slot is taken and the queue is full.
    #[error("the engine is full: {running} running, {waiting} waiting")]
    Full {
        /// Streams in slots.
        running: usize,
        /// Streams in the queue.
        waiting: usize,
    },
    /// A stream's logits or state became NaN or infinite.
    #[error("non-finite values in stream {stream} at position {position}")]
    NonFinite {
        /// Which stream.
        stream: u64,
        /// Token position.
        position: usize,
    },
    /// A stream's constraint and bias leave no token to choose, or its grammar is too much work.
    #[error("no token can be chosen in stream {stream} at position {position}: {message}")]
    NoToken {
        /// Which stream.
        stream: u64,
        /// Token position.
        position: usize,
        /// Why.
        message: String,
    },
    /// A pass over all streams failed; it ends every stream that took part.
    #[error("a round failed: {0}")]
    Round(String),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] canopy_kernels::Error),
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
