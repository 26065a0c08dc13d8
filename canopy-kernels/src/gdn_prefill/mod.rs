//! The gated delta rule over long prompts: chains of any length, the state advanced in the pool.
//!
//! Every sequence is a chain of packed rows that continues the state in its slot; what is read back at each row goes to `o`, the state after
//! the last row into the slot. No tape is left: a prompt is never rolled back. With S of one value head as `[Dv, Dk]`, k and q
//! L2-normalised (`x / sqrt(x . x + 1e-6)`) and q scaled by `Dk^-1/2`:
//! ```text
//! u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)     S_t = exp(g_t) S_{t-1} + u_t k_t^T     o_t = S_t q_t
//! ```
//! On CUDA in chunks of 64 rows, with g_cum the sum of g from the chunk's first row, S its state before it and j before i:
//! ```text
//! G_ij = beta_i exp(g_cum_i - g_cum_j) (k_i . k_j)      T = (I + G)^-1
//! U    = T (beta (V - exp(g_cum) K S^T))
//! O    = exp(g_cum) Q S^T + C U                         C_ij = exp(g_cum_i - g_cum_j) (q_i . k_j), j up to i
//! S    = exp(g_cum_end) S + (exp(g_cum_end - g_cum) U)^T K
//! ```
//! T and C of all chunks are made side by side by a first launch, T by forward substitution in f32; a second one walks the chunks.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `qkv` | `[N, 2 Hk Dk + Hv Dv]` | f32; CUDA: bf16 | in | q, k, v rows as tree_conv leaves them |
//! | `gates` | `[N, 2, Hv]` | f32 | in | plane 0 = log gate g <= 0, plane 1 = write strength beta |
//! | `state` | `[slots, Hv, Dv, Dk]` | f32 | in and out | the pool of recurrent states |
//! | `o` | `[N, Hv, Dv]` | f32; CUDA also bf16 | out | outputs |
//!
//! Invariants, each with the test that holds it (CUDA: in `tests/gpu/prefill.rs`):
//! 1. f32 within 1e-5 of the oracle: `rows_and_states_are_near_the_oracle`, `nearly_equal_keys_and_vanishing_decays`.
//! 2. On the CPU the bits of serial decoding, that is of `tree_gdn`'s Walk and its commit: `the_bits_of_walk_and_commit`. So a prompt may be cut
//!    anywhere: `a_cut_prompt_has_the_same_bits`. On CUDA it may be cut at multiples of 64 rows; elsewhere results agree within the bound.
//! 3. A row depends on the rows up to it in its own sequence alone, bit for bit; a NaN reaches that row and later ones:
//!    `a_nan_reaches_later_rows_only`. On CUDA a chunk with a row that is not finite is done row by row, and the rows before keep their bits.
//! 4. A sequence's bits depend neither on its batch, nor its slot, nor threads; on CUDA neither on the block nor on how many chunks a launch
//!    takes: `a_batch_equals_each_sequence_alone`.
//! 5. A padding sequence's rows are zero and touch nothing; slots that no sequence names keep every bit: `padding_is_inert`.
//! 6. No exponential of a positive number; a log gate of -inf forgets everything: `nearly_equal_keys_and_vanishing_decays`.
//!
//! Limits: up to [`Sequences::MAX_ROWS`] rows a sequence; any Hk, Hv, Dk, Dv on the CPU, f32 only; on CUDA Dk = Dv = 128 and bf16 rows.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
mod sequences;
#[cfg(test)]
mod tests;

pub use sequences::Sequences;

/// What a call reads, all f32.
#[derive(Clone, Copy, Debug)]
pub struct PrefillInput<'a> {
    /// `[N, 2 Hk Dk + Hv Dv]`: packed rows as tree_conv leaves them.
    pub qkv: &'a [f32],
    /// `[N, 2, Hv]`: log gates and write strengths.
    pub gates: &'a [f32],
}
