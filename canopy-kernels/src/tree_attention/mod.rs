//! Room 4: attention of drafted rows over their slot's committed keys, then over their own root-to-row path.
//!
//! With `P = prefix_lens[b]`, node i of sequence b sees the positions `0..P + depths[i] + 1`; position `p < P` lies at
//! pool row p, the path's nodes at pool rows `P + node`. Over those positions and with `D = head_dim`
//!
//! ```text
//! w_p = exp(s_p - max s) / sum exp(s - max s),   s_p = q_i . k_p / sqrt(D),   out_i = sum_p w_p v_p
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `q` | `[N, Hq, D]` | f32 | in | queries, rotary embedding applied |
//! | `k_cache` | pool `[slots, capacity, Hkv, D]` | f32 | in | keys: committed rows, then this round's nodes |
//! | `v_cache` | pool `[slots, capacity, Hkv, D]` | f32 | in | values, laid out the same way |
//! | `prefix_lens` | `[B]` | i32 | in | committed rows of every sequence |
//! | `out` | `[N, Hq, D]` | f32 | out | attention; query head h uses KV head h / (Hq / Hkv) |
//!
//! Invariants:
//! 1. Within 2e-6 of the float64 oracle for values around 1. (`tests::forward_matches_the_oracle`,
//!    `tests::every_tile_edge_matches_the_oracle`, `tests::interleaved_branches_equal_the_softmax_over_the_path`)
//! 2. A row's bits depend on its query and on the sequence of (position, key, value) that it sees only: not on where
//!    committed ends and drafted begins (`tests::any_split_into_committed_and_drafted_has_the_same_bits`), on how many
//!    rows a call has (`tests::plain_decoding_equals_verifying_the_chain`), on later nodes
//!    (`tests::a_prefix_of_the_tree_gives_the_same_rows`), on the order of siblings
//!    (`tests::reordering_siblings_permutes_the_rows`), on the batch and the slot
//!    (`tests::each_tree_alone_has_the_same_bits`, `tests::a_batch_of_7_21_1_and_64_nodes_equals_each_tree_alone`) or on
//!    threads (`tests::threads_do_not_change_bits`).
//! 3. A NaN or an infinity that a row cannot see changes no bit of it.
//!    (`tests::what_a_row_cannot_see_never_reaches_it`)
//! 4. One that it sees gives what float64 gives. (`tests::a_visible_nonfinite_number_does_what_float64_says`,
//!    `tests::a_vanishing_weight_times_infinity_is_float64s`)
//! 5. Padding sequences give zeros, and nothing is read for them. (`tests::padding_is_zero_and_reads_nothing`)
//! 6. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! Limits: any head width and any number of heads that the KV heads divide; `P + nodes <= capacity`.
//!
//! On CUDA (`launch`) `q` and the pools are bf16, `out` is bf16 or f32, `prefix_lens` lies on the device, and heads are 128 or 256 wide.
//! A stream's keys are walked in up to 32 splits of whole tiles; where a split ends follows from the stream's own prefix length and node
//! count, and the splits are added in key order, the paths last. On compute capability 9.0 the last split has the paths, and splits are added
//! in fours first: by one CTA where a batch fills the device, by the merge otherwise, in the same steps. Invariants there (`tests/gpu/attention.rs`):
//! 1. Within `2^-7 sum p |v| / sum p` plus half a bf16 ulp of float64. (`every_tile_edge_is_within_the_bound`,
//!    `every_split_edge_is_within_the_bound`, `served_shapes_are_within_the_bound`)
//! 2. A stream's bits do not depend on its batch, its slot or the tile that a CTA takes. (`a_batch_has_the_bits_of_each_tree_alone`)
//! 3. Invariants 3 and 4 above; outputs that stay finite beside a value that is not keep their bits.
//!    (`what_a_row_cannot_see_never_reaches_it`, `a_visible_value_that_is_not_finite_does_what_float64_says`)
//! 4. Sums are f32. (`sums_over_2100_equal_keys_are_f32`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;
