//! The SwiGLU feed-forward part.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{PackedLinear, swiglu_to};

use crate::Result;
use crate::weights::Weights;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub(super) struct Mlp {
    gate_up: PackedLinear,
    down: PackedLinear,
}

impl Mlp {
    pub(super) fn load(
        weights: &Weights,
        prefix: &str,
        hidden: usize,
        intermediate: usize,
        device: &Device,
    ) -> Result<Self> {
        let name = |part: &str| format!("{prefix}mlp.{part}_proj.weight");
        let [gate, up, down] = ["gate", "up", "down"].map(name);
        let parts: [&[(&str, usize)]; 2] = [&[(&gate, intermediate)], &[(&up, intermediate)]];
        Ok(Self {
            gate_up: weights.packed(&parts, hidden, device)?,
            down: weights.linear(&down, hidden, intermediate, device)?,
        })
    }

    /// `x` `[N, hidden]` -> `[N, hidden]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Self::of(&self.gate_up, &self.down, x)
    }

    /// [`Self::forward`] for the rows of a prefill pass.
    pub(super) fn read(&self, x: &Tensor) -> Result<Tensor> {
        Self::of(&self.gate_up.many(), &self.down.many(), x)
    }

    /// What [`Self::forward`]'s rows should come in.
    pub(super) fn rows_dtype(&self) -> Result<DType> {
        Ok(self.gate_up.rows_dtype()?)
    }

    fn of(gate_up: &PackedLinear, down: &PackedLinear, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = super::outputs(gate_up.forward_f32(x)?)?;
        Ok(down.forward_one_f32(&swiglu_to(&gate, &up, down.rows_dtype()?)?)?)
    }
}
