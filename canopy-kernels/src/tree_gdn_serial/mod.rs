//! The baseline of room 1: node by node, every node's whole state kept.
//!
//! What serving engines do today for a tree through a Gated DeltaNet layer: each node loads its parent's state from
//! a snapshot buffer, applies the gated delta rule (see [`crate::tree_gdn`]) and stores its own. It costs one state
//! read and one state write per node, and memory for `N` states; it is here to be measured against.
//! ```text
//! u_i = beta_i (v_i - exp(g_i) S_parent k_i)     S_i = exp(g_i) S_parent + u_i k_i^T     o_i = S_i q_i
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `qkv` | `[N, 2 Hk Dk + Hv Dv]` | f32 | in | q, k, v rows as tree_conv leaves them |
//! | `gates` | `[N, 2, Hv]` | f32 | in | plane 0 = log gate g <= 0, plane 1 = write strength beta |
//! | `state` | `[slots, Hv, Dv, Dk]` | f32 | verify: in, commit: out | the pool of recurrent states |
//! | `o` | `[N, Hv, Dv]` | f32 | out | outputs |
//! | `snapshots` | `[N, Hv, Dv, Dk]` | f32 | verify: out, commit: in | every node's state |
//!
//! Invariants, each with the test that holds it:
//! 1. f32 within 1e-5 of the oracle of room 1, outputs and every node's state: `every_node_is_near_the_oracle`.
//! 2. The bits of `tree_gdn`'s Walk, so that the two differ in nothing but where states live:
//!    `serial_has_the_bits_of_walk`.
//! 3. NaN in one branch stays there: `nan_stays_in_its_branch`.
//! 4. A padding sequence's outputs and snapshots are zero and touch nothing: `padding_is_inert`.
//! 5. Verify reads the pool only; commit writes its own slots only: `commit_copies_one_snapshot`.
//!
//! On CUDA (`launch`, tests in `tests/gpu/serial.rs`) rows are f32 or bf16 and a padding sequence's snapshots are left as they are. A second
//! form walks chains with the state in registers: no snapshots, the tape of room 1 instead, and on demand the last state in the pool. Both
//! forms give the same bits.
//!
//! Limits: up to 256 nodes per tree; on the CPU f32 only; on CUDA Dk = Dv = 128. The truth is room 1's: [`crate::tree_gdn::oracle`].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
#[cfg(test)]
mod tests;

/// What verify reads, all f32.
#[derive(Clone, Copy, Debug)]
pub struct SerialInput<'a> {
    /// `[N, 2 Hk Dk + Hv Dv]`: packed rows as tree_conv leaves them.
    pub qkv: &'a [f32],
    /// `[N, 2, Hv]`: log gates and write strengths.
    pub gates: &'a [f32],
    /// `[slots, Hv, Dv, Dk]`: the state pool, read only.
    pub state: &'a [f32],
}

/// What verify writes, all f32.
#[derive(Debug)]
pub struct SerialOutput<'a> {
    /// `[N, Hv, Dv]`: outputs.
    pub o: &'a mut [f32],
    /// `[N, Hv, Dv, Dk]`: every node's state.
    pub snapshots: &'a mut [f32],
}
