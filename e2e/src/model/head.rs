//! The embedding table and the head, shared by the target and its drafter.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use canopy_candle::PackedLinear;

use crate::config::TargetConfig;
use crate::weights::Weights;
use crate::{Error, Result};

/// A cheap handle to the target's embedding table and head; they are one matrix when tied. The drafter has
/// neither of its own and uses these.
#[derive(Clone, Debug)]
pub struct SharedHead {
    table: Arc<PackedLinear>,
    head: Arc<PackedLinear>,
    vocab_size: usize,
    hidden_size: usize,
}

impl SharedHead {
    /// Loads `{prefix}embed_tokens.weight` and, when untied, `lm_head.weight`.
    pub fn load(weights: &Weights, prefix: &str, config: &TargetConfig, device: &Device) -> Result<Self> {
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);
        let name = format!("{prefix}embed_tokens.weight");
        let table = Arc::new(weights.linear(&name, vocab_size, hidden_size, device)?);
        let head = match config.tie_word_embeddings {
            true => table.clone(),
            false => Arc::new(weights.linear("lm_head.weight", vocab_size, hidden_size, device)?),
        };
        Ok(Self { table, head, vocab_size, hidden_size })
    }

    /// A handle whose logits are a little wrong and cost half: for drafts.
    ///
    /// # Errors
    /// Those of [`PackedLinear::rounded`].
    pub fn rounded(&self) -> Result<Self> {
        Ok(Self { head: Arc::new(self.head.rounded()?), ..self.clone() })
    }

    /// A handle whose logits come from int8 weights: for drafts.
    ///
    /// # Errors
    /// Those of [`PackedLinear::int8`].
    pub fn int8(&self) -> Result<Self> {
        Ok(Self { head: Arc::new(self.head.int8()?), ..self.clone() })
    }

    /// Rows of both matrices.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Width of both matrices.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// Embeddings `[ids, hidden]`, f32 on the CPU.
    ///
    /// # Errors
    /// [`Error::Request`] naming `tokens` for an id outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.check_ids(ids)?;
        Ok(self.table.lookup(ids)?)
    }

    /// Checks that every id is in the vocabulary.
    ///
    /// # Errors
    /// [`Error::Request`] naming `tokens` for one that is not.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            let expected = format!("token ids below the vocabulary's {}", self.vocab_size);
            return Err(Error::Request { field: "tokens", expected, got: id.to_string() });
        }
        Ok(())
    }

    /// Logits `[rows, vocab]` of rows that have been through a final norm, `[rows, hidden]`.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward_one(hidden)?)
    }
}
