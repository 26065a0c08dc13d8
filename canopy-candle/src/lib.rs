#![doc = include_str!("../README.md")]

mod accept_walk;
mod append;
mod attention;
mod chain_conv;
mod check;
mod conv;
mod conv_commit;
mod conv_forward;
mod conv_gates;
#[cfg(feature = "cuda")]
mod cuda;
mod drafted_tokens;
#[cfg(any(test, feature = "cuda"))]
mod gaps;
mod gates;
mod gdn;
mod gdn_serial;
mod glue;
mod kv;
mod linear;
mod planes;
mod prefill;
mod profile;
mod recorded;
mod slices;
mod top_tokens;
mod tree;
mod wrap;

pub use accept_walk::{AcceptWalk, StatedWalk, accept_walk};
pub use append::{CacheRows, kv_append, kv_append_pair};
pub use attention::{block_attention, tree_attention};
pub use canopy_kernels::accept_walk::{Row as WalkedTree, stated_node, stated_parts};
pub use canopy_kernels::block_attention::cpu::{BlockMask, DraftBlocks};
pub use canopy_kernels::drafted_tokens::source as drafted_source;
pub use canopy_kernels::gdn_prefill::Sequences;
pub use canopy_kernels::top_tokens::Row as TopRow;
pub use canopy_kernels::tree_build::Draft as TreeDraft;
pub use canopy_kernels::tree_gdn::{Solve, Variant};
pub use canopy_kernels::{AcceptedPaths, AttnDims, ConvDims, DraftTree, GdnDims, TreeBatch};
pub use chain_conv::{chain_conv, chain_conv_advance};
pub use conv::{tree_conv, tree_conv_commit, tree_conv_commit_layers, tree_conv_to};
pub use conv_gates::{GateInputs, chain_conv_gates, tree_conv_gates};
pub use drafted_tokens::drafted_tokens;
pub use gates::gates;
pub use gdn::{
    GdnPending, GdnTape, TreeGdnOutput, tree_gdn_commit, tree_gdn_commit_layers, tree_gdn_commit_verify,
    tree_gdn_verify, tree_gdn_verify_into, tree_gdn_verify_to,
};
pub use gdn_serial::{TreeGdnSerialOutput, tree_gdn_serial_commit, tree_gdn_serial_verify};
pub use glue::{
    NormKind, QkNormRope, add_rms_norm, add_rms_norm_to, attn_gate, gated_rms_norm, gated_rms_norm_to,
    qk_norm_rope, qk_norm_rope_append, rms_norm, rms_norm_to, swiglu, swiglu_to,
};
pub use kv::{kv_compact, kv_compact_layers};
pub use linear::PackedLinear;
pub use prefill::{DeviceSequences, gdn_prefill};
pub use profile::{KernelTime, profiled};
pub use recorded::{BuiltTrees, List, PassCounts, PassInputs, Passes, Placed, Ran, widened};
pub use top_tokens::{most_top_tokens, top_tokens};
pub use tree::{DevicePaths, DeviceTree};
