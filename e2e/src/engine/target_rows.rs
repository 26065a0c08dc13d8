//! The target's rows as the accept walk reads them: host logits in place, or a device's, of which as little as possible is copied.

use std::borrow::Cow;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use canopy_candle::{TopRow, top_tokens};

/// What the target says after some rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum TargetRows<'a> {
    /// Logits `[rows, vocab]`.
    Logits(&'a [f32], usize),
    /// Rows on a device, copied one by one as they are read, and the best token of each.
    Apart { logits: &'a Tensor, best: &'a [Option<u32>], first: usize, rows: usize },
    /// The best token of every row alone, `None` for a row that is not finite.
    Best(&'a [Option<u32>]),
}

/// One of [`TargetRows`].
#[derive(Clone, Debug)]
pub(super) enum TargetRow<'a> {
    Logits(Cow<'a, [f32]>),
    Best(Option<u32>),
}

impl<'a> TargetRows<'a> {
    /// Logits `[rows, vocab]` on a device and, for streams that look at nothing else, their best tokens (may be empty).
    pub fn apart(logits: &'a Tensor, best: &'a [Option<u32>]) -> Self {
        Self::Apart { logits, best, first: 0, rows: logits.dims()[0] }
    }

    /// Rows `from..to`.
    pub fn slice(self, from: usize, to: usize) -> Self {
        match self {
            Self::Logits(all, vocab) => Self::Logits(&all[from * vocab..to * vocab], vocab),
            Self::Apart { logits, best, first, .. } => {
                Self::Apart { logits, best, first: first + from, rows: to - from }
            }
            Self::Best(all) => Self::Best(&all[from..to]),
        }
    }

    /// The same rows for a stream that looks at the best tokens alone.
    pub fn best(self) -> Self {
        match self {
            Self::Apart { best, first, rows, .. } => Self::Best(&best[first..first + rows]),
            other => other,
        }
    }

    /// How many rows.
    pub fn len(self) -> usize {
        match self {
            Self::Logits(all, vocab) => all.len() / vocab,
            Self::Apart { rows, .. } => rows,
            Self::Best(all) => all.len(),
        }
    }

    /// One row.
    pub fn row(self, index: usize) -> crate::Result<TargetRow<'a>> {
        Ok(match self {
            Self::Logits(all, vocab) => {
                TargetRow::Logits(Cow::Borrowed(&all[index * vocab..(index + 1) * vocab]))
            }
            Self::Apart { logits, first, .. } => {
                TargetRow::Logits(Cow::Owned(logits.get(first + index)?.to_dtype(DType::F32)?.to_vec1()?))
            }
            Self::Best(all) => TargetRow::Best(all[index]),
        })
    }
}

/// Calls `read` with logits `[rows, vocab]` on the CPU, in place when they are contiguous f32.
pub(super) fn with_host_rows<T>(logits: &Tensor, read: impl FnOnce(&[f32]) -> T) -> crate::Result<T> {
    let logits = logits.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = logits.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(data)), Some((from, to))) => Ok(read(&data[from..to])),
        _ => Err(candle_core::Error::Msg("accept: logits are not f32 on the CPU".into()).into()),
    }
}

/// The best token of every row of logits `[rows, vocab]`, found where they are; `None` for a row that is not finite.
pub(super) fn best_tokens(logits: &Tensor) -> crate::Result<Vec<Option<u32>>> {
    let rows = top_tokens(&logits.to_dtype(DType::F32)?, 1)?.to_vec2::<u32>()?;
    let best = |words: &Vec<u32>| {
        let row = TopRow::new(words)?;
        Ok(row.best().next().filter(|_| row.is_finite()).map(|(token, _)| token))
    };
    rows.iter().map(best).collect()
}
