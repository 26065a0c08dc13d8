//! tree_gdn as ops.

use candle_core::{Result, Tensor};
use canopy_kernels::GdnDims;
use canopy_kernels::tree_gdn::Variant;

use crate::{DevicePaths, DeviceTree};

/// What one verify pass leaves behind. Three views of one allocation.
#[derive(Clone, Debug)]
pub struct TreeGdnOutput {
    /// `[N, Hv, Dv]` f32.
    pub o: Tensor,
    /// `[N, Hv, Dv]` f32, pseudo-values.
    pub u: Tensor,
    /// `[N, Hv]` f32, cumulative log gate.
    pub g_cum: Tensor,
}

/// Verifies; `qkv` `[N, 2 Hk Dk + Hv Dv]` bf16 or f32, `gates` `[N, 2, Hv]` f32, `state` pool `[slots, Hv, Dv, Dk]` f32.
pub fn tree_gdn_verify(
    tree: &DeviceTree,
    dims: GdnDims,
    variant: Variant,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<TreeGdnOutput> {
    let _ = (tree, dims, variant, qkv, gates, state);
    unimplemented!()
}

/// Commits the accepted paths into the pool, in place; `verified`, `qkv`, `gates` and `variant` are verify's.
pub fn tree_gdn_commit(
    state: &Tensor,
    paths: &DevicePaths,
    dims: GdnDims,
    variant: Variant,
    verified: &TreeGdnOutput,
    qkv: &Tensor,
    gates: &Tensor,
) -> Result<()> {
    let _ = (state, paths, dims, variant, verified, qkv, gates);
    unimplemented!()
}
