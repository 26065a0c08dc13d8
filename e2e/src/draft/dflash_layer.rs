//! One layer of the block drafter.

use candle_core::{Device, Tensor};
use canopy_candle::{
    AttnDims, BlockMask, DraftBlocks, NormKind, PackedLinear, QkNormRope, add_rms_norm, block_attention,
    swiglu_to,
};

use super::dflash_cache::Rows;
use crate::Result;
use crate::cache::KvPool;
use crate::config::DraftConfig;
use crate::weights::Weights;

/// The projections of a block's rows.
#[derive(Clone, Debug)]
enum Queries {
    /// Queries, keys and values in one product: on CUDA, where a launch costs more than the second copy of the keys' and values' weights.
    AndKeys(PackedLinear),
    Alone(PackedLinear),
}

impl Queries {
    fn rounded(&self) -> Result<Self> {
        Ok(match self {
            Self::AndKeys(proj) => Self::AndKeys(proj.rounded()?),
            Self::Alone(proj) => Self::Alone(proj.rounded()?),
        })
    }
}

/// Attention over context and block, then SwiGLU. Keys and values come from one pair of projections, applied to
/// context features and to the block's normed rows alike.
#[derive(Clone, Debug)]
pub(super) struct DFlashLayer {
    pub(super) input_norm: Tensor,
    q_proj: Queries,
    kv_proj: PackedLinear,
    rope: QkNormRope,
    /// `rope` for context rows, which have keys and no queries.
    key_rope: QkNormRope,
    mask: BlockMask,
    o_proj: PackedLinear,
    post_norm: Tensor,
    gate_up: PackedLinear,
    down: PackedLinear,
    dims: AttnDims,
}

/// What every layer of one draft reads.
pub(super) struct Block<'a> {
    pub(super) rows: &'a Rows,
    pub(super) blocks: &'a DraftBlocks,
    pub(super) positions: &'a [i32],
}

/// Rows of a packed tensor that go on: (first, count) per stream. The rest ends here.
pub(super) type Kept<'a> = Option<&'a [(usize, usize)]>;

/// The kept rows of `[rows, width]`, one stream after another.
pub(super) fn keep(rows: Tensor, kept: Kept<'_>) -> Result<Tensor> {
    Ok(match kept {
        None => rows,
        Some(&[(first, count)]) => rows.narrow(0, first, count)?,
        Some(several) => {
            let parts = several.iter().map(|&(first, count)| rows.narrow(0, first, count));
            Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)?
        }
    })
}

impl DFlashLayer {
    /// Loads `{prefix}layers.{index}.*`.
    pub(super) fn load(
        weights: &Weights,
        prefix: &str,
        config: &DraftConfig,
        index: usize,
        device: &Device,
    ) -> Result<Self> {
        let (dims, hidden, inter) = (config.attn, config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("{prefix}layers.{index}.{part}.weight");
        let norm = |part: &str, width: usize| weights.f32(&name(part), &[width], device);
        let matrix = |part: &str, rows, inputs| weights.linear(&name(part), rows, inputs, device);
        let [q, k, v] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(name);
        let [gate, up] = ["mlp.gate_proj", "mlp.up_proj"].map(name);
        let kv: [&[(&str, usize)]; 2] = [&[(&k, dims.kv_width())], &[(&v, dims.kv_width())]];
        let qkv: [&[(&str, usize)]; 3] = [&[(&q, dims.q_width())], kv[0], kv[1]];
        let gate_up: [&[(&str, usize)]; 2] = [&[(&gate, inter)], &[(&up, inter)]];
        let rope = QkNormRope {
            dims,
            gated: false,
            q_norm: norm("self_attn.q_norm", dims.head_dim)?,
            k_norm: norm("self_attn.k_norm", dims.head_dim)?,
            eps: config.rms_norm_eps as f32,
            kind: NormKind::Plain,
            inv_freq: Tensor::from_vec(config.inv_freq(), dims.head_dim / 2, device)?,
        };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            q_proj: match device.is_cuda() {
                true => Queries::AndKeys(weights.packed(&qkv, hidden, device)?),
                false => Queries::Alone(weights.packed(&qkv[..1], hidden, device)?),
            },
            kv_proj: weights.packed(&kv, hidden, device)?,
            key_rope: QkNormRope {
                dims: AttnDims::new(dims.kv_heads, dims.kv_heads, dims.head_dim)?,
                ..rope.clone()
            },
            rope,
            mask: config.layers[index],
            o_proj: matrix("self_attn.o_proj", hidden, dims.q_width())?,
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: weights.packed(&gate_up, hidden, device)?,
            down: matrix("mlp.down_proj", hidden, inter)?,
            dims,
        })
    }

    /// The same layer with rounded products, see [`PackedLinear::rounded`].
    pub(super) fn rounded(&self) -> Result<Self> {
        Ok(Self {
            q_proj: self.q_proj.rounded()?,
            kv_proj: self.kv_proj.rounded()?,
            o_proj: self.o_proj.rounded()?,
            gate_up: self.gate_up.rounded()?,
            down: self.down.rounded()?,
            ..self.clone()
        })
    }

    /// Writes the keys and values of context features `[n, hidden]` into the pool.
    pub(super) fn extend(
        &self,
        pool: &KvPool,
        rows: &Rows,
        positions: &[i32],
        features: &Tensor,
    ) -> Result<()> {
        let [k_proj, v] = pair(self.kv_proj.forward(features)?)?;
        pool.append_rotated(&self.key_rope, [&k_proj, &k_proj, &v], positions, rows.cache_rows())?;
        Ok(())
    }

    /// One layer for block rows: residual stream and its normed rows, both `[rows, hidden]`, in; the stream after
    /// the layer, and it under `next_norm`, out, of the `kept` rows alone (no other layer reads the rest).
    pub(super) fn forward(
        &self,
        pool: &KvPool,
        block: &Block<'_>,
        (stream, normed): (&Tensor, &Tensor),
        kept: Kept<'_>,
        next_norm: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (eps, kind) = (self.rope.eps, self.rope.kind);
        let [q_proj, k_proj, v] = match &self.q_proj {
            Queries::AndKeys(proj) => crate::model::outputs(proj.forward(normed)?)?,
            Queries::Alone(proj) => {
                let [k_proj, v] = pair(self.kv_proj.forward(normed)?)?;
                [proj.forward_one(normed)?, k_proj, v]
            }
        };
        let rows = block.rows.cache_rows();
        let q = pool.append_rotated(&self.rope, [&q_proj, &k_proj, &v], block.positions, rows)?;
        let attn = block_attention(block.blocks, self.mask, self.dims, &q, &pool.keys, &pool.values)?;
        let mixed = self.o_proj.forward_one_f32(&keep(attn.flatten_from(1)?, kept)?)?;
        let stream = keep(stream.clone(), kept)?;
        let (stream, normed) = add_rms_norm(&mixed, &stream, &self.post_norm, eps, kind)?;
        let [gate, up] = pair(self.gate_up.forward(&normed)?)?;
        let mixed = self.down.forward_one_f32(&swiglu_to(&gate, &up, self.down.rows_dtype()?)?)?;
        Ok(add_rms_norm(&mixed, &stream, next_norm, eps, kind)?)
    }
}

fn pair(parts: Vec<Tensor>) -> Result<[Tensor; 2]> {
    crate::model::outputs(parts)
}
