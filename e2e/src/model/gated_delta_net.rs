//! The Gated DeltaNet layer's mixer.

use candle_core::{DType, Tensor};
use canopy_candle::{
    ConvDims, GateInputs, GdnDims, GdnTape, PackedLinear, TreeGdnOutput, Variant, chain_conv_advance,
    chain_conv_gates, gated_rms_norm_to, gdn_prefill, tree_conv_gates, tree_gdn_verify,
};

use super::prefill::Chunks;
use super::{ModelOptions, Round};
use crate::Result;
use crate::cache::RecurrentPool;
use crate::config::TargetConfig;
use crate::weights::Weights;

/// Projections, convolution, gates, delta rule, gated norm, and the states of all slots.
#[derive(Debug)]
pub(super) struct GatedDeltaNet {
    /// Outputs qkv `[2 Hk Dk + Hv Dv]`, z `[Hv Dv]`, ab `[2 Hv]` (a, then b).
    in_proj: PackedLinear,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    out_proj: PackedLinear,
    dims: GdnDims,
    /// dtype of the delta rule's rows.
    rows: DType,
    eps: f32,
    pub(super) pool: RecurrentPool,
}

/// What a verify pass leaves for its commit.
#[derive(Debug)]
pub(super) struct Tape {
    raw: Tensor,
    qkv: Tensor,
    gates: Tensor,
    verified: TreeGdnOutput,
}

impl GatedDeltaNet {
    pub(super) fn load(
        weights: &Weights,
        prefix: &str,
        config: &TargetConfig,
        options: &ModelOptions,
        pool: RecurrentPool,
    ) -> Result<Self> {
        let device = &options.device;
        let (dims, hidden) = (config.gdn, config.hidden_size);
        let (channels, v_width) = (dims.qkv_width(), dims.v_heads * dims.dv);
        let name = |part: &str| format!("{prefix}linear_attn.{part}");
        let [qkv, z, a, b] = ["qkv", "z", "a", "b"].map(|part| name(&format!("in_proj_{part}.weight")));
        let parts: [&[(&str, usize)]; 3] =
            [&[(&qkv, channels)], &[(&z, v_width)], &[(&a, dims.v_heads), (&b, dims.v_heads)]];
        let taps = weights.f32(&name("conv1d.weight"), &[channels, 1, ConvDims::WIDTH], device)?;
        Ok(Self {
            in_proj: weights.packed(&parts, hidden, device)?,
            conv: taps.reshape((channels, ConvDims::WIDTH))?,
            a_log: weights.f32(&name("A_log"), &[dims.v_heads], device)?,
            dt_bias: weights.f32(&name("dt_bias"), &[dims.v_heads], device)?,
            norm: weights.f32(&name("norm.weight"), &[dims.dv], device)?,
            out_proj: weights.linear(&name("out_proj.weight"), hidden, v_width, device)?,
            dims,
            eps: config.rms_norm_eps as f32,
            rows: options.rows,
            pool,
        })
    }

    fn gates<'a>(&'a self, ab: &'a Tensor) -> GateInputs<'a> {
        GateInputs { ab, a_log: &self.a_log, dt_bias: &self.dt_bias }
    }

    /// `x` `[N, hidden]`, normed -> `[N, hidden]` and the tape. No state is written.
    pub(super) fn verify(&self, round: &Round<'_>, variant: Variant, x: &Tensor) -> Result<(Tensor, Tape)> {
        let [raw, z, ab] = super::outputs(self.in_proj.forward_f32(x)?)?;
        let (tree, pool) = (round.tree, &self.pool);
        let (qkv, gates) =
            tree_conv_gates(tree, &raw, &self.conv, &pool.conv_state, self.gates(&ab), self.rows)?;
        let verified = tree_gdn_verify(tree, self.dims, variant, &qkv, &gates, &pool.state)?;
        let y = gated_rms_norm_to(&verified.o, &z, &self.norm, self.eps, self.out_proj.rows_dtype()?)?;
        Ok((self.out_proj.forward_one_f32(&y)?, Tape { raw, qkv, gates, verified }))
    }

    /// `x` `[N, hidden]`, normed -> `[N, hidden]`. The states are those after the chunks.
    pub(super) fn read(&self, chunks: &Chunks, x: &Tensor) -> Result<Tensor> {
        let [raw, z, ab] = super::outputs(self.in_proj.many().forward_f32(x)?)?;
        let (sequences, pool) = (&chunks.sequences, &self.pool);
        let (qkv, gates) =
            chain_conv_gates(sequences, &raw, &self.conv, &pool.conv_state, self.gates(&ab), self.rows)?;
        chain_conv_advance(&pool.conv_state, sequences, &raw)?;
        let o = gdn_prefill(sequences, self.dims, &qkv, &gates, &pool.state)?;
        let y = gated_rms_norm_to(&o, &z, &self.norm, self.eps, self.out_proj.rows_dtype()?)?;
        Ok(self.out_proj.many().forward_one_f32(&y)?)
    }
}

impl Tape {
    /// What the delta rule's commit reads, and the rows that the convolution read.
    pub(super) fn parts(&self) -> (GdnTape<'_>, &Tensor) {
        (GdnTape { verified: &self.verified, qkv: &self.qkv, gates: &self.gates }, &self.raw)
    }
}
