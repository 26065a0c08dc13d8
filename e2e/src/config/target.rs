//! The text configuration of a dense Qwen3.5 checkpoint.

use canopy_kernels::{AttnDims, ConvDims, GdnDims};
use serde_json::Value;

use super::Table;
use crate::{Error, Result};

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet (`linear_attention`).
    GatedDeltaNet,
    /// Gated attention (`full_attention`).
    Attention,
}

/// Everything the text model's arithmetic depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetConfig {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Kind of every layer.
    pub layers: Vec<LayerKind>,
    /// Sizes of the attention layers.
    pub attn: AttnDims,
    /// Sizes of the Gated DeltaNet layers.
    pub gdn: GdnDims,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// RoPE base.
    pub rope_theta: f64,
    /// Leading values of a head that RoPE turns; the rest pass through.
    pub rotary_dim: usize,
    /// Attention outputs are multiplied by a sigmoid gate that `q_proj` also computes.
    pub attn_output_gate: bool,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Longest context the checkpoint was made for.
    pub max_position_embeddings: usize,
    /// End-of-sequence tokens of `config.json` (text first, then outer).
    pub eos_token_ids: Vec<u32>,
}

impl TargetConfig {
    /// Reads `config.json`, with the text model's keys under `text_config` or at top level.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key for a missing, ill-typed or unsupported value.
    pub fn from_json(what: &str, bytes: &[u8]) -> Result<Self> {
        let value: Value = serde_json::from_slice(bytes).map_err(|source| Error::Config {
            what: what.into(),
            key: "(whole file)".into(),
            message: format!("expected JSON, got {source}"),
        })?;
        let outer = Table::new(what, &value)?;
        let text = outer.table("text_config")?.unwrap_or_else(|| outer.clone());
        check_supported(&outer, &text)?;
        let attn = attn_dims(&text)?;
        let (rope_theta, rotary_dim) = rope(&text, attn.head_dim)?;
        let mut eos_token_ids = text.token_ids("eos_token_id")?;
        eos_token_ids.extend(outer.token_ids("eos_token_id")?);
        dedup(&mut eos_token_ids);
        let tied = text.bool("tie_word_embeddings")?.or(outer.bool("tie_word_embeddings")?);
        Ok(Self {
            vocab_size: text.need_positive("vocab_size")?,
            hidden_size: text.need_positive("hidden_size")?,
            intermediate_size: text.need_positive("intermediate_size")?,
            layers: layers(&text)?,
            attn,
            gdn: gdn_dims(&text)?,
            rms_norm_eps: eps(&text)?,
            rope_theta,
            rotary_dim,
            attn_output_gate: text.bool("attn_output_gate")?.unwrap_or(true),
            tie_word_embeddings: tied.unwrap_or(false),
            max_position_embeddings: text.need_positive("max_position_embeddings")?,
            eos_token_ids,
        })
    }

    /// `[rotary_dim / 2]` RoPE frequencies, `theta^(-2i / rotary_dim)`.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f64;
        (0..self.rotary_dim / 2).map(|i| self.rope_theta.powf(-2.0 * i as f64 / dim) as f32).collect()
    }

    /// Elements of one position's keys and values over all attention layers.
    pub fn kv_row_len(&self) -> usize {
        let layers = self.layers.iter().filter(|&&kind| kind == LayerKind::Attention).count();
        2 * layers * self.attn.kv_width()
    }
}

/// Removes repeated ids, keeping the first of each.
pub(crate) fn dedup(ids: &mut Vec<u32>) {
    let mut seen = std::collections::HashSet::new();
    ids.retain(|&id| seen.insert(id));
}

fn check_supported(outer: &Table<'_>, text: &Table<'_>) -> Result<()> {
    let model_type = text.str("model_type")?.or(outer.str("model_type")?);
    let model_type = text.need("model_type", model_type)?;
    if !matches!(model_type, "qwen3_5_text" | "qwen3_5") {
        let message = format!("expected qwen3_5 or qwen3_5_text (a dense Qwen3.5), got {model_type}");
        return Err(text.error("model_type", message));
    }
    if let Some(act) = text.str("hidden_act")?.filter(|&act| act != "silu") {
        return Err(text.error("hidden_act", format!("expected silu, got {act}")));
    }
    if text.bool("attention_bias")? == Some(true) {
        return Err(text.error("attention_bias", "expected false, got true"));
    }
    if let Some(experts) = text.usize("num_experts")?.filter(|&n| n > 0) {
        return Err(text.error("num_experts", format!("expected a dense model, got {experts} experts")));
    }
    match text.usize("linear_conv_kernel_dim")? {
        None | Some(ConvDims::WIDTH) => Ok(()),
        Some(width) => {
            let message = format!("expected {}, got {width}", ConvDims::WIDTH);
            Err(text.error("linear_conv_kernel_dim", message))
        }
    }
}

