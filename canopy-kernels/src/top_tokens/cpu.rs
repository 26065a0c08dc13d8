//! CPU forward: one scan for the best, one for the sum.

use std::cmp::Ordering;

use super::{FORBIDDEN, HEAD, NO_DISTRIBUTION, check, row_words};
use crate::Result;
use crate::math::{exp, vectorised};

/// Partial sums; their number is part of the result's bits.
const LANES: usize = 16;

/// `logits` `[N, vocab]` -> `out` `[N, 2 + 2 k]`; see the room's page.
///
/// # Errors
/// A wrong length, no vocabulary, or k outside 1 to `vocab`.
pub fn forward(vocab: usize, k: usize, logits: &[f32], out: &mut [u32]) -> Result<()> {
    check(logits.len(), vocab, k, out.len())?;
    for (row, out) in logits.chunks_exact(vocab).zip(out.chunks_exact_mut(row_words(k))) {
        let best = best(row, k);
        let ln_sum = ln_sum(row, best[0].1);
        let no_distribution = !ln_sum.is_finite();
        let forbidden = row.contains(&f32::NEG_INFINITY);
        out[0] = match (no_distribution, forbidden) {
            (true, _) => NO_DISTRIBUTION,
            (false, true) => FORBIDDEN,
            (false, false) => 0,
        };
        out[1] = if no_distribution { f32::NAN } else { ln_sum }.to_bits();
        for (i, &(token, logit)) in best.iter().enumerate() {
            out[HEAD + i] = logit.to_bits();
            out[HEAD + k + i] = token;
        }
    }
    Ok(())
}

/// NaN above everything, 0 and -0 equal.
fn order(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// The k best in one pass: few logits pass the worst of the best so far.
fn best(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(k + 1);
    for (token, &logit) in row.iter().enumerate() {
        if best.len() == k && order(logit, best[k - 1].1) != Ordering::Greater {
            continue;
        }
        // Equal ones that came before have the lower tokens and stay in front.
        let place = best.partition_point(|&(_, other)| order(other, logit) != Ordering::Less);
        best.insert(place, (token as u32, logit));
        best.truncate(k);
    }
    best
}

vectorised!(fn sum_of_exp(row: &[f32], max: f32) -> f64 = sum_of_exp_body);

#[inline(always)]
fn sum_of_exp_body<const FMA: bool>(row: &[f32], max: f32) -> f64 {
    let mut total = 0f64;
    for part in row.chunks(64 * LANES) {
        let mut sums = [0f32; LANES];
        let (chunks, tail) = part.as_chunks::<LANES>();
        for chunk in chunks {
            for (sum, &x) in sums.iter_mut().zip(chunk) {
                *sum += exp::<FMA>(x - max);
            }
        }
        for (sum, &x) in sums.iter_mut().zip(tail) {
            *sum += exp::<FMA>(x - max);
        }
        total += sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    }
    total
}

/// NaN or infinite when the row is no distribution.
fn ln_sum(row: &[f32], max: f32) -> f32 {
    sum_of_exp(row, max).ln() as f32
}
