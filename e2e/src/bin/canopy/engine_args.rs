//! What `generate` and `bench` share: the pair to load, the pool to run in, how tokens are drawn.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::Device;
use canopy_e2e::draft::Drafter;
use canopy_e2e::engine::{Engine, EngineConfig, PassCounts, Sampling, TokenIds, TokenText};
use canopy_e2e::loader::{LoadOptions, ModelSource, Pair, RowPrecision, WeightDtype, for_engine, load_pair};
use canopy_e2e::sizes::Sizes;
use canopy_e2e::threads;
use canopy_e2e::tokenizer::Tokenizer;
use clap::ValueEnum;

use crate::synthetic::SyntheticArgs;

/// Which pair to run, and where
#[derive(clap::Args)]
pub struct EngineArgs {
    /// `embedded`, a directory in Hugging Face layout, or owner/name on the hub
    #[arg(long, default_value = "embedded", value_name = "MODEL")]
    pub model: ModelSource,
    /// The drafter, named like the model; may be left out for the embedded model
    #[arg(long, value_name = "MODEL")]
    pub drafter: Option<ModelSource>,
    /// `cpu`, `cuda` or `cuda:N`
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// How weights are kept
    #[arg(long, value_enum, default_value_t = Dtype::Stored)]
    pub dtype: Dtype,
    /// How the drafter's weights are kept, and the head's that drafts go through; int8 on CUDA, else --dtype, when left out
    #[arg(long, value_enum)]
    drafter_dtype: Option<Dtype>,
    /// What rows are rounded to before products and the delta rule on CUDA; the CPU takes them in f32
    #[arg(long, value_enum, default_value_t = Rows::Bf16)]
    pub rows: Rows,
    /// Makes the weights from this seed instead of reading them; config.json alone is needed
    #[arg(long, value_name = "SEED")]
    pub random_weights: Option<u64>,
    /// Most tokens of prompt and text together; the model's own limit when left out
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Threads; one per physical core when left out
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Uses only what the hub's cache already holds
    #[arg(long)]
    pub offline: bool,
    /// Launches every kernel by itself on CUDA; the bits are the same
    #[arg(long)]
    pub no_graphs: bool,
    /// Walks trees and reads drafts on the host where the device could do without, to compare; the text is the same
    #[arg(long)]
    pub host_walk: bool,
    /// Builds trees on the host where the device could do without, to compare; the text is the same
    #[arg(long)]
    pub host_build: bool,
}

/// How weights are kept
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Dtype {
    /// As stored in the file
    Stored,
    /// Rounded to bf16
    Bf16,
    /// Widened to f32
    F32,
    /// Rounded to int8 with a scale for every 128 inputs of an output: half the memory of bf16 on CUDA (on the CPU the same values in bf16)
    Int8,
}

impl From<Dtype> for WeightDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Stored => Self::Stored,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F32 => Self::F32,
            Dtype::Int8 => Self::Int8,
        }
    }
}

/// What rows are rounded to
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Rows {
    /// As bf16 checkpoints are run elsewhere
    Bf16,
    /// Slower, and close to the CPU
    F32,
}

impl From<Rows> for RowPrecision {
    fn from(rows: Rows) -> Self {
        match rows {
            Rows::Bf16 => Self::Bf16,
            Rows::F32 => Self::F32,
        }
    }
}

/// An engine with what it was loaded from.
pub struct Ready {
    pub name: String,
    pub engine: Engine,
    /// `None` when the model's directory has none: prompts are then token ids.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub vocab: usize,
    pub sizes: Sizes,
    /// The stated model of acceptance in one line.
    pub synthetic: Option<String>,
}

impl Ready {
    /// Token ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer()?.encode(text)?)
    }

    /// The tokenizer, which texts need.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        let message =
            "--model: expected a directory with tokenizer.json, or --prompt-tokens instead of a text";
        self.tokenizer.as_deref().context(message)
    }

    /// Random token ids, the same for the same seed.
    pub fn random_prompt(&self, tokens: usize, seed: u64) -> Vec<u32> {
        random_ids(self.vocab, tokens, seed)
    }
}