fn attn_dims(text: &Table<'_>) -> Result<AttnDims> {
    let q_heads = text.need_positive("num_attention_heads")?;
    let kv_heads = text.need_positive("num_key_value_heads")?;
    let head_dim = match text.usize("head_dim")? {
        Some(_) => text.need_positive("head_dim")?,
        None => text.need_positive("hidden_size")? / q_heads,
    };
    if !q_heads.is_multiple_of(kv_heads) {
        let message = format!("expected a multiple of num_key_value_heads = {kv_heads}, got {q_heads}");
        return Err(text.error("num_attention_heads", message));
    }
    AttnDims::new(q_heads, kv_heads, head_dim).map_err(|source| text.error("head_dim", source.to_string()))
}

fn gdn_dims(text: &Table<'_>) -> Result<GdnDims> {
    let k_heads = text.need_positive("linear_num_key_heads")?;
    let v_heads = text.need_positive("linear_num_value_heads")?;
    let dk = text.need_positive("linear_key_head_dim")?;
    let dv = text.need_positive("linear_value_head_dim")?;
    GdnDims::new(k_heads, v_heads, dk, dv).map_err(|_| {
        let message = format!("expected a multiple of linear_num_key_heads = {k_heads}, got {v_heads}");
        text.error("linear_num_value_heads", message)
    })
}

fn layers(text: &Table<'_>) -> Result<Vec<LayerKind>> {
    let count = text.need_positive("num_hidden_layers")?;
    let Some(names) = text.strs("layer_types")? else {
        let Some(interval) = text.usize("full_attention_interval")? else {
            return Err(
                text.error("layer_types", "expected layer_types or full_attention_interval, got neither")
            );
        };
        if interval == 0 {
            return Err(text.error("full_attention_interval", "expected at least 1, got 0"));
        }
        let kind = |i: usize| match (i + 1) % interval {
            0 => LayerKind::Attention,
            _ => LayerKind::GatedDeltaNet,
        };
        return Ok((0..count).map(kind).collect());
    };
    if names.len() != count {
        let message = format!("expected num_hidden_layers = {count} entries, got {}", names.len());
        return Err(text.error("layer_types", message));
    }
    let kind =
        |name: &&str| match *name {
            "linear_attention" => Ok(LayerKind::GatedDeltaNet),
            "full_attention" => Ok(LayerKind::Attention),
            other => Err(text
                .error("layer_types", format!("expected linear_attention or full_attention, got {other}"))),
        };
    names.iter().map(kind).collect()
}

/// `(theta, rotary_dim)`; both keys live in `rope_parameters` or at top level.
fn rope(text: &Table<'_>, head_dim: usize) -> Result<(f64, usize)> {
    let mut nested = Vec::new();
    for key in ["rope_parameters", "rope_scaling"] {
        nested.extend(text.table(key)?);
    }
    let mut theta = None;
    let mut factor = None;
    for table in &nested {
        let kind = table.str("rope_type")?.or(table.str("type")?);
        if let Some(kind) = kind.filter(|kind| !matches!(*kind, "default" | "mrope")) {
            return Err(table.error("rope_type", format!("expected default, got {kind}")));
        }
        theta = theta.or(table.f64("rope_theta")?);
        factor = factor.or(table.f64("partial_rotary_factor")?);
    }
    let theta = theta.or(text.f64("rope_theta")?);
    let factor = factor.or(text.f64("partial_rotary_factor")?);
    let theta = text.need("rope_parameters.rope_theta", theta)?;
    let factor = text.need("rope_parameters.partial_rotary_factor", factor)?;
    if !(theta.is_finite() && theta > 0.0) {
        return Err(text.error("rope_parameters.rope_theta", format!("expected above 0, got {theta}")));
    }
    let rotary_dim = (head_dim as f64 * factor).round() as usize;
    if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        let message =
            format!("expected an even share of head_dim = {head_dim}, got {factor} ({rotary_dim} values)");
        return Err(text.error("rope_parameters.partial_rotary_factor", message));
    }
    Ok((theta, rotary_dim))
}

fn eps(text: &Table<'_>) -> Result<f64> {
    let eps = text.f64("rms_norm_eps")?;
    let eps = text.need("rms_norm_eps", eps)?;
    match eps > 0.0 && eps < 1.0 {
        true => Ok(eps),
        false => Err(text.error("rms_norm_eps", format!("expected between 0 and 1, got {eps}"))),
    }
}
