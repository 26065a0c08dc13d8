//! From a name to a running pair: the embedded model, a directory, or a hub repository.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use candle_core::{DType, Device};
use canopy_candle::{Solve, Variant};
use serde_json::Value;

use crate::config::{DraftConfig, Table, TargetConfig, target::dedup};
use crate::draft::{DFlash, DraftOptions, Drafter};
use crate::files::ModelFiles;
use crate::model::{ModelOptions, Qwen35};
use crate::target::{Overlapped, Target};
use crate::tokenizer::Tokenizer;
pub use crate::weights::WeightDtype;
use crate::weights::Weights;
use crate::{Error, Result, device, embedded, hub};

/// Context allocated per slot when none is asked for and the model's own is longer.
pub const DEFAULT_CONTEXT_LEN: usize = 8192;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The pair compiled into the binary.
    Embedded,
    /// A directory in Hugging Face layout.
    Directory(PathBuf),
    /// `owner/name` on the hub.
    Hub(String),
}

impl FromStr for ModelSource {
    type Err = Error;

    /// `embedded`, an existing directory, or `owner/name`.
    fn from_str(name: &str) -> Result<Self> {
        if name == "embedded" {
            return Ok(Self::Embedded);
        }
        if Path::new(name).is_dir() {
            return Ok(Self::Directory(name.into()));
        }
        match hub::is_repo_id(name) && !Path::new(name).exists() {
            true => Ok(Self::Hub(name.into())),
            false => {
                let message = "expected `embedded`, a directory, or owner/name of a hub repository".into();
                Err(Error::Config { what: "model".into(), key: name.into(), message })
            }
        }
    }
}

/// What rows are rounded to before products and the delta rule on CUDA; the CPU always takes them in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowPrecision {
    /// bf16, as bf16 checkpoints are run elsewhere.
    #[default]
    Bf16,
    /// f32: slower, and close to the CPU.
    F32,
}

/// What to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The target.
    pub target: ModelSource,
    /// The drafter; `None` loads the embedded drafter with the embedded target and no drafter otherwise.
    pub drafter: Option<ModelSource>,
    /// How weights are kept.
    pub dtype: WeightDtype,
    /// How the drafter's are, and the head's that drafts go through; `None` takes int8 on CUDA, where drafts wait for weights, else `dtype`.
    pub drafter_dtype: Option<WeightDtype>,
    /// Makes the weights from this seed instead of reading them: `config.json` alone is needed.
    pub random_weights: Option<u64>,
    /// Pool slots: streams that run at once.
    pub slots: usize,
    /// Context to allocate; `None` takes the model's own, at most [`DEFAULT_CONTEXT_LEN`].
    pub context_len: Option<usize>,
    /// What rows are rounded to before products and the delta rule on CUDA.
    pub rows: RowPrecision,
    /// Never ask the network.
    pub offline: bool,
    /// `cpu`, `cuda` or `cuda:N`.
    pub device: String,
    /// Form of the delta rule; `None` takes the device's default: `Walk` on the CPU, one triangular solve on CUDA.
    pub variant: Option<Variant>,
    /// Records passes that come again as CUDA graphs; the same bits in less time.
    pub graphs: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            target: ModelSource::Embedded,
            drafter: None,
            dtype: WeightDtype::Stored,
            drafter_dtype: None,
            random_weights: None,
            slots: 4,
            context_len: None,
            rows: RowPrecision::default(),
            offline: false,
            device: "cpu".into(),
            variant: None,
            graphs: true,
        }
    }
}

impl LoadOptions {
    fn bf16_rows(&self, device: &Device) -> bool {
        device.is_cuda() && self.rows == RowPrecision::Bf16
    }

    /// How the drafter's weights are kept on a device.
    pub fn drafter_dtype(&self, device: &Device) -> WeightDtype {
        let usual = if device.is_cuda() { WeightDtype::Int8 } else { self.dtype };
        self.drafter_dtype.unwrap_or(usual)
    }
}