/// Token ids below `vocab` from a seed.
pub fn random_ids(vocab: usize, tokens: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    };
    (0..tokens).map(|_| next()).collect()
}

impl EngineArgs {
    /// The pool that the rest runs in.
    pub fn pool(&self) -> Result<rayon::ThreadPool> {
        Ok(threads::pool(self.threads.map(NonZeroUsize::get))?)
    }

    /// What to load, with one slot.
    pub fn options(&self) -> LoadOptions {
        LoadOptions {
            target: self.model.clone(),
            drafter: self.drafter.clone(),
            dtype: self.dtype.into(),
            drafter_dtype: self.drafter_dtype.map(Into::into),
            slots: 1,
            context_len: self.context,
            offline: self.offline,
            device: self.device.clone(),
            rows: self.rows.into(),
            random_weights: self.random_weights,
            graphs: !self.no_graphs,
            ..LoadOptions::default()
        }
    }

    /// The device, once a model is loaded the one that it is on.
    pub fn device(&self) -> Result<Device> {
        Ok(canopy_e2e::device::parse(&self.device)?)
    }

    /// Loads the pair with one slot.
    pub fn load(&self, synthetic: &SyntheticArgs) -> Result<Ready> {
        self.load_with(&self.options(), EngineConfig::on(&self.device), synthetic)
    }

    /// Loads the pair of `options` into an engine.
    pub fn load_with(
        &self,
        options: &LoadOptions,
        mut config: EngineConfig,
        synthetic: &SyntheticArgs,
    ) -> Result<Ready> {
        (config.host_walk, config.host_build) = (self.host_walk, self.host_build);
        let Pair { name, target, drafter, tokenizer } = load_pair(options)?;
        let kv_bytes = if self.device()?.is_cpu() { 4 } else { 2 };
        let sizes = Sizes::new(target.config(), drafter.as_ref().map(|drafter| drafter.config()), kv_bytes)
            .kept(options.dtype, options.drafter_dtype(&self.device()?));
        let horizon = drafter.as_ref().map(|drafter| drafter.config().horizon());
        config.synthetic = synthetic.model(horizon)?;
        let stated = config.synthetic.as_ref().zip(horizon);
        let stated = stated.map(|(model, horizon)| crate::synthetic::line(model, horizon));
        if let Some(stated) = &stated {
            eprintln!("{stated}");
        }
        let vocab = target.config().vocab_size;
        let text: Arc<dyn TokenText> = match &tokenizer {
            Some(tokenizer) => tokenizer.clone(),
            None => Arc::new(TokenIds),
        };
        let target = for_engine(target, drafter.is_some(), options)?;
        let drafter = drafter.map(|drafter| Box::new(drafter) as Box<dyn Drafter>);
        let engine = Engine::with_text(target, drafter, text, config)?;
        Ok(Ready { name, engine, tokenizer, vocab, sizes, synthetic: stated })
    }
}

/// Says on stderr how passes ran, where any could have run as a CUDA graph.
pub fn report_passes(counts: PassCounts) {
    let PassCounts { replayed, recorded, plain, refused, kept, bytes } = counts;
    if replayed + recorded + plain > 0 {
        let mebibytes = bytes as f64 / f64::from(1 << 20);
        eprintln!(
            "passes: {replayed} replayed, {recorded} recorded, {plain} kernel by kernel, {refused} refused; {kept} graphs over {mebibytes:.1} MiB"
        );
    }
}

/// How tokens are drawn
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub temperature: f32,
    /// Keeps the K most likely tokens; 0 keeps all
    #[arg(long, default_value_t = 0, value_name = "K")]
    pub top_k: usize,
    /// Of those, keeps the most likely ones that together reach P
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    pub top_p: f32,
    /// Of those, keeps tokens with at least P times the most likely one's probability
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    pub min_p: f32,
    /// The same seed gives the same text in every mode
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    pub fn sampling(&self) -> Sampling {
        let Self { temperature, top_k, top_p, min_p, seed } = *self;
        Sampling { temperature, top_p, top_k, min_p, seed }
    }
}
