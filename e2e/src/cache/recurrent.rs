//! State of one Gated DeltaNet layer.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{ConvDims, GdnDims};

use crate::Result;

/// Recurrent states and convolution states of all slots.
#[derive(Debug)]
pub struct RecurrentPool {
    /// `[slots, Hv, Dv, Dk]` f32.
    pub state: Tensor,
    /// `[slots, 3, C]` f32: raw qkv rows, oldest first.
    pub conv_state: Tensor,
}

impl RecurrentPool {
    /// Zeroed pools.
    pub fn new(slots: usize, dims: GdnDims, device: &Device) -> Result<Self> {
        let state = Tensor::zeros((slots, dims.v_heads, dims.dv, dims.dk), DType::F32, device)?;
        let shape = (slots, ConvDims::STATE_ROWS, dims.qkv_width());
        Ok(Self { state, conv_state: Tensor::zeros(shape, DType::F32, device)? })
    }

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
