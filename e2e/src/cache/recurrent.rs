//! States of the Gated DeltaNet layers.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{
    ConvDims, DevicePaths, GdnDims, GdnTape, Variant, tree_conv_commit_layers, tree_gdn_commit_layers,
};

use crate::Result;

/// The pools of all layers, one after another, so that one launch commits them.
#[derive(Debug)]
pub struct RecurrentPools {
    /// `[layers, slots, Hv, Dv, Dk]` f32.
    states: Tensor,
    /// `[layers, slots, 3, C]` f32.
    conv_states: Tensor,
    dims: GdnDims,
}

impl RecurrentPools {
    /// Zeroed pools; none for 0 layers.
    pub fn new(layers: usize, slots: usize, dims: GdnDims, device: &Device) -> Result<Self> {
        let states = Tensor::zeros((layers, slots, dims.v_heads, dims.dv, dims.dk), DType::F32, device)?;
        let shape = (layers, slots, ConvDims::STATE_ROWS, dims.qkv_width());
        Ok(Self { states, conv_states: Tensor::zeros(shape, DType::F32, device)?, dims })
    }

    /// The pool of one layer, in place.
    pub fn layer(&self, index: usize) -> Result<RecurrentPool> {
        Ok(RecurrentPool { state: self.states.get(index)?, conv_state: self.conv_states.get(index)? })
    }

    /// Advances both states of every layer along the accepted paths; `raws` are the rows that the convolutions read.
    pub fn commit(
        &self,
        paths: &DevicePaths,
        variant: Variant,
        tapes: &[GdnTape<'_>],
        raws: &[&Tensor],
    ) -> Result<()> {
        if tapes.is_empty() {
            return Ok(());
        }
        tree_gdn_commit_layers(&self.states, paths, self.dims, variant, tapes)?;
        Ok(tree_conv_commit_layers(&self.conv_states, paths, raws)?)
    }
}

/// Recurrent states and convolution states of all slots in one layer.
#[derive(Debug)]
pub struct RecurrentPool {
    /// `[slots, Hv, Dv, Dk]` f32.
    pub state: Tensor,
    /// `[slots, 3, C]` f32: raw qkv rows, oldest first.
    pub conv_state: Tensor,
}

impl RecurrentPool {
    /// Zeroes a slot.
    pub fn reset(&self, slot: usize) -> Result<()> {
        for pool in [&self.state, &self.conv_state] {
            pool.slice_set(&pool.narrow(0, slot, 1)?.zeros_like()?, 0, slot)?;
        }
        Ok(())
    }

    /// Copies of a slot: `[Hv, Dv, Dk]` and `[3, C]`.
    pub fn save(&self, slot: usize) -> Result<(Tensor, Tensor)> {
        let copy = |pool: &Tensor| pool.get(slot)?.force_contiguous();
        Ok((copy(&self.state)?, copy(&self.conv_state)?))
    }

    /// Puts a saved state into a slot.
    pub fn load(&self, slot: usize, (state, conv_state): &(Tensor, Tensor)) -> Result<()> {
        self.state.slice_set(&state.unsqueeze(0)?, 0, slot)?;
        Ok(self.conv_state.slice_set(&conv_state.unsqueeze(0)?, 0, slot)?)
    }
}
