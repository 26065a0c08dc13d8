//! The SwiGLU feed-forward part.

use candle_core::{Device, Tensor};
use canopy_candle::{PackedLinear, swiglu};

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
        let [gate, up] = super::outputs(self.gate_up.forward(x)?)?;
        Ok(self.down.forward_one(&swiglu(&gate, &up)?)?)
    }
}
