//! The gated full-attention layer's mixer.

use candle_core::{Device, Tensor};
use canopy_candle::{
    AttnDims, CacheRows, NormKind, PackedLinear, QkNormRope, attn_gate, tree_attention, widened,
};

use super::Round;
use super::prefill::{Attended, Chunks};
use crate::Result;
use crate::cache::KvPool;
use crate::config::TargetConfig;
use crate::weights::Weights;

/// Projections, query and key norms, partial RoPE, attention, output gate, and the keys and values of all slots.
#[derive(Debug)]
pub(super) struct GatedAttention {
    /// Outputs q (each head followed by its gate when gated), k, v.
    qkv_proj: PackedLinear,
    rope: QkNormRope,
    o_proj: PackedLinear,
    dims: AttnDims,
    pub(super) pool: KvPool,
}

impl GatedAttention {
    pub(super) fn load(
        weights: &Weights,
        prefix: &str,
        config: &TargetConfig,
        pool: KvPool,
        device: &Device,
    ) -> Result<Self> {
        let (dims, hidden) = (config.attn, config.hidden_size);
        let gated = config.attn_output_gate;
        let name = |part: &str| format!("{prefix}self_attn.{part}.weight");
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(name);
        let q_rows = dims.q_width() * if gated { 2 } else { 1 };
        let parts: [&[(&str, usize)]; 3] =
            [&[(&q, q_rows)], &[(&k, dims.kv_width())], &[(&v, dims.kv_width())]];
        let inv_freq = config.inv_freq();
        Ok(Self {
            qkv_proj: weights.packed(&parts, hidden, device)?,
            rope: QkNormRope {
                dims,
                gated,
                q_norm: weights.f32(&name("q_norm"), &[dims.head_dim], device)?,
                k_norm: weights.f32(&name("k_norm"), &[dims.head_dim], device)?,
                eps: config.rms_norm_eps as f32,
                kind: NormKind::UnitOffset,
                inv_freq: Tensor::from_vec(inv_freq, config.rotary_dim / 2, device)?,
            },
            o_proj: weights.linear(&name("o_proj"), hidden, dims.q_width(), device)?,
            dims,
            pool,
        })
    }

    /// `x` `[N, hidden]`, normed -> `[N, hidden]`. Writes this round's keys and values after the committed ones.
    pub(super) fn verify(&self, round: &Round<'_>, x: &Tensor) -> Result<Tensor> {
        let [q_proj, k_proj, v] = super::outputs(self.qkv_proj.forward_f32(x)?)?;
        let batch = round.tree.host();
        let rows = CacheRows { cu_rows: batch.cu_nodes(), slots: batch.slots(), starts: round.prefix_lens };
        let q = self.pool.append_rotated(&self.rope, [&q_proj, &k_proj, &v], round.positions, rows)?;
        let (keys, values) = (&self.pool.keys, &self.pool.values);
        let out = tree_attention(round.tree, self.dims, round.prefix_lens, &q, keys, values)?;
        self.gated(&self.o_proj, &out, &q_proj)
    }

    /// `x` `[N, hidden]`, normed -> `[N, hidden]`. Writes the chunks' keys and values after the committed ones.
    pub(super) fn read(&self, chunks: &Chunks, x: &Tensor) -> Result<Tensor> {
        let [q_proj, k_proj, v] = super::outputs(self.qkv_proj.many().forward_f32(x)?)?;
        let parts = [&q_proj, &k_proj, &v];
        let q = self.pool.append_rotated(&self.rope, parts, &chunks.positions, chunks.cache_rows())?;
        let (keys, values) = (&self.pool.keys, &self.pool.values);
        let attend = |Attended { slices, lens, first }: &Attended| {
            let rows = q.narrow(0, *first, slices.host().rows())?;
            tree_attention(slices, self.dims, lens, &rows, keys, values)
        };
        let outs = chunks.attended.iter().map(attend).collect::<candle_core::Result<Vec<_>>>()?;
        self.gated(&self.o_proj.many(), &Tensor::cat(&outs, 0)?, &q_proj)
    }

    /// Attention's gate and the output product.
    fn gated(&self, o_proj: &PackedLinear, out: &Tensor, q_proj: &Tensor) -> Result<Tensor> {
        let out = match self.rope.gated {
            true => attn_gate(self.dims, out, q_proj)?,
            false => widened(&out.flatten_from(1)?)?,
        };
        Ok(o_proj.forward_one(&out)?)
    }
}
