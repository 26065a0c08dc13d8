//! The small row-wise steps between the kernels: norms, rotary embedding, gates, SwiGLU.
//!
//! | step | computes |
//! |---|---|
//! | `rms_norm` | `x rsqrt(mean x^2 + eps) f`, `f = weight` or `1 + weight` |
//! | `add_rms_norm` | `sum = x + residual`, `out = rms_norm(sum)` |
//! | `gated_rms_norm` | `rms_norm(o) silu(z)`: norm first, times the weight, then the gate |
//! | `swiglu` | `silu(gate) up` |
//! | `qk_norm_rope` | RMSNorm of every head, then rotate-half over the first `rotary_dim` values |
//! | `attn_gate` | `attn sigmoid(gate)` |
//!
//! All buffers are f32. Rotary angles are the f32 product `position * inv_freq`, as transformers computes them; their
//! cosines and sines are good to an f32's last place at every position below 2^22.
//!
//! On CUDA a warp, or a team of warps that the width alone chooses, owns a row; `kv_append` (rows of keys and values into
//! their pools, rounded to the pool's type) and `qk_norm_rope_append` (both steps in one launch, with their bits) exist there
//! only. The same bound and invariants hold: `tests/gpu/glue.rs`.
//!
//! Invariants:
//! 1. Each step within 4e-7 (relative to the row's largest value) of the f64 oracle; positions up to 262,144.
//!    (`tests::norms_match_the_oracle`, `tests::gates_match_the_oracle`, `tests::rope_matches_the_oracle`)
//! 2. A row's bits depend on that row alone. (`tests::rows_alone_equal_rows_together`)
//! 3. A NaN in a row stays in that row. (`tests::nan_row_stays_alone`)
//! 4. A wrong length is an error that names the argument. (`tests::refusals_name_the_argument`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
mod rotary;
#[cfg(test)]
mod tests;
