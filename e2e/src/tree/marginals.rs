//! The drafter's distribution at every depth, cut to the candidates that a tree can use.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use canopy_kernels::{DraftTree, Error as KernelError};
use rayon::prelude::*;

use super::{BuildOptions, row};
use crate::{Error, Result};

/// Logits from which on the rows of one draft are shared out over threads.
const PARALLEL_FROM: usize = 1 << 19;

/// Candidates that depth `depth` (from 1) of a tree of `options.budget` nodes can use: the node of rank r needs
/// its `depth - 1` ancestors and its r better siblings first.
pub fn depth_ranks(options: BuildOptions, depth: usize) -> usize {
    (options.budget + 1).saturating_sub(depth).min(options.top_k)
}

/// The best candidates of every depth: (token, ln p), best first, equal logits by token id, p over the whole
/// vocabulary.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Marginals {
    depths: Vec<Vec<(u32, f64)>>,
}

impl Marginals {
    /// Reads logits `[horizon, vocab]`, `depth_ranks` of them per depth. A row that is no distribution (NaN,
    /// +infinity, nothing but -infinity) ends the horizon before its depth: the tree stays right, only shorter.
    ///
    /// # Errors
    /// When `logits` is not a whole number of rows of `vocab`, or the budget is beyond a draft tree's limit.
    pub fn from_logits(logits: &[f32], vocab: usize, options: BuildOptions) -> Result<Self> {
        if options.budget >= DraftTree::MAX_NODES {
            return Err(Error::Request {
                field: "budget",
                expected: format!("at most {}", DraftTree::MAX_NODES - 1),
                got: options.budget.to_string(),
            });
        }
        if logits.is_empty() {
            return Ok(Self::default());
        }
        if vocab == 0 || !logits.len().is_multiple_of(vocab) {
            let (expected, got) = (Box::new([logits.len() / vocab.max(1), vocab]), Box::new([logits.len()]));
            return Err(KernelError::Shape { op: "draft tree", arg: "logits", expected, got }.into());
        }
        let read = |(index, row): (usize, &[f32])| row::best_tokens(row, depth_ranks(options, index + 1));
        let wanted = options.budget.min(if options.top_k == 0 { 0 } else { logits.len() / vocab });
        let rows = &logits[..wanted * vocab];
        let read: Vec<Option<Vec<(u32, f64)>>> = match rows.len() >= PARALLEL_FROM {
            true => rows.par_chunks(vocab).enumerate().map(read).collect(),
            false => rows.chunks(vocab).enumerate().map(read).collect(),
        };
        let depths: Vec<_> = read.into_iter().map_while(|depth| depth).collect();
        if depths.len() < wanted {
            tracing::debug!(
                depth = depths.len() + 1,
                "drafted logits are no distribution; the tree ends before"
            );
        }
        Ok(Self { depths })
    }

    /// As [`Self::from_logits`], from a tensor `[horizon, vocab]` on any device; contiguous f32 on the CPU is
    /// read in place.
    pub fn from_tensor(logits: &Tensor, options: BuildOptions) -> Result<Self> {
        let (_, vocab) = logits.dims2()?;
        let logits = logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.contiguous()?;
        let (storage, layout) = logits.storage_and_layout();
        match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) => {
                Self::from_logits(&data[start..end], vocab, options)
            }
            _ => Err(candle_core::Error::Msg("draft tree: logits are not f32 on the CPU".into()).into()),
        }
    }

    /// One candidate per depth: (token, ln p).
    pub fn chain(tokens: Vec<(u32, f64)>) -> Self {
        Self { depths: tokens.into_iter().map(|candidate| vec![candidate]).collect() }
    }

    /// The same candidates with other probabilities: `log_prob(depth, rank, ln p)`, cut to the one of the candidate
    /// before, so that they stay best first.
    pub fn map(&self, log_prob: impl Fn(usize, usize, f64) -> f64) -> Self {
        let depths = self.depths.iter().enumerate().map(|(index, candidates)| {
            let mut most = f64::INFINITY;
            let mapped = candidates.iter().enumerate().map(|(rank, &(token, old))| {
                most = most.min(log_prob(index + 1, rank, old));
                (token, most)
            });
            mapped.collect()
        });
        Self { depths: depths.collect() }
    }

    /// Depths that have candidates.
    pub fn horizon(&self) -> usize {
        self.depths.len()
    }

    /// The candidates of `depth` (from 1), best first: (token, ln p).
    pub fn depth(&self, depth: usize) -> &[(u32, f64)] {
        depth.checked_sub(1).and_then(|index| self.depths.get(index)).map_or(&[], Vec::as_slice)
    }
}
