#![doc = include_str!("../README.md")]
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod accept_walk;
#[cfg(any(feature = "cuda", test))]
mod archs;
mod attend;
mod batch;
pub mod block_attention;
pub mod contract;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dims;
pub mod drafted_tokens;
mod error;
pub mod gates;
pub mod gdn_prefill;
pub mod glue;
pub mod kv_compact;
pub mod linear;
mod math;
mod numeric;
mod team;
#[cfg(test)]
mod test_support;
pub mod top_tokens;
pub mod tree;
pub mod tree_attention;
pub mod tree_build;
pub mod tree_conv;
pub mod tree_gdn;
pub mod tree_gdn_serial;

/// Version of the toolkit that compiled this build's CUDA kernels; `None` without any.
pub const TOOLKIT: Option<&str> = option_env!("CANOPY_TOOLKIT");

pub use batch::{AcceptedPaths, TreeBatch, check_slots};
pub use dims::{AttnDims, ConvDims, GdnDims};
pub use error::{Error, Result};
pub use tree::{AncestorMask, DraftTree, HeavyChains};
