//! Room 1: the gated delta rule over a draft tree.
//!
//! Every node continues the recurrent state of its parent; the root continues the committed state S0. With S of
//! one value head as `[Dv, Dk]`, k and q L2-normalised (`x / sqrt(x . x + 1e-6)`) and q scaled by `Dk^-1/2`:
//! ```text
//! u_i = beta_i (v_i - exp(g_i) S_parent k_i)
//! S_i = exp(g_i) S_parent + u_i k_i^T
//! o_i = S_i q_i = exp(g_i) S_parent q_i + u_i (k_i . q_i)
//! ```
//! In closed form, with g_cum the sum of g from the root, and j over strict ancestors (over the path in C and S):
//! ```text
//! G_ij = beta_i exp(g_cum_i - g_cum_j) (k_i . k_j)      R_i = beta_i (v_i - exp(g_cum_i) S0 k_i)
//! (I + G) U = R
//! C_ij = exp(g_cum_i - g_cum_j) (q_i . k_j)             O   = exp(g_cum) S0 Q + C U
//! S_a  = exp(g_cum_a) S0 + sum_j exp(g_cum_a - g_cum_j) u_j k_j^T
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `qkv` | `[N, 2 Hk Dk + Hv Dv]` | f32 | in | q, k, v rows as tree_conv leaves them |
//! | `gates` | `[N, 2, Hv]` | f32 | in | plane 0 = log gate g <= 0, plane 1 = write strength beta |
//! | `state` | `[slots, Hv, Dv, Dk]` | f32 | verify: in, commit: in and out | the pool of recurrent states |
//! | `o` | `[N, Hv, Dv]` | f32 | out | outputs |
//! | `u` | `[N, Hv, Dv]` | f32 | out (tape) | pseudo-values: what each node writes |
//! | `g_cum` | `[N, Hv]` | f32 | out (tape) | cumulative log gate |
//!
//! Invariants, each with the test that holds it:
//! 1. Closed form = oracle in float64 for every solve, commit included, and `G^(depth + 1)` is exactly 0:
//!    `thousand_trees`.
//! 2. f32 within 1e-5 of the oracle: `thousand_trees`, `nearly_equal_keys`, `gates_of_one_and_alternating_gates`.
//!    The series solves (Neumann, Squaring) lose nearly equal keys: `series_solves_lose_nearly_equal_keys`.
//! 3. Walk's outputs and states have the bits of serial decoding, one token per round:
//!    `walk_equals_serial_decoding_bit_for_bit`.
//! 4. Forward, Blocked, Level and Chains agree bit for bit: `substitutions_agree_bit_for_bit`.
//! 5. A node's bits depend on its ancestors alone: `a_node_depends_on_its_ancestors_only`,
//!    `reordering_siblings_permutes_outputs`, `a_prefix_of_the_tree_gives_the_same_outputs`. A zero coefficient never
//!    multiplies another branch's value: `nonfinite_values_reach_exactly_the_descendants`.
//! 6. A sequence's bits depend neither on its batch nor on its slot: `a_batch_equals_each_tree_alone`; nor on the
//!    number of threads: `threads_change_no_bit`.
//! 7. Verify reads the pool only: `a_second_tree_equals_a_fresh_run`. Commit writes its own slots only:
//!    `commit_of_any_path_is_the_serial_state`.
//! 8. A padding sequence's rows are zero and touch nothing: `padding_is_inert`.
//! 9. No exponential of a positive number: decays come from sums of g along the path, below the node that is decayed.
//!    `vanishing_decays_stay_finite`.
//!
//! On CUDA: `launch` (split design, f32 throughout; commit), `series` (the same under every solve: forward substitution, the explicit inverse
//! once per value head, Neumann, squaring; for comparison), `fused` (one launch, bf16 rows, alone or with the commit of the round before;
//! f32 or bf16 outputs), `blocked` (one launch, bf16 rows and outputs, dense blocks on tensor cores whatever the depth), and for chains the
//! walk of `tree_gdn_serial`. [`dispatch`] chooses; tests are in `tests/gpu`. The fused design solves under a [`Plan`], which counts the nodes
//! of a tree of more than 32 depth first whatever the order of their rows; inputs, outputs and tape stay in rows' order in every design, and
//! only `blocked` has bits that depend on it.
//!
//! Limits: up to 256 nodes per tree, any number of sequences, any Hk, Hv, Dk, Dv; on the CPU f32 only; on CUDA Dk = Dv = 128.

#[cfg(feature = "cuda")]
pub mod blocked;
pub mod cpu;
pub mod dispatch;
#[cfg(feature = "cuda")]
pub mod fused;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
mod plan;
mod select;
#[cfg(feature = "cuda")]
pub mod series;
#[cfg(test)]
mod tests;

pub use plan::{Plan, Schedule};
pub use select::{Solve, Variant};

/// What verify reads. All f32; `qkv` is `[N, 2 Hk Dk + Hv Dv]`, `gates` `[N, 2, Hv]` (plane 0 = g, plane 1 =
/// beta), `state` the pool `[slots, Hv, Dv, Dk]`.
#[derive(Clone, Copy, Debug)]
pub struct VerifyInput<'a> {
    /// Packed rows as tree_conv leaves them.
    pub qkv: &'a [f32],
    /// Log gates and write strengths.
    pub gates: &'a [f32],
    /// The state pool, read only.
    pub state: &'a [f32],
}

/// What verify writes: `o`, `u` `[N, Hv, Dv]`, `g_cum` `[N, Hv]`, all f32.
#[derive(Debug)]
pub struct VerifyOutput<'a> {
    /// Outputs.
    pub o: &'a mut [f32],
    /// Pseudo-values.
    pub u: &'a mut [f32],
    /// Cumulative log gate from the root.
    pub g_cum: &'a mut [f32],
}

/// What commit reads: verify's inputs and its tape.
#[derive(Clone, Copy, Debug)]
pub struct Tape<'a> {
    /// The rows that verify read.
    pub qkv: &'a [f32],
    /// The gates that verify read.
    pub gates: &'a [f32],
    /// Pseudo-values that verify wrote.
    pub u: &'a [f32],
    /// Cumulative log gate that verify wrote.
    pub g_cum: &'a [f32],
}
