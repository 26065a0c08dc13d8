//! The product over a model's weights, `y = x W^T`, whose row bits do not depend on the number of rows.
//!
//! `y[r][o] = sum_k x[r][k] * W[o][k]`, k upwards in one chain of fused multiply-adds per [`K_SPAN`] inputs, the
//! spans added in order. (Without fused multiply-add in the CPU, a multiply and an add.)
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | weight | parts of `[out_p, in]` | bf16 or f32 | in | packed once; bf16 stays bf16 in memory |
//! | x | `[rows, in]` | f32 | in | activations |
//! | `outs[p]` | `[rows, out_p]` | f32 | out | one contiguous buffer per part |
//!
//! Invariants:
//! 1. The sum is in exactly that order. (`tests::sums_are_chains_in_input_order`)
//! 2. Within `|in| 2^-23 sum_k |x w|` of the f64 oracle. (`tests::oracle_bound`)
//! 3. A row's bits depend on that row and the weights only: not on the other rows, their number, the threads, the
//!    stacking of parts. (`tests::rows_alone_equal_rows_together`, `tests::parts_equal_separate_weights`,
//!    `tests::threads_do_not_change_bits`)
//! 4. A bf16 weight acts as exactly the f32 of its bits. (`tests::bf16_weights_are_exact`)
//! 5. A NaN or an infinity in a row stays in that row. (`tests::nan_row_stays_alone`)
//!
//! On CUDA (`launch`, bf16 weights and f32 rows) the weight lies in tensor-core order, x is taken as two bf16 parts or rounded to one, and the
//! inputs are cut into spans whose number depends on the weight's shape alone: within `2^-15 sum_k |x w|` of the oracle of the x that was taken,
//! invariants 3 and 5 as here (`tests/gpu/linear.rs`). `linear.cu` runs everywhere; rows rounded to one part go through `linear_sm90a.cu` on
//! compute capability 9.0. Weights may lie there as int8 ([`int8`]): the product is then, bit for bit, the one over the bf16 weights that those
//! stand for.
//!
//! [`rounded`] has the product over weights and inputs of seven bits, for drafts.
//!
//! Limits: at least one part, every width at least 1; zero rows give empty outputs.

#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod cpu;
pub mod int8;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
mod pack;
mod portable;
pub mod random;
pub mod rounded;
#[cfg(test)]
mod tests;
mod tile;

/// Inputs that one chain of multiply-adds covers.
pub const K_SPAN: usize = 1024;
