//! Room 6: after a round, the accepted rows move to the front of the appended window of a KV pool, in place.
//!
//! With P the sequence's prefix length and `p_0 = 0, p_1, ...` its accepted path,
//!
//! ```text
//! cache[slot][P + j] = cache[slot][P + p_j]   for j = 0, 1, 2, ... in this order
//! ```
//!
//! A parent comes before its child, so `p_j >= j`: no row is overwritten before it has moved.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `cache` | pool `[slots, capacity, width]` | any `Copy` | in and out | keys or values; width = Hkv D |
//! | `prefix_lens` | `[B]` | i32 | in | committed rows before this round |
//! | `paths` | per sequence | - | in | the accepted path, from the root down |
//!
//! Invariants:
//! 1. The result is a gather from an untouched copy, in every slot and row.
//!    (`tests::rows_move_as_if_gathered_from_a_copy`, `tests::overlapping_moves_lose_no_row`)
//! 2. A row after the accepted path attends over the keys that serial decoding would have left.
//!    (`tests::attention_after_a_compaction_equals_serial_decoding`)
//! 3. Padding sequences move nothing. (`tests::padding_moves_nothing`)
//! 4. A wrong argument is an error that names it, and nothing has moved.
//!    (`tests::refusals_name_the_argument_and_move_nothing`)
//!
//! Limits: `P + nodes <= capacity`.
//!
//! On CUDA (`launch`) one launch moves the rows of all pools, up to 64 of them; rows are whole 16-byte words.
//! (`tests/gpu/block.rs`: `rows_move_in_every_pool_as_if_gathered_from_a_copy`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;
