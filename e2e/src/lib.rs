//! Qwen3.5 with a DFlash drafter and DDTree draft trees, verified through Gated DeltaNet layers by canopy.
//!
//! A round of a stream is draft, build, verify, accept, commit:
//! [`draft::Drafter::draft`] proposes a block of tokens after the root, [`tree`] turns its logits into a
//! [`DraftTree`](canopy_kernels::DraftTree), [`target::Target::verify`] runs the tree through the model and changes
//! no state, the [`engine`] walks down the nodes that the target itself would have chosen, and
//! [`target::Target::commit`] advances the recurrent states, convolution states, keys and values along that path. On
//! the CPU the text is byte for byte that of one token a round.
//!
//! Start reading at [`model`] for the model, at [`engine`] for the rounds, at [`loader`] for files.
//!
//! ```
//! use canopy_e2e::engine::{Engine, EngineConfig, GenerateRequest};
//! use canopy_e2e::loader::{LoadOptions, load};
//!
//! let pair = load(&LoadOptions::default())?; // the embedded pair; no download
//! let prompt = pair.tokenizer.encode("def fibonacci(n):")?;
//! let mut engine = Engine::new(pair.target, pair.drafter, pair.tokenizer, EngineConfig::default())?;
//! let generation = engine.run(GenerateRequest::new(prompt, 32))?;
//! assert!(generation.text.contains("Fibonacci"));
//! # Ok::<(), canopy_e2e::Error>(())
//! ```

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
pub mod sizes;
pub mod stdout;
pub mod target;
pub mod threads;
pub mod tokenizer;
pub mod tree;
pub mod usage;
pub mod weights;

pub use error::{Error, Result};
