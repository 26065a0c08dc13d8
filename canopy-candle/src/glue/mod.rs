//! Row-wise steps as ops.

mod norm;
mod rope;
mod rope_append;
mod swiglu;

pub use norm::{
    NormKind, add_rms_norm, add_rms_norm_to, gated_rms_norm, gated_rms_norm_to, rms_norm, rms_norm_to,
};
pub use rope::{QkNormRope, attn_gate, qk_norm_rope};
pub use rope_append::qk_norm_rope_append;
pub use swiglu::{swiglu, swiglu_to};
