//! The best tokens of every row of logits and the row's log-sum-exp, so that a device's logits need not reach the host.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `logits` | `[N, vocab]` | f32 | in | |
//! | `out` | `[N, 2 + 2 k]` | u32 | out | per row: [`Row`] as words |
//!
//! A row's words are its flags, the bits of `ln_sum = ln sum_i exp(x_i - x_best)` (f32), the bits of the k best logits, best first, and
//! their tokens. Equal logits (0 and -0 too) rank by token, lowest first. `ln p` of token i is `x_i - x_best - ln_sum`.
//!
//! Invariants:
//! 1. Tokens and logits are those of a full sort; `ln_sum` is within 1e-6 of float64 (absolute; it is at most ln vocab).
//!    (`tests::rows_equal_the_oracle`, `tests::equal_logits_rank_by_token`)
//! 2. A row's words depend on that row alone. (`tests::rows_alone_equal_rows_together`)
//! 3. NaN and infinities are flagged, in their row alone; a row without NaN or +infinity keeps its ranks, -infinity last.
//!    (`tests::nonfinite_logits_are_flagged`)
//! 4. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA two launches: one pass over the logits that leaves the best of every 128, then a block a row that sorts those, takes the
//! k best segments (which hold the k best logits) and sorts what is in them. Limits there: k up to 64, vocab up to 524,288.
//! (`tests/gpu/top_tokens.rs`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;

use crate::error::expect_len;
use crate::{Error, Result};

const OP: &str = "top-tokens";

/// The most tokens of one row that the CUDA kernels find.
pub const MOST_K_ON_CUDA: usize = 64;

/// Words of one row before its logits.
const HEAD: usize = 2;

/// A row's flags when it holds finite logits alone.
pub const FINITE: u32 = 0;

/// A row holds NaN or +infinity, or nothing but -infinity: it is no distribution.
pub const NO_DISTRIBUTION: u32 = 1;

/// A row that is a distribution holds -infinity.
pub const FORBIDDEN: u32 = 2;

/// Words of one row of `out`.
pub const fn row_words(k: usize) -> usize {
    HEAD + 2 * k
}

/// One row's result.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    words: &'a [u32],
}

impl<'a> Row<'a> {
    /// Reads the words of one row.
    ///
    /// # Errors
    /// When there are not `2 + 2 k` words for some k of at least 1.
    pub fn new(words: &'a [u32]) -> Result<Self> {
        if words.len() > HEAD && words.len().is_multiple_of(2) {
            return Ok(Self { words });
        }
        let (expected, got) = ("2 + 2 k words".into(), words.len().to_string());
        Err(Error::Value { op: OP, arg: "row", expected, got })
    }

    fn k(&self) -> usize {
        (self.words.len() - HEAD) / 2
    }

    /// True when neither NaN nor an infinity is among the logits.
    pub fn is_finite(&self) -> bool {
        self.words[0] == FINITE
    }

    /// True when the logits give every token a probability: no NaN, no +infinity, not -infinity alone.
    pub fn is_distribution(&self) -> bool {
        self.words[0] & NO_DISTRIBUTION == 0
    }

    /// `ln sum_i exp(x_i - x_best)`; NaN when the row is no distribution.
    pub fn ln_sum(&self) -> f32 {
        f32::from_bits(self.words[1])
    }

    /// (token, logit), best first.
    pub fn best(&self) -> impl ExactSizeIterator<Item = (u32, f32)> + use<'a> {
        let (logits, tokens) = self.words[HEAD..].split_at(self.k());
        tokens.iter().copied().zip(logits.iter().map(|&bits| f32::from_bits(bits)))
    }

    /// (token, ln p), best first, as f64 differences of what the row holds; tokens of probability 0 are left out.
    pub fn candidates(&self) -> impl Iterator<Item = (u32, f64)> + use<'a> {
        let best = self.best().next().map_or(0.0, |(_, logit)| f64::from(logit));
        let ln_sum = f64::from(self.ln_sum());
        let possible = self.best().filter(|(_, logit)| *logit > f32::NEG_INFINITY);
        possible.map(move |(token, logit)| (token, (f64::from(logit) - best - ln_sum).min(0.0)))
    }
}

/// Checks the arguments of both devices; returns N.
fn check(logits: usize, vocab: usize, k: usize, out: usize) -> Result<usize> {
    if vocab == 0 {
        return Err(Error::Value { op: OP, arg: "vocab", expected: "at least 1".into(), got: "0".into() });
    }
    if k == 0 || k > vocab {
        let expected = format!("from 1 to the vocabulary's {vocab}");
        return Err(Error::Value { op: OP, arg: "k", expected, got: k.to_string() });
    }
    let rows = logits / vocab;
    expect_len(OP, "logits", &[rows, vocab], logits)?;
    expect_len(OP, "out", &[rows, row_words(k)], out)?;
    Ok(rows)
}
