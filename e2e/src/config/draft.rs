//! The configuration of a DFlash drafter, both published generations.
//!
//! Every key may stand at top level, under `dflash_config` or in `rope_parameters`; places that contradict each
//! other are an error, and so is a key that is nowhere. Only `target_layer_ids` has a default rule, whose use is
//! logged. `tie_word_embeddings` says nothing here: the drafter has neither an embedding nor a head of its own.

use canopy_candle::{AttnDims, BlockMask};
use serde_json::Value;

use super::{Table, TargetConfig};
use crate::{Error, Result};

/// Everything the drafter's arithmetic depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    /// Width of the residual stream; the target's.
    pub hidden_size: usize,
    /// Rows of the target's embedding and head.
    pub vocab_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Heads.
    pub attn: AttnDims,
    /// What a block row of each layer may see.
    pub layers: Vec<BlockMask>,
    /// Added to the mean square of every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding, which turns whole heads.
    pub rope_theta: f64,
    /// Rows of a block: the root and the drafted positions.
    pub block_size: usize,
    /// Token at every drafted position of the block's input.
    pub mask_token: u32,
    /// Target layers whose outputs are the features, in order.
    pub taps: Vec<usize>,
}

impl DraftConfig {
    /// Reads a `config.json`; `what` names it in errors. Checked against the target it is to draft for.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key, what was expected and what came.
    pub fn from_json(what: &str, json: &[u8], target: &TargetConfig) -> Result<Self> {
        let value: Value = serde_json::from_slice(json).map_err(|source| Error::Config {
            what: what.into(),
            key: "(whole file)".into(),
            message: format!("expected JSON, got {source}"),
        })?;
        let places = Places::new(what, &value)?;
        check_supported(&places)?;
        check_target(&places, target)?;
        let config = Self {
            hidden_size: places.positive("hidden_size")?,
            vocab_size: places.positive("vocab_size")?,
            intermediate_size: places.positive("intermediate_size")?,
            attn: attn_dims(&places)?,
            layers: layers(&places)?,
            rms_norm_eps: places.between("rms_norm_eps", 1.0)?,
            rope_theta: places.between("rope_theta", f64::INFINITY)?,
            block_size: places.positive("block_size")?,
            mask_token: mask_token(&places, target)?,
            taps: taps(&places, target)?,
        };
        if config.block_size < 2 {
            return Err(places.error("block_size", "expected at least 2 (the root and one mask), got 1"));
        }
        Ok(config)
    }

    /// The deepest depth: `block_size - 1`.
    pub fn horizon(&self) -> usize {
        self.block_size - 1
    }

    /// `[head_dim / 2]` RoPE frequencies, `theta^(-2i / head_dim)`.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dim = self.attn.head_dim;
        (0..dim / 2).map(|i| self.rope_theta.powf(-2.0 * i as f64 / dim as f64) as f32).collect()
    }
}

/// The objects in which a key may stand, the top level first.
struct Places<'a> {
    tables: Vec<Table<'a>>,
}

impl<'a> Places<'a> {
    fn new(what: &str, value: &'a Value) -> Result<Self> {
        let top = Table::new(what, value)?;
        let nested = [top.table("dflash_config")?, top.table("rope_parameters")?];
        Ok(Self { tables: [Some(top), nested[0].clone(), nested[1].clone()].into_iter().flatten().collect() })
    }

    fn error(&self, key: &str, message: impl Into<String>) -> Error {
        self.tables[0].error(key, message)
    }

