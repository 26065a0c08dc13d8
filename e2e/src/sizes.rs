//! What a pair takes of memory, from its configurations alone: weights, what every slot owns, what every token adds.

use canopy_candle::{ConvDims, DraftTree};

use crate::config::{DraftConfig, LayerKind, TargetConfig};
use crate::weights::WeightDtype;

/// Elements of one matrix of a configuration and of its vectors, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// In matrices: bf16 unless stored otherwise.
    pub matrices: usize,
    /// In norms, gates and convolution taps: kept in f32.
    pub vectors: usize,
}

impl Elements {
    /// Bytes with matrices kept so on CUDA; [`WeightDtype::Stored`] counts as bf16. Int8 has a bf16 scale for every 128 values.
    pub fn bytes(self, dtype: WeightDtype) -> usize {
        let matrices = match dtype {
            WeightDtype::Stored | WeightDtype::Bf16 => 2 * self.matrices,
            WeightDtype::F32 => 4 * self.matrices,
            WeightDtype::Int8 => self.matrices + self.matrices / 64,
        };
        matrices + 4 * self.vectors
    }

    /// All of them.
    pub fn count(self) -> usize {
        self.matrices + self.vectors
    }
}

/// Bytes of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The target's weights.
    pub target: Elements,
    /// The drafter's weights, which has neither embedding nor head.
    pub drafter: Elements,
    /// Bytes of one slot's recurrent and convolution states, f32.
    pub state: usize,
    /// Bytes of one token's keys and values in the target.
    pub target_token: usize,
    /// Bytes of one token's keys and values in the drafter.
    pub drafter_token: usize,
    /// Rows of a draft block; 0 without a drafter.
    pub block_size: usize,
    /// Bytes of one row of logits, f32.
    pub logits_row: usize,
    /// Elements of the head.
    pub head: usize,
    /// Elements of the drafter's key and value projections, which CUDA keeps twice: alone, and beside the queries'.
    pub drafter_twice: usize,
    /// How the target's weights are kept, and the drafter's.
    pub dtypes: [WeightDtype; 2],
}

impl Sizes {
    /// Of a target and its drafter, with keys and values of `kv_bytes` bytes a value: 2 on CUDA, 4 on the CPU.
    pub fn new(target: &TargetConfig, drafter: Option<&DraftConfig>, kv_bytes: usize) -> Self {
        let drafter_token =
            drafter.map_or(0, |drafter| 2 * drafter.layers.len() * drafter.attn.kv_width() * kv_bytes);
        Self {
            target: target_elements(target),
            drafter: drafter.map_or_else(Elements::default, drafter_elements),
            state: state_bytes(target),
            target_token: target.kv_row_len() * kv_bytes,
            drafter_token,
            block_size: drafter.map_or(0, |drafter| drafter.block_size),
            logits_row: 4 * target.vocab_size,
            head: target.vocab_size * target.hidden_size,
            drafter_twice: drafter.filter(|_| kv_bytes == 2).map_or(0, |drafter| {
                2 * drafter.layers.len() * drafter.attn.kv_width() * drafter.hidden_size
            }),
            dtypes: [WeightDtype::Stored; 2],
        }
    }

    /// The same with weights kept so, the target's and the drafter's.
    #[must_use]
    pub fn kept(self, target: WeightDtype, drafter: WeightDtype) -> Self {
        Self { dtypes: [target, drafter], ..self }
    }

    /// Bytes of the target's weights.
    pub fn target_weights(&self) -> usize {
        self.target.bytes(self.dtypes[0])
    }

    /// Bytes of the drafter's weights, and of the int8 copy of the head that drafts go through where the target's is none.
    pub fn drafter_weights(&self) -> usize {
        let [target, drafter] = self.dtypes;
        let copied = self.block_size > 0 && drafter == WeightDtype::Int8 && target != WeightDtype::Int8;
        let copies =
            Elements { matrices: self.drafter_twice + if copied { self.head } else { 0 }, vectors: 0 };
        self.drafter.bytes(drafter) + copies.bytes(drafter)
    }

    /// Bytes of both models' weights.
    pub fn weights(&self) -> usize {
        self.target_weights() + self.drafter_weights()
    }

    /// Bytes that one token of context adds.
    pub fn token(&self) -> usize {
        self.target_token + self.drafter_token
    }

    /// Bytes of one slot's pools for a context of `tokens`: room for a tree, and for a draft block, is behind them.
    pub fn slot(&self, tokens: usize) -> usize {
        self.state
            + (tokens + DraftTree::MAX_NODES) * self.target_token
            + (tokens + self.block_size) * self.drafter_token
    }
}

