//! Room 1: the gated delta rule over a draft tree.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;

pub use select::{Solve, Variant};
mod select;

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