    /// The one value of `key`, `None` when it is nowhere.
    fn find<T: PartialEq + std::fmt::Debug>(
        &self,
        key: &str,
        read: impl Fn(&Table<'a>, &str) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut found: Option<T> = None;
        for table in &self.tables {
            let Some(value) = read(table, key)? else { continue };
            if let Some(first) = found.as_ref().filter(|&first| *first != value) {
                let message = format!("expected one value, got {first:?} and elsewhere {value:?}");
                return Err(table.error(key, message));
            }
            found = Some(value);
        }
        Ok(found)
    }

    fn need<T: PartialEq + std::fmt::Debug>(
        &self,
        key: &str,
        read: impl Fn(&Table<'a>, &str) -> Result<Option<T>>,
    ) -> Result<T> {
        let message = "expected at top level, under dflash_config or in rope_parameters, got none";
        self.find(key, read)?.ok_or_else(|| self.error(key, message))
    }

    fn positive(&self, key: &str) -> Result<usize> {
        let value = self.need(key, Table::usize)?;
        Table::size(key, value).map_err(|message| self.error(key, message))
    }

    fn between(&self, key: &str, below: f64) -> Result<f64> {
        let value = self.need(key, Table::f64)?;
        match value > 0.0 && value < below {
            true => Ok(value),
            false => Err(self.error(key, format!("expected above 0 and below {below}, got {value}"))),
        }
    }
}

fn check_supported(places: &Places<'_>) -> Result<()> {
    const ARCHITECTURE: &str = "DFlashDraftModel";
    let architectures = places.need("architectures", Table::strs)?;
    if !architectures.contains(&ARCHITECTURE) {
        return Err(places.error("architectures", format!("expected {ARCHITECTURE}, got {architectures:?}")));
    }
    if let Some(act) = places.find("hidden_act", Table::str)?.filter(|&act| act != "silu") {
        return Err(places.error("hidden_act", format!("expected silu, got {act}")));
    }
    for key in ["attention_bias", "sample_from_anchor"] {
        if places.find(key, Table::bool)? == Some(true) {
            return Err(places.error(key, "expected false, got true"));
        }
    }
    let scaling = places.tables[0].table("rope_scaling")?;
    for table in places.tables.iter().chain(&scaling) {
        let kind = table.str("rope_type")?.or(table.str("type")?);
        if let Some(kind) = kind.filter(|&kind| kind != "default") {
            return Err(table.error("rope_type", format!("expected default, got {kind}")));
        }
    }
    match places.find("partial_rotary_factor", Table::f64)? {
        Some(factor) if factor != 1.0 => {
            Err(places.error("partial_rotary_factor", format!("expected 1, got {factor}")))
        }
        _ => Ok(()),
    }
}

fn check_target(places: &Places<'_>, target: &TargetConfig) -> Result<()> {
    for (key, expected, got) in [
        ("hidden_size", target.hidden_size, Some(places.positive("hidden_size")?)),
        ("vocab_size", target.vocab_size, Some(places.positive("vocab_size")?)),
        ("num_target_layers", target.layers.len(), places.find("num_target_layers", Table::usize)?),
    ] {
        if let Some(got) = got.filter(|&got| got != expected) {
            return Err(places.error(key, format!("expected the target's {expected}, got {got}")));
        }
    }
    Ok(())
}

fn attn_dims(places: &Places<'_>) -> Result<AttnDims> {
    let (q_heads, kv_heads) =
        (places.positive("num_attention_heads")?, places.positive("num_key_value_heads")?);
    if !q_heads.is_multiple_of(kv_heads) {
        let message = format!("expected a multiple of num_key_value_heads = {kv_heads}, got {q_heads}");
        return Err(places.error("num_attention_heads", message));
    }
    let head_dim = places.positive("head_dim")?;
    if !head_dim.is_multiple_of(2) {
        return Err(places.error("head_dim", format!("expected an even width, got {head_dim}")));
    }
    Ok(AttnDims::new(q_heads, kv_heads, head_dim)?)
}

/// Each layer's mask. Inside the block: `is_causal` if present, else `causal`, else sliding layers are causal and
/// full layers are not.
fn layers(places: &Places<'_>) -> Result<Vec<BlockMask>> {
    let causal = match places.find("is_causal", Table::bool)? {
        Some(causal) => Some(causal),
        None => places.find("causal", Table::bool)?,
    };
    let sliding = sliding_layers(places)?;
    let window = match sliding.contains(&true) {
        true => Some(places.positive("sliding_window")?),
        false => None,
    };
    let mask =
        |&sliding: &bool| BlockMask { window: window.filter(|_| sliding), causal: causal.unwrap_or(sliding) };
    Ok(sliding.iter().map(mask).collect())
}

/// Which layers slide: `layer_types`, or without it what Qwen3's `use_sliding_window` and `max_window_layers` say.
fn sliding_layers(places: &Places<'_>) -> Result<Vec<bool>> {
    let count = places.positive("num_hidden_layers")?;
    let switch = places.find("use_sliding_window", Table::bool)?;
    let Some(types) = places.find("layer_types", Table::strs)? else {
        return match switch {
            Some(false) => Ok(vec![false; count]),
            Some(true) => {
                let first = places.need("max_window_layers", Table::usize)?;
                Ok((0..count).map(|layer| layer >= first).collect())
            }
            None => {
                Err(places.error("layer_types", "expected layer_types or use_sliding_window, got neither"))
            }
        };
    };
    if types.len() != count {
        let message = format!("expected num_hidden_layers = {count} entries, got {}", types.len());
        return Err(places.error("layer_types", message));
    }
    let slides = |kind: &&str| match *kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            let message = format!("expected sliding_attention or full_attention, got {other}");
            Err(places.error("layer_types", message))
        }
    };
    let sliding = types.iter().map(slides).collect::<Result<Vec<_>>>()?;
    if switch == Some(false) && sliding.contains(&true) {
        tracing::warn!(
            "drafter: layer_types names sliding layers but use_sliding_window is false; they slide"
        );
    }
    Ok(sliding)
}

fn mask_token(places: &Places<'_>, target: &TargetConfig) -> Result<u32> {
    let id = places.need("mask_token_id", Table::usize)?;
    match u32::try_from(id) {
        Ok(token) if id < target.vocab_size => Ok(token),
        _ => {
            let message = format!("expected a token id below {}, got {id}", target.vocab_size);
            Err(places.error("mask_token_id", message))
        }
    }
}

/// `target_layer_ids`; without them one per drafter layer, equally spaced from layer 1 to the third from last.
fn taps(places: &Places<'_>, target: &TargetConfig) -> Result<Vec<usize>> {
    const KEY: &str = "target_layer_ids";
    let layers = target.layers.len();
    let taps = match places.find(KEY, Table::usizes)? {
        Some(taps) => taps,
        None => {
            let taps = default_taps(layers, places.positive("num_hidden_layers")?);
            tracing::warn!(?taps, "drafter: no {KEY} in its config; taking equally spaced layers");
            taps
        }
    };
    if taps.is_empty() {
        return Err(places.error(KEY, "expected at least one layer id, got none"));
    }
    for (index, &tap) in taps.iter().enumerate() {
        if tap >= layers {
            return Err(places.error(KEY, format!("expected layer ids below {layers}, got {tap}")));
        }
        if taps[..index].contains(&tap) {
            return Err(places.error(KEY, format!("expected distinct layer ids, got {tap} twice")));
        }
    }
    Ok(taps)
}

/// `count` layer ids of a target of `layers` layers, `round(1 + i (layers - 4) / (count - 1))`; the middle layer
/// when one is asked for. Halves go to the even id, as the drafters' training code rounds.
pub fn default_taps(layers: usize, count: usize) -> Vec<usize> {
    if count == 1 {
        return vec![layers / 2];
    }
    let span = layers as f64 - 4.0;
    let tap = |i: usize| (1.0 + i as f64 * span / (count as f64 - 1.0)).round_ties_even().max(0.0) as usize;
    (0..count).map(tap).collect()
}
