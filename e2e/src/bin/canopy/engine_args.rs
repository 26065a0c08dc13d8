//! What `generate` and `bench` share: the pair to load, the pool to run in, how tokens are drawn.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::Result;
use canopy_e2e::engine::{Engine, EngineConfig, Sampling};
use canopy_e2e::loader::{LoadOptions, ModelSource, RowPrecision, WeightDtype, load};
use canopy_e2e::threads;
use canopy_e2e::tokenizer::Tokenizer;
use clap::ValueEnum;

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
    pub tokenizer: Arc<Tokenizer>,
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
            dtype: match self.dtype {
                Dtype::Stored => WeightDtype::Stored,
                Dtype::Bf16 => WeightDtype::Bf16,
                Dtype::F32 => WeightDtype::F32,
            },
            slots: 1,
            context_len: self.context,
            offline: self.offline,
            device: self.device.clone(),
            rows: self.rows.into(),
            random_weights: self.random_weights,
            ..LoadOptions::default()
        }
    }

    /// Loads the pair.
    pub fn load(&self) -> Result<Ready> {
        let loaded = load(&self.options())?;
        let tokenizer = loaded.tokenizer;
        let engine = Engine::new(loaded.target, loaded.drafter, tokenizer.clone(), EngineConfig::default())?;
        Ok(Ready { name: loaded.name, engine, tokenizer })
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
