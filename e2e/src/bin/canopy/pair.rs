//! A target with its drafter on one slot, driven by hand: what `draft` and `tree` share.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use canopy_e2e::draft::{DFlash, DraftRequest, Drafter};
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{self, LoadOptions, ModelSource, WeightDtype};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_kernels::DraftTree;

/// Tokens of a prompt per pass; the results do not depend on it.
const CHUNK: usize = 128;
const SLOT: usize = 0;

/// Which pair to load.
#[derive(clap::Args)]
pub struct PairArgs {
    /// `embedded`, a directory in Hugging Face layout, or owner/name on the hub
    #[arg(long, default_value = "embedded", value_name = "MODEL")]
    model: ModelSource,
    /// The drafter, named like the model; may be left out for the embedded model
    #[arg(long, value_name = "MODEL")]
    drafter: Option<ModelSource>,
    /// `cpu`, `cuda` or `cuda:N`
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Uses only what the hub's cache already holds
    #[arg(long)]
    offline: bool,
}

impl PairArgs {
    /// Files of the target.
    pub fn target_files(&self) -> Result<ModelFiles> {
        Ok(loader::resolve(&self.model, self.offline)?)
    }

    /// Loads both models with one slot.
    pub fn load(&self) -> Result<Pair> {
        let options = LoadOptions {
            target: self.model.clone(),
            drafter: self.drafter.clone(),
            slots: 1,
            drafter_dtype: Some(WeightDtype::Stored),
            offline: self.offline,
            device: self.device.clone(),
            ..LoadOptions::default()
        };
        let files = loader::resolve_drafter(&options)?;
        let files = files.context("--drafter: expected a drafter for this model, got none")?;
        let mut target = loader::load_target(&self.target_files()?, &options)?;
        let drafter = loader::load_drafter(&files, &mut target, &options)?;
        Ok(Pair { target, drafter })
    }
}

/// A target, its drafter, and one sequence in both.
pub struct Pair {
    pub target: Qwen35,
    pub drafter: DFlash,
}

impl Pair {
    /// Commits a text in both models. Returns the logits of its last token `[1, vocab]` and the tap outputs
    /// `[tokens, taps * hidden]`; both `None` for an empty text.
    pub fn read(&mut self, ids: &[u32]) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (mut logits, mut features) = (None, Vec::new());
        for part in ids.chunks(CHUNK) {
            let (last, rows) = self.verify(part, DraftTree::chain(part.len())?, LogitRows::Last)?;
            self.commit(&(0..part.len()).collect::<Vec<_>>(), &rows)?;
            logits = Some(last);
            features.push(rows);
        }
        let features = if features.is_empty() { None } else { Some(Tensor::cat(&features, 0)?) };
        Ok((logits, features))
    }

    /// The target's logits and tap outputs for a tree after the committed text.
    pub fn verify(&mut self, tokens: &[u32], tree: DraftTree, logits: LogitRows) -> Result<(Tensor, Tensor)> {
        let stream = VerifyStream { slot: SLOT, tokens: tokens.to_vec(), tree, logits };
        let verified = self.target.verify(&[stream])?;
        let logits = verified.logits.context("the target returned no logits")?.to_dtype(DType::F32)?;
        Ok((logits, verified.features.context("the target returned no features")?))
    }

    /// Commits a path of the last verify in both models.
    pub fn commit(&mut self, path: &[usize], features: &Tensor) -> Result<()> {
        self.target.commit(&[path.to_vec()])?;
        let rows: Vec<u32> = path.iter().map(|&node| node as u32).collect();
        let rows = Tensor::new(rows, features.device())?;
        Ok(self.drafter.extend(SLOT, &features.index_select(&rows, 0)?)?)
    }

    /// The drafter's logits for the whole block after `root`, `[block_size - 1, vocab]`.
    pub fn draft(&mut self, root: u32) -> Result<Tensor> {
        let horizon = self.drafter.block_size() - 1;
        let drafts = self.drafter.draft(&[DraftRequest { slot: SLOT, root, horizon }])?;
        drafts.into_iter().next().context("the drafter returned no logits")
    }

    /// Refuses a text that with `more` tokens after it would not fit the context.
    pub fn check_length(&self, arg: &str, ids: usize, more: usize) -> Result<()> {
        let most = self.target.context_len();
        ensure!(
            ids + more <= most,
            "{arg}: expected at most {} tokens, got {ids}",
            most.saturating_sub(more)
        );
        Ok(())
    }
}