fn state_bytes(config: &TargetConfig) -> usize {
    let layers = config.layers.iter().filter(|&&kind| kind == LayerKind::GatedDeltaNet).count();
    let gdn = config.gdn;
    4 * layers * (gdn.v_heads * gdn.dv * gdn.dk + ConvDims::STATE_ROWS * gdn.qkv_width())
}

fn target_elements(config: &TargetConfig) -> Elements {
    let hidden = config.hidden_size;
    let tables = if config.tie_word_embeddings { 1 } else { 2 };
    let mut all = Elements { matrices: tables * config.vocab_size * hidden, vectors: hidden };
    for kind in &config.layers {
        all.matrices += 3 * hidden * config.intermediate_size;
        all.vectors += 2 * hidden;
        match kind {
            LayerKind::GatedDeltaNet => {
                let (gdn, channels) = (config.gdn, config.gdn.qkv_width());
                let values = gdn.v_heads * gdn.dv;
                // qkv, z and the output; a and b.
                all.matrices += hidden * (channels + 2 * values + 2 * gdn.v_heads);
                all.vectors += ConvDims::WIDTH * channels + 2 * gdn.v_heads + gdn.dv;
            }
            LayerKind::Attention => {
                let (attn, queries) = (config.attn, config.attn.q_heads * config.attn.head_dim);
                let gate = if config.attn_output_gate { queries } else { 0 };
                all.matrices += hidden * (2 * queries + gate + 2 * attn.kv_width());
                all.vectors += 2 * attn.head_dim;
            }
        }
    }
    all
}

fn drafter_elements(config: &DraftConfig) -> Elements {
    let (hidden, attn) = (config.hidden_size, config.attn);
    let layer =
        hidden * (2 * attn.q_heads * attn.head_dim + 2 * attn.kv_width() + 3 * config.intermediate_size);
    let layers = config.layers.len();
    Elements {
        matrices: config.taps.len() * hidden * hidden + layers * layer,
        vectors: 2 * hidden + layers * (2 * hidden + 2 * attn.head_dim),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn pair(target: &str, drafter: &str) -> (TargetConfig, DraftConfig) {
        let read = |dir: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir).join("config.json");
            std::fs::read(path).unwrap()
        };
        let target = TargetConfig::from_json("target", &read(target)).unwrap();
        let drafter = DraftConfig::from_json("drafter", &read(drafter), &target).unwrap();
        (target, drafter)
    }

    #[test]
    fn the_9b_pair_has_the_published_numbers_of_parameters() {
        let (target, drafter) = pair("models/qwen3.5-9b", "models/qwen3.5-9b/drafter");
        let sizes = Sizes::new(&target, Some(&drafter), 2);
        assert_eq!(sizes.target.count(), 8_953_803_264);
        assert_eq!(sizes.drafter.count(), 1_291_904_512);
        assert_eq!(sizes.target_token, 32 << 10);
        assert_eq!(sizes.drafter_token, 24 << 10);
        // 24 layers of 32 heads x 128 x 128 and of 3 rows of 8,192 channels.
        assert_eq!(sizes.state, (48 << 20) + 24 * 3 * 8192 * 4);
    }

    #[test]
    fn int8_weights_are_half_of_bf16_and_their_scales() {
        let (target, drafter) = pair("models/qwen3.5-9b", "models/qwen3.5-9b/drafter");
        let stored = Sizes::new(&target, Some(&drafter), 2);
        let drafts = stored.kept(WeightDtype::Stored, WeightDtype::Int8);
        assert_eq!(drafts.target_weights(), stored.target_weights());
        let int8 = |matrices: usize| matrices + matrices / 64;
        let twice = 6 * 2 * 1024 * 4096;
        let expected =
            int8(stored.drafter.matrices) + int8(248_320 * 4096 + twice) + 4 * stored.drafter.vectors;
        assert_eq!(drafts.drafter_weights(), expected);
        let both = stored.kept(WeightDtype::Int8, WeightDtype::Int8);
        assert_eq!(drafts.drafter_weights() - both.drafter_weights(), int8(248_320 * 4096));
        assert!((both.target_weights() as f64 / stored.target_weights() as f64 - 0.508).abs() < 0.001);
    }

    #[test]
    fn counts_are_those_of_the_stored_files() {
        let (target, drafter) = pair("tests/golden/qwen35-random", "tests/golden/dflash-random-new");
        let sizes = Sizes::new(&target, Some(&drafter), 4);
        for (dir, count) in
            [("qwen35-random", sizes.target.count()), ("dflash-random-new", sizes.drafter.count())]
        {
            let path = format!("{}/tests/golden/{dir}/model.safetensors", env!("CARGO_MANIFEST_DIR"));
            let tensors = candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap();
            assert_eq!(tensors.values().map(|tensor| tensor.elem_count()).sum::<usize>(), count, "{dir}");
        }
    }
}