/// A loaded pair.
pub struct Loaded {
    /// Name for `/v1/models`.
    pub name: String,
    /// The target.
    pub target: Box<dyn Target>,
    /// The drafter, if any.
    pub drafter: Option<Box<dyn Drafter>>,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
}

/// A loaded pair without words: what random weights need, whose directory may hold nothing but `config.json`.
pub struct Pair {
    /// Name of the model.
    pub name: String,
    /// The target.
    pub target: Qwen35,
    /// The drafter, if any.
    pub drafter: Option<DFlash>,
    /// The target's tokenizer, where its files are there.
    pub tokenizer: Option<Arc<Tokenizer>>,
}

/// Loads a pair.
///
/// # Errors
/// Whatever is wrong first, naming file and key or tensor; [`Error::Hub`] says what to do without a network.
pub fn load(options: &LoadOptions) -> Result<Loaded> {
    let files = resolve(&options.target, options.offline)?;
    let Pair { name, target, drafter, .. } = load_models(&files, options)?;
    let tokenizer = load_tokenizer(&files, target.config())?;
    let drafter = drafter.map(|drafter| Box::new(drafter) as Box<dyn Drafter>);
    let target = for_engine(target, drafter.is_some(), options)?;
    Ok(Loaded { name, target, drafter, tokenizer: Arc::new(tokenizer) })
}

/// A loaded target as an engine takes it: on the CPU, where there is a drafter, its commits go on beside the drafts.
///
/// # Errors
/// A device of `options` that is not there.
pub fn for_engine(
    target: impl Target + 'static,
    drafts: bool,
    options: &LoadOptions,
) -> Result<Box<dyn Target>> {
    Ok(match drafts && device::parse(&options.device)?.is_cpu() {
        true => Box::new(Overlapped::new(target)),
        false => Box::new(target),
    })
}

/// Loads a pair, and its tokenizer when the target's files have one.
///
/// # Errors
/// Those of [`load`].
pub fn load_pair(options: &LoadOptions) -> Result<Pair> {
    let files = resolve(&options.target, options.offline)?;
    let mut pair = load_models(&files, options)?;
    if files.read("tokenizer.json")?.is_some() {
        pair.tokenizer = Some(Arc::new(load_tokenizer(&files, pair.target.config())?));
    }
    Ok(pair)
}

fn load_models(files: &ModelFiles, options: &LoadOptions) -> Result<Pair> {
    let mut target = load_target(files, options)?;
    let drafter = match resolve_drafter(options)? {
        Some(files) => Some(load_drafter(&files, &mut target, options)?),
        None => None,
    };
    let name = match &options.target {
        ModelSource::Embedded => embedded::NAME.into(),
        ModelSource::Directory(dir) => directory_name(dir),
        ModelSource::Hub(repo) => repo.clone(),
    };
    tracing::info!(model = name, slots = options.slots, context_len = target.context_len(), "model loaded");
    Ok(Pair { name, target, drafter, tokenizer: None })
}

/// The files of a source; asks the hub when it has to.
pub fn resolve(source: &ModelSource, offline: bool) -> Result<ModelFiles> {
    match source {
        ModelSource::Embedded => Ok(embedded::target()),
        ModelSource::Directory(dir) => Ok(ModelFiles::Directory(dir.clone())),
        ModelSource::Hub(repo) => Ok(ModelFiles::Directory(hub::fetch(repo, offline)?)),
    }
}

