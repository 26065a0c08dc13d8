//! CPU forward.

use crate::{AcceptedPaths, ConvDims, Result, TreeBatch};

/// `x` raw rows `[N, C]`, `weight` `[C, 4]` (tap 3 = the node itself), `conv_state` pool `[slots, 3, C]` (raw
/// rows, oldest first), `out` `[N, C]`. All f32.
pub fn verify(
    dims: ConvDims,
    batch: &TreeBatch,
    x: &[f32],
    weight: &[f32],
    conv_state: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let _ = (dims, batch, x, weight, conv_state, out);
    unimplemented!()
}

/// Keeps the last three raw rows of (old conv state, accepted path), in place in the pool.
pub fn commit(dims: ConvDims, paths: &AcceptedPaths, x: &[f32], conv_state: &mut [f32]) -> Result<()> {
    let _ = (dims, paths, x, conv_state);
    unimplemented!()
}
