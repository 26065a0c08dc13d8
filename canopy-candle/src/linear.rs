//! The product over packed weights as an op.

use candle_core::{Device, Result, Tensor};

/// One or several weight matrices with the same input, read once for all rows. On the CPU bf16 weights stay
/// bf16, activations are f32, and a row's bits do not depend on the number of rows.
#[derive(Clone, Debug)]
pub struct PackedLinear {
    _private: (),
}

impl PackedLinear {
    /// `weights` are `[out_i, in]`, bf16 or f32, all of one dtype, on any device.
    pub fn new(weights: &[&Tensor], device: &Device) -> Result<Self> {
        let _ = (weights, device);
        unimplemented!()
    }

    /// `x` `[rows, in]` -> one contiguous `[rows, out_i]` per weight.
    pub fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let _ = x;
        unimplemented!()
    }

    /// The only output of a single-weight product.
    pub fn forward_one(&self, x: &Tensor) -> Result<Tensor> {
        let _ = x;
        unimplemented!()
    }

    /// Rows of the matrix by index, f32 on the CPU: an embedding lookup over tied weights. `[ids, in]`.
    pub fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let _ = ids;
        unimplemented!()
    }
}