/// The target alone: `config.json` and weights, no tokenizer.
pub fn load_target(files: &ModelFiles, options: &LoadOptions) -> Result<Qwen35> {
    let what = files.path("config.json").display().to_string();
    let mut config = TargetConfig::from_json(&what, &files.require("config.json")?)?;
    config.eos_token_ids.extend(generation_eos(files)?);
    dedup(&mut config.eos_token_ids);
    let longest = config.max_position_embeddings;
    let context_len = options.context_len.unwrap_or(longest.min(DEFAULT_CONTEXT_LEN));
    if context_len == 0 || context_len > longest {
        let message = format!("expected 1 to max_position_embeddings = {longest}, got {context_len}");
        return Err(Error::Config { what: "load options".into(), key: "context_len".into(), message });
    }
    let device = device::parse(&options.device)?;
    let usual = if device.is_cpu() { Variant::Walk } else { Variant::Solve(Solve::Forward) };
    let variant = options.variant.unwrap_or(usual);
    let rows = if options.bf16_rows(&device) { DType::BF16 } else { DType::F32 };
    let model =
        ModelOptions { slots: options.slots, context_len, variant, rows, device, graphs: options.graphs };
    Qwen35::load(&weights(files, options, options.dtype, &model.device)?, config, model)
}

fn weights(
    files: &ModelFiles,
    options: &LoadOptions,
    dtype: WeightDtype,
    device: &Device,
) -> Result<Weights> {
    let weights = match options.random_weights {
        Some(seed) => Weights::random(seed, dtype),
        None => files.weights(dtype)?,
    };
    Ok(weights.with_bf16_rows(options.bf16_rows(device)))
}

/// End-of-sequence tokens of `generation_config.json`; not every checkpoint has one.
fn generation_eos(files: &ModelFiles) -> Result<Vec<u32>> {
    const FILE: &str = "generation_config.json";
    let Some(bytes) = files.read(FILE)? else { return Ok(Vec::new()) };
    let what = files.path(FILE).display().to_string();
    let value: Value = serde_json::from_slice(&bytes).map_err(|source| Error::Config {
        what: what.clone(),
        key: "(whole file)".into(),
        message: format!("expected JSON, got {source}"),
    })?;
    Table::new(what, &value)?.token_ids("eos_token_id")
}

/// The tokenizer, checked against the model's vocabulary.
pub fn load_tokenizer(files: &ModelFiles, config: &TargetConfig) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::load(files, &config.eos_token_ids)?;
    match tokenizer.vocab_size() <= config.vocab_size {
        true => Ok(tokenizer),
        false => {
            let message =
                format!("expected token ids below {}, got {}", config.vocab_size, tokenizer.vocab_size() - 1);
            let what = files.path("tokenizer.json").display().to_string();
            Err(Error::Config { what, key: "vocab".into(), message })
        }
    }
}

/// The files of the drafter that `options` ask for, if any.
pub fn resolve_drafter(options: &LoadOptions) -> Result<Option<ModelFiles>> {
    match (&options.drafter, &options.target) {
        (Some(ModelSource::Embedded), _) | (None, ModelSource::Embedded) => Ok(Some(embedded::drafter())),
        (Some(source), _) => resolve(source, options.offline).map(Some),
        (None, _) => Ok(None),
    }
}

/// The drafter of a loaded target, which it sets to return the drafter's features.
pub fn load_drafter(files: &ModelFiles, target: &mut Qwen35, options: &LoadOptions) -> Result<DFlash> {
    let what = files.path("config.json").display().to_string();
    let config = DraftConfig::from_json(&what, &files.require("config.json")?, target.config())?;
    let sizes = DraftOptions {
        slots: target.slots(),
        context_len: target.context_len(),
        device: device::parse(&options.device)?,
        graphs: options.graphs,
    };
    let dtype = options.drafter_dtype(&sizes.device);
    let head = match (dtype, options.dtype) {
        (WeightDtype::Int8, kept) if kept != WeightDtype::Int8 => target.head().int8()?,
        _ => target.head(),
    };
    let drafter = DFlash::load(&weights(files, options, dtype, &sizes.device)?, config, head, sizes)?;
    target.set_taps(drafter.taps())?;
    Ok(drafter)
}

fn directory_name(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned())
}
