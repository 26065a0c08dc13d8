//! Long parts of prompts: passes of their own, before the round of the streams that decode.
//!
//! A part ends where a prefix is to be saved or with its prompt. Whether it is long, and where its slices lie, depends on the request alone; how many
//! slices a pass reads depends on who else runs. Targets whose bits do not depend on which slices share a pass thus read a prompt in one
//! way only.

use std::time::Instant;

use canopy_kernels::DraftTree;

use super::plan::{Work, fair_shares};
use super::{Engine, EngineConfig, StageTimes, Stream};
use crate::Result;
use crate::target::{LogitRows, PromptChunk};

/// Rows of a part that go along with the trees of a round: about what they cost beside them is what the weights cost again.
pub(super) const SHORT: usize = 128;
/// Rows of a slice; a pass reads whole ones, but for the end of a part.
const SLICE: usize = DraftTree::MAX_NODES;

impl EngineConfig {
    /// Whether long parts of prompts have passes of their own.
    pub(super) fn reads_long(&self) -> bool {
        self.prefill_chunk > SLICE
    }
}

impl Stream {
    /// Rows of the long part that it is in.
    pub(super) fn long_rows(&self) -> usize {
        self.long_until.saturating_sub(self.prefilled)
    }

    /// Enters the next part, when that is long.
    fn enter_part(&mut self) {
        let rows = self.readable();
        // Logits of thousands of rows at once would take gigabytes.
        if self.long_rows() == 0 && rows > SHORT && self.prompt_logprobs.is_none() {
            self.long_until = self.prefilled + rows;
        }
    }

    fn chunk(&self, rows: usize) -> PromptChunk {
        PromptChunk {
            slot: self.slot,
            tokens: self.prompt[self.prefilled..][..rows].to_vec(),
            logits: if rows == self.unread() { LogitRows::Last } else { LogitRows::None },
            features: self.features.is_some(),
        }
    }
}

impl Engine {
    /// Reads what a round may of long parts, and gives the seconds that it took.
    pub(super) fn read_long(&mut self) -> Result<f64> {
        if !self.config.reads_long() {
            return Ok(0.0);
        }
        self.running.iter_mut().for_each(Stream::enter_part);
        let work = self.long_work();
        if work.is_empty() {
            return Ok(0.0);
        }
        let clock = Instant::now();
        let span = tracing::debug_span!("prefill", streams = work.len()).entered();
        let rows = |work: &Work| self.running[work.index].chunk(work.rows());
        let read = self.target.prefill(&work.iter().map(rows).collect::<Vec<_>>())?;
        let outcomes = self.accept(&work, read.logits.as_ref(), &read.logit_rows)?;
        let paths: Vec<Vec<usize>> = outcomes.iter().map(|outcome| outcome.path.clone()).collect();
        self.keep_features(&work, (read.features.as_ref(), &read.cu_rows), &paths)?;
        self.settle(read.logits.as_ref().or(read.features.as_ref()))?;
        self.save_prefixes(&work, &outcomes)?;
        drop(span);
        let seconds = clock.elapsed().as_secs_f64();
        self.report(work, outcomes, StageTimes { prefill: seconds, ..StageTimes::default() });
        Ok(seconds)
    }

    /// Slices of this pass, shared out fairly among the streams that read long parts.
    fn long_work(&self) -> Vec<Work> {
        let beside = self.running.iter().any(|stream| stream.long_rows() == 0);
        let rows = if beside { self.config.prefill_beside } else { self.config.prefill_chunk };
        let wanted: Vec<usize> =
            self.running.iter().map(|stream| stream.long_rows().div_ceil(SLICE)).collect();
        let shares = fair_shares(&wanted, (rows / SLICE).max(1));
        let work = |(index, slices): (usize, usize)| {
            Work::prompt(index, (slices * SLICE).min(self.running[index].long_rows()))
        };
        shares.into_iter().enumerate().filter(|&(_, slices)| slices > 0).map(work).collect()
    }
}

/// Parts of at most [`SHORT`] rows that share a round: whole ones, as many as come first and fit into a slice.
pub(super) fn short_parts(readable: &[usize]) -> Vec<usize> {
    let mut left = SLICE;
    let part = |&rows: &usize| {
        let rows = rows.min(SHORT);
        let taken = if rows <= left { rows } else { 0 };
        left -= taken;
        taken
    };
    readable.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_parts_stay_whole() {
        assert_eq!(short_parts(&[100, 0, 100, 100, 56]), [100, 0, 100, 0, 56]);
        assert_eq!(short_parts(&[1000, 128, 1]), [128, 128, 0]);
    }
}
