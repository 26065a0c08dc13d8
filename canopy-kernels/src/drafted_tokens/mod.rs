//! The tokens of trees whose shape the host knows and whose candidates only the drafter's device does: chains, above all. What a draft gave
//! goes into the lists that its verify pass reads, without the host between the two.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `best` | `[R, 2 + 2 k]` | u32 | in | [`crate::top_tokens`] of the drafts' logits |
//! | `sources` | `[N]` | i32 | in | [`source`] of every node's token, -1 keeps what is there |
//! | `tokens` | `[N]` | u32 | in and out | every node's token |
//!
//! Invariants:
//! 1. A node's token is the one that its source names, or what it was. (`tests::tokens_are_those_of_their_sources`)
//! 2. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA one launch, a thread a node. (`tests/gpu/drafted_tokens.rs`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
#[cfg(test)]
mod tests;

use crate::error::expect_len;
use crate::top_tokens::row_words;
use crate::{Error, Result};

const OP: &str = "drafted-tokens";

/// The token of a rank, from 0, in row `row` of drafts of which the best `k` are known.
pub const fn source(row: usize, rank: usize, k: usize) -> i32 {
    (row * k + rank) as i32
}

/// Checks the arguments of both devices.
fn check(k: usize, best: usize, sources: &[i32], tokens: usize) -> Result<()> {
    if k == 0 {
        return Err(Error::Value { op: OP, arg: "k", expected: "at least 1".into(), got: "0".into() });
    }
    let rows = best / row_words(k);
    expect_len(OP, "best", &[rows, row_words(k)], best)?;
    expect_len(OP, "tokens", &[sources.len()], tokens)?;
    match sources.iter().find(|&&source| source < -1 || source >= 0 && source as usize >= rows * k) {
        None => Ok(()),
        Some(source) => {
            let expected = format!("-1 or below {}, the candidates of {rows} rows", rows * k);
            Err(Error::Value { op: OP, arg: "sources", expected, got: source.to_string() })
        }
    }
}
