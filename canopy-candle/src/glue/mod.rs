//! Row-wise steps as ops.

mod norm;
mod rope;
mod swiglu;

pub use norm::{NormKind, add_rms_norm, gated_rms_norm, rms_norm};
pub use rope::{QkNormRope, attn_gate, qk_norm_rope};
pub use swiglu::swiglu;
