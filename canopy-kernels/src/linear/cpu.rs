//! CPU forward over packed weights.

use half::bf16;

use crate::Result;

/// One weight matrix `[out, in]`, or several stacked along `out`, in the layout that the product reads once for
/// all rows. bf16 weights stay bf16 in memory.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    _private: (),
}

impl PackedWeight {
    /// Packs row-major bf16 matrices `[out_i, in]`.
    pub fn from_bf16(inputs: usize, parts: &[&[bf16]]) -> Result<Self> {
        let _ = (inputs, parts);
        unimplemented!()
    }

    /// Packs row-major f32 matrices `[out_i, in]`, kept in f32.
    pub fn from_f32(inputs: usize, parts: &[&[f32]]) -> Result<Self> {
        let _ = (inputs, parts);
        unimplemented!()
    }

    /// Input width.
    pub fn inputs(&self) -> usize {
        unimplemented!()
    }

    /// Output width of every part.
    pub fn outputs(&self) -> &[usize] {
        unimplemented!()
    }

    /// One row of the (stacked) matrix in f32: an embedding lookup for tied weights.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        let _ = (index, out);
        unimplemented!()
    }
}

/// `outs[p] [rows, out_p] = x [rows, in] W_p^T`, f32 accumulation in one fixed order per element.
pub fn forward(weight: &PackedWeight, x: &[f32], outs: &mut [&mut [f32]]) -> Result<()> {
    let _ = (weight, x, outs);
    unimplemented!()
}
