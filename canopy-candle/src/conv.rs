//! tree_conv as ops.

use candle_core::{Result, Tensor};

use crate::{DevicePaths, DeviceTree};

/// `x` `[N, C]`, `weight` `[C, 4]`, `conv_state` pool `[slots, 3, C]` -> `[N, C]` in x's dtype.
pub fn tree_conv(tree: &DeviceTree, x: &Tensor, weight: &Tensor, conv_state: &Tensor) -> Result<Tensor> {
    let _ = (tree, x, weight, conv_state);
    unimplemented!()
}

/// Keeps the last three raw rows of the accepted paths, in place in the pool.
pub fn tree_conv_commit(conv_state: &Tensor, paths: &DevicePaths, x: &Tensor) -> Result<()> {
    let _ = (conv_state, paths, x);
    unimplemented!()
}
