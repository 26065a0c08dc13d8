//! Room 5: attention of the DFlash drafter's blocks, each row over its stream's context and then the block itself.
//!
//! Row i of sequence b is at position `t = context_lens[b] + i`; position p lies at pool row p, the block's own keys right
//! after the context. The row sees the positions p of `0..context_lens[b] + block_size` for which
//!
//! ```text
//! |t - p| < window   (with a window; the row itself counts)     and     p <= t   (with a causal mask)
//! ```
//!
//! and over those, with `D = head_dim`, it computes
//!
//! ```text
//! w_p = exp(s_p - max s) / sum exp(s - max s),   s_p = q_i . k_p / sqrt(D),   out_i = sum_p w_p v_p
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `q` | `[B block_size, Hq, D]` | f32 | in | queries, rotary embedding applied |
//! | `k_cache` | pool `[slots, capacity, Hkv, D]` | f32 | in | keys: context rows, then the block's |
//! | `v_cache` | pool `[slots, capacity, Hkv, D]` | f32 | in | values, laid out the same way |
//! | `slots` | `[B]` | i32 | in | pool slot of every block, -1 = padding |
//! | `context_lens` | `[B]` | i32 | in | context rows of every block |
//! | `window`, `causal` | - | - | in | the mask; a window without `causal` reaches as far ahead as back |
//! | `out` | `[B block_size, Hq, D]` | f32 | out | attention; query head h uses KV head h / (Hq / Hkv) |
//!
//! Invariants:
//! 1. Within 2e-6 of the float64 oracle for values around 1. (`tests::forward_matches_the_oracle`)
//! 2. A row's bits depend on its query and on the sequence of (position, key, value) that it sees only: not on where a
//!    causal block starts (`tests::a_causal_block_may_start_anywhere`), on the other blocks or the slot
//!    (`tests::each_block_alone_has_the_same_bits`), on a window that hides nothing
//!    (`tests::a_window_over_everything_is_no_window`) or on threads (`tests::threads_do_not_change_bits`). A causal block
//!    has the bits of a chain in tree_attention. (`tests::a_causal_block_equals_the_chain_of_tree_attention`)
//! 3. The window ends exactly at its distance, on both sides. (`tests::the_window_ends_where_it_says`)
//! 4. A NaN or an infinity in a hidden key or value changes no bit of the row. (`tests::hidden_keys_never_reach_a_row`)
//! 5. One that the row sees gives what float64 gives. (`tests::a_visible_nonfinite_number_does_what_float64_says`)
//! 6. Padding sequences give zeros, and nothing is read for them. (`tests::padding_is_zero_and_reads_nothing`)
//! 7. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! Limits: any head width and any number of heads that the KV heads divide; `context + block_size <= capacity`. Blocks
//! may share a slot: nothing is written.
//!
//! On CUDA (`launch`) the kernels, types and bound are those of tree_attention; the block's keys belong to the splits. Blocks have up to
//! 256 rows. (`tests/gpu/block.rs`: `every_mask_is_within_the_bound`, `hidden_keys_never_reach_a_row`,
//! `a_batch_has_the_bits_of_each_block_alone`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;
