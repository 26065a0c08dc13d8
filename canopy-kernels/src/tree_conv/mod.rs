//! Room 2: causal depthwise convolution of width 4 over each node's root path, then SiLU.
//!
//! With `r_0` the node's raw row, `r_1` its parent's, `r_2` and `r_3` the next two ancestors', continued past the root by
//! the conv state from its newest row on, and W the taps of channel c,
//!
//! ```text
//! out[c] = silu(W[c][0] r_3[c] + W[c][1] r_2[c] + W[c][2] r_1[c] + W[c][3] r_0[c]),   silu(x) = x / (1 + exp(-x))
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `x` | `[N, C]` | f32 | in | raw rows, before convolution and SiLU |
//! | `weight` | `[C, 4]` | f32 | in | taps; tap 3 is the node itself |
//! | `conv_state` | pool `[slots, 3, C]` | f32 | in; commit: in and out | the last three committed raw rows, oldest first |
//! | `out` | `[N, C]` | f32 | out | one row per node |
//! | `paths` | per sequence | - | in (commit) | the accepted path, from the root down |
//!
//! Commit leaves the last three rows of (old conv state, accepted path's raw rows).
//!
//! Invariants:
//! 1. Within 1e-6 of the float64 oracle, absolute plus relative. (`tests::forward_matches_the_oracle`)
//! 2. Rows come from the parent chain, never from row order. (`tests::siblings_between_parent_and_child_are_skipped`)
//! 3. A node's bits equal its path decoded one row per call, and so does the state that its commit leaves.
//!    (`tests::every_node_equals_its_path_decoded_serially`, `tests::decoding_after_a_rejection_equals_a_fresh_run`)
//! 4. Bits depend neither on later nodes (`tests::a_prefix_of_the_tree_gives_the_same_rows`), nor on the batch or the
//!    slot (`tests::each_tree_alone_has_the_same_bits`), nor on threads (`tests::threads_do_not_change_bits`).
//! 5. A non-finite row reaches the node and its next three generations as float64 says, and no other.
//!    (`tests::a_nonfinite_row_reaches_three_generations_as_float64_says`)
//! 6. A commit copies rows exactly and touches its own slots only. (`tests::commit_equals_the_oracle`)
//! 7. Padding sequences give zeros; nothing is read or written for them.
//!    (`tests::padding_is_zero_and_nothing_moves`)
//! 8. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA a launch may compute the `gates` of the same rows too, with the bits of their own launch.
//!
//! Limits: width 4, no bias, any number of channels.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;
