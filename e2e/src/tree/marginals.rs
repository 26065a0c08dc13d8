//! The drafter's distribution at every depth, cut to the candidates that a tree can use.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use canopy_candle::{TopRow, most_top_tokens, top_tokens};
use canopy_kernels::{DraftTree, Error as KernelError};
use rayon::prelude::*;

use super::{BuildOptions, row};
use crate::{Error, Result, pool};

/// Logits from which on the rows of one draft are shared out over threads, which a pass before has left awake.
const PARALLEL_FROM: usize = 1 << 13;

/// Candidates that depth `depth` (from 1) of a tree of `options.budget` nodes can use: the node of rank r needs
/// its `depth - 1` ancestors and its r better siblings first.
pub fn depth_ranks(options: BuildOptions, depth: usize) -> usize {
    (options.budget + 1).saturating_sub(depth).min(options.top_k)
}

fn check_budget(options: BuildOptions) -> Result<()> {
    if options.budget < DraftTree::MAX_NODES {
        return Ok(());
    }
    let expected = format!("at most {}", DraftTree::MAX_NODES - 1);
    Err(Error::Request { field: "budget", expected, got: options.budget.to_string() })
}

/// Depths of `horizon` that a tree can use.
fn wanted_depths(horizon: usize, options: BuildOptions) -> usize {
    options.budget.min(if options.top_k == 0 { 0 } else { horizon })
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
        check_budget(options)?;
        if logits.is_empty() {
            return Ok(Self::default());
        }
        if vocab == 0 || !logits.len().is_multiple_of(vocab) {
            let (expected, got) = (Box::new([logits.len() / vocab.max(1), vocab]), Box::new([logits.len()]));
            return Err(KernelError::Shape { op: "draft tree", arg: "logits", expected, got }.into());
        }
        let read = |(index, row): (usize, &[f32])| row::best_tokens(row, depth_ranks(options, index + 1));
        let wanted = wanted_depths(logits.len() / vocab, options);
        let rows = &logits[..wanted * vocab];
        let read: Vec<Option<Vec<(u32, f64)>>> = match rows.len() >= PARALLEL_FROM {
            true => pool::run(|| rows.par_chunks(vocab).enumerate().map(read).collect()),
            false => rows.chunks(vocab).enumerate().map(read).collect(),
        };
        Ok(Self::until_none(read, wanted))
    }

    /// The depths before the first one without a distribution.
    fn until_none(read: impl IntoIterator<Item = Option<Vec<(u32, f64)>>>, wanted: usize) -> Self {
        let depths: Vec<_> = read.into_iter().map_while(|depth| depth).collect();
        if depths.len() < wanted {
            tracing::debug!(
                depth = depths.len() + 1,
                "drafted logits are no distribution; the tree ends before"
            );
        }
        Self { depths }
    }

    /// As [`Self::from_logits`], from a tensor `[horizon, vocab]` on any device; contiguous f32 on the CPU is
    /// read in place, and from another device only the candidates are copied.
    pub fn from_tensor(logits: &Tensor, options: BuildOptions) -> Result<Self> {
        let (horizon, vocab) = logits.dims2()?;
        let most = depth_ranks(options, 1).min(vocab);
        if !logits.device().is_cpu() && most <= most_top_tokens(logits.device()) {
            check_budget(options)?;
            return match wanted_depths(horizon, options) {
                0 => Ok(Self::default()),
                wanted => {
                    let rows = top_tokens(&logits.narrow(0, 0, wanted)?, most)?.to_vec2()?;
                    Self::from_top_tokens(&rows, options)
                }
            };
        }
        let logits = logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.contiguous()?;
        let (storage, layout) = logits.storage_and_layout();
        match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) => {
                Self::from_logits(&data[start..end], vocab, options)
            }
            _ => Err(candle_core::Error::Msg("draft tree: logits are not f32 on the CPU".into()).into()),
        }
    }

    /// [`Self::from_tensor`] of several drafts whose logits lie one below the other, each with its number of rows. From another device than
    /// the CPU the candidates of all of them are copied at once.
    ///
    /// # Errors
    /// Those of [`Self::from_tensor`]; when the rows are not those of the drafts.
    pub fn from_packed(logits: &Tensor, drafts: &[(usize, BuildOptions)]) -> Result<Vec<Self>> {
        let (rows, vocab) = logits.dims2()?;
        let wanted = drafts.iter().map(|(horizon, _)| horizon).sum::<usize>();
        if rows != wanted {
            let (expected, got) = (Box::new([wanted, vocab]), Box::new([rows, vocab]));
            return Err(KernelError::Shape { op: "draft tree", arg: "logits", expected, got }.into());
        }
        let most = drafts.iter().map(|&(_, options)| depth_ranks(options, 1)).max().unwrap_or(0).min(vocab);
        let mut first = 0;
        if logits.device().is_cpu() || !(1..=most_top_tokens(logits.device())).contains(&most) {
            let one = |&(horizon, options): &(usize, BuildOptions)| {
                first += horizon;
                Self::from_tensor(&logits.narrow(0, first - horizon, horizon)?, options)
            };
            return drafts.iter().map(one).collect();
        }
        let rows = top_tokens(logits, most)?.to_vec2()?;
        let one = |&(horizon, options): &(usize, BuildOptions)| {
            check_budget(options)?;
            first += horizon;
            Self::from_top_tokens(&rows[first - horizon..][..wanted_depths(horizon, options)], options)
        };
        drafts.iter().map(one).collect()
    }

    /// From what [`top_tokens`] gives for the wanted depths.
    fn from_top_tokens(rows: &[Vec<u32>], options: BuildOptions) -> Result<Self> {
        let mut read = Vec::with_capacity(rows.len());
        for (index, words) in rows.iter().enumerate() {
            let row = TopRow::new(words)?;
            let candidates = row.candidates().take(depth_ranks(options, index + 1)).collect();
            read.push(row.is_distribution().then_some(candidates));
        }
        Ok(Self::until_none(read, rows.len()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_read_from_top_tokens_are_those_of_the_logits() {
        let (horizon, vocab) = (6, 500);
        let mut logits: Vec<f32> =
            (0..horizon * vocab).map(|i| ((i * 7919) % 2003) as f32 / 150.0 - 6.0).collect();
        logits[vocab..vocab + 490].fill(f32::NEG_INFINITY);
        for bad in [None, Some(3)] {
            if let Some(depth) = bad {
                logits[depth * vocab + 9] = f32::NAN;
            }
            for (budget, top_k) in [(16, usize::MAX), (40, usize::MAX), (4, 2), (5, 1)] {
                let options = BuildOptions { budget, top_k };
                let want = Marginals::from_logits(&logits, vocab, options).unwrap();
                let wanted = wanted_depths(horizon, options);
                let rows =
                    Tensor::from_slice(&logits[..wanted * vocab], (wanted, vocab), &Device::Cpu).unwrap();
                let rows = top_tokens(&rows, depth_ranks(options, 1)).unwrap().to_vec2().unwrap();
                let got = Marginals::from_top_tokens(&rows, options).unwrap();
                assert_eq!(got.horizon(), want.horizon());
                for depth in 1..=want.horizon() {
                    let tokens = |of: &Marginals| of.depth(depth).iter().map(|c| c.0).collect::<Vec<_>>();
                    assert_eq!(tokens(&got), tokens(&want), "depth {depth}, budget {budget}");
                    for (got, want) in got.depth(depth).iter().zip(want.depth(depth)) {
                        assert!((got.1 - want.1).abs() < 2e-6, "depth {depth}: {} and {}", got.1, want.1);
                    }
                }
            }
        }
    }
}
