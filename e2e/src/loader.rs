//! From a name to a running pair: the embedded model, a directory, or a hub repository.

use std::path::PathBuf;
use std::sync::Arc;

use crate::Result;
use crate::draft::Drafter;
use crate::target::Target;
use crate::tokenizer::Tokenizer;

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

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// As stored in the file.
    Stored,
    /// Rounded to bf16.
    Bf16,
    /// Widened to f32.
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
    /// Pool slots: streams that run at once.
    pub slots: usize,
    /// Context to allocate; `None` takes the model's own, at most what the engine's default allows.
    pub context_len: Option<usize>,
    /// Never ask the network.
    pub offline: bool,
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

/// Loads a pair.
pub fn load(options: &LoadOptions) -> Result<Loaded> {
    let _ = options;
    unimplemented!()
}
