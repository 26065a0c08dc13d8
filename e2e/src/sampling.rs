//! How a token is drawn from a row of logits, and the log-probabilities reported with it.
//!
//! Temperature 0 is argmax, ties to the lower token id. Above 0 the row becomes a distribution in this order:
//!
//! 1. temperature: `softmax(logits / temperature)` over the whole vocabulary;
//! 2. top-k: the `k` most probable tokens stay (equal ones: the lower id first), 0 keeps all;
//! 3. top-p: of those, renormalised, the shortest most probable run whose sum reaches `top_p` stays;
//! 4. min-p: of those, tokens with at least `min_p` times the top token's probability stay;
//!
//! and what is left, renormalised, is sampled by inverting its cumulative sum at one uniform number. That number is
//! a function of `(seed, absolute position)` alone ([`uniform`]), so a position's token does not depend on the round,
//! the tree or the batch in which the target happened to verify it.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Sampling of one request. Temperature 0 is argmax, ties to the lower token id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 or above.
    pub temperature: f32,
    /// In (0, 1].
    pub top_p: f32,
    /// 0 = off.
    pub top_k: usize,
    /// In [0, 1).
    pub min_p: f32,
    /// Keyed by position: the same seed gives the same text in every mode.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// The token at `position` given its row of logits `[vocab]`, or `None` when a logit is NaN or infinite.
    pub fn pick(&self, logits: &[f32], position: usize) -> Option<u32> {
        let (best, max) = argmax(logits)?;
        if self.temperature == 0.0 {
            return Some(best);
        }
        let weight = |logit: f32| ((logit - max) / self.temperature).exp();
        let u = uniform(self.seed, position);
        if self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0 {
            let weights: Vec<f32> = logits.iter().map(|&logit| weight(logit)).collect();
            return Some(invert(&weights, u) as u32);
        }
        let (ids, weights) = self.truncate(logits, weight);
        Some(ids[invert(&weights, u)])
    }

    /// What top-k, top-p and min-p leave: ids, most probable first, and their weights.
    fn truncate(&self, logits: &[f32], weight: impl Fn(f32) -> f32) -> (Vec<u32>, Vec<f32>) {
        let all = logits.len();
        let limit = if self.top_k == 0 { all } else { self.top_k.min(all) };
        let wanted = f64::from(self.top_p);
        // A nucleus is small almost always: more candidates are ranked only when it is not.
        let mut ranked = if limit == all { limit.min(FIRST_RANKED) } else { limit };
        let total: f64 = if limit == all { logits.iter().map(|&l| f64::from(weight(l))).sum() } else { 0.0 };
        loop {
            let mut ids = top_ids(logits, ranked);
            let mut weights: Vec<f32> = ids.iter().map(|&id| weight(logits[id as usize])).collect();
            let whole = if limit == all { total } else { weights.iter().map(|&w| f64::from(w)).sum() };
            let kept = if self.top_p < 1.0 { nucleus(&weights, wanted * whole) } else { None };
            if kept.is_none() && ranked < limit {
                ranked = limit.min(ranked * 8);
                continue;
            }
            let kept = kept.unwrap_or(ranked);
            let floor = self.min_p * weights[0];
            let kept = weights[..kept].partition_point(|&w| w >= floor);
            ids.truncate(kept);
            weights.truncate(kept);
            return (ids, weights);
        }
    }
}

/// Candidates that a nucleus is first looked for in.
const FIRST_RANKED: usize = 256;

/// Entries of `weights` until their sum reaches `mass`; `None` when all of them do not reach it.
fn nucleus(weights: &[f32], mass: f64) -> Option<usize> {
    let mut sum = 0.0;
    let reached = weights.iter().position(|&weight| {
        sum += f64::from(weight);
        sum >= mass
    });
    reached.map(|last| last + 1)
}

/// The first entry at which the cumulative sum passes `u` times the whole; entries of weight 0 are never taken.
fn invert(weights: &[f32], u: f64) -> usize {
    const RUN: usize = 64;
    let sum = |run: &[f32]| run.iter().map(|&w| f64::from(w)).sum::<f64>();
    let runs: Vec<f64> = weights.chunks(RUN).map(sum).collect();
    let mark = u * runs.iter().sum::<f64>();
    let (mut before, mut first) = (0.0, 0);
    for run in runs {
        if before + run > mark {
            break;
        }
        before += run;
        first += RUN;
    }
    let mut last = 0;
    for (index, &weight) in weights.iter().enumerate().skip(first).filter(|(_, weight)| **weight > 0.0) {
        before += f64::from(weight);
        last = index;
        if before > mark {
            break;
        }
    }
    last
}

/// A uniform number in [0, 1) for one position of one seed: the first 53 bits of block `position` of the ChaCha8
/// stream keyed by `seed`.
pub fn uniform(seed: u64, position: usize) -> f64 {
    const WORDS_PER_BLOCK: u128 = 16;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_word_pos(position as u128 * WORDS_PER_BLOCK);
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// The largest logit and its id, ties to the lower id; `None` when a logit is NaN or infinite, or there is none.
pub fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    const LANES: usize = 16;
    let (mut max, mut poison) = ([f32::NEG_INFINITY; LANES], [0f32; LANES]);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            max[lane] = if chunk[lane] > max[lane] { chunk[lane] } else { max[lane] };
            poison[lane] += chunk[lane] * 0.0;
        }
    }
    let mut best = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut bad: f32 = poison.iter().sum();
    for &x in rest {
        best = best.max(x);
        bad += x * 0.0;
    }
    let id = logits.iter().position(|&x| x == best)?;
    (bad == 0.0).then_some((id as u32, best))
}

/// Ids of the `count` largest logits, best first, ties to the lower id.
pub fn top_ids(logits: &[f32], count: usize) -> Vec<u32> {
    let order = |&a: &u32, &b: &u32| {
        logits[b as usize].partial_cmp(&logits[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
    };
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    if count <= FIRST_RANKED {
        return scan_top_ids(logits, count);
    }
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count - 1, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids
}

/// [`top_ids`] in one pass: few logits pass the worst of the best so far.
fn scan_top_ids(logits: &[f32], count: usize) -> Vec<u32> {
    let mut best: Vec<u32> = Vec::with_capacity(count + 1);
    let mut worst = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() == count && logit <= worst {
            continue;
        }
        // Equal ones that came before have the lower ids and stay in front.
        let place = best.partition_point(|&other| logits[other as usize] >= logit);
        best.insert(place, id as u32);
        best.truncate(count);
        worst = logits[best[best.len() - 1] as usize];
    }
    best
}

/// `ln softmax(logits)[id]` at temperature 1, and the same of the `count` most likely ids, best first.
pub fn log_probs(logits: &[f32], id: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let norm = f64::from(max) + sum.ln();
    let log_prob = |id: u32| (f64::from(logits[id as usize]) - norm) as f32;
    (log_prob(id), top_ids(logits, count).into_iter().map(|top| (top, log_prob(top))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<f64> {
        let mut counts = vec![0usize; logits.len()];
        for position in 0..draws {
            counts[sampling.pick(logits, position).unwrap() as usize] += 1;
        }
        counts.iter().map(|&c| c as f64 / draws as f64).collect()
    }

    #[test]
    fn argmax_takes_the_lower_id_of_equals_and_refuses_non_finite_rows() {
        let mut row = vec![0.5f32; 40];
        assert_eq!(argmax(&row), Some((0, 0.5)));
        row[33] = 2.0;
        row[37] = 2.0;
        assert_eq!(argmax(&row), Some((33, 2.0)));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 20, 39] {
                let mut row = row.clone();
                row[place] = bad;
                assert_eq!(argmax(&row), None, "{bad} at {place}");
            }
        }
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn uniform_depends_on_seed_and_position_and_nothing_else() {
        let mean = (0..10_000).map(|p| uniform(7, p)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert_eq!(uniform(7, 3), uniform(7, 3));
        assert_ne!(uniform(7, 3), uniform(7, 4));
        assert_ne!(uniform(7, 3), uniform(8, 3));
    }

    #[test]
    fn plain_temperature_follows_the_softmax() {
        let logits = [0.0f32, 1.0, -1.0, 2.0];
        let sampling = Sampling { temperature: 2.0, seed: 3, ..Sampling::default() };
        let got = frequencies(sampling, &logits, 40_000);
        let weights: Vec<f64> = logits.iter().map(|&x| f64::from(x / 2.0).exp()).collect();
        for (id, weight) in weights.iter().enumerate() {
            let want = weight / weights.iter().sum::<f64>();
            assert!((got[id] - want).abs() < 0.012, "token {id}: {} against {want}", got[id]);
        }
    }

    #[test]
    fn truncations_keep_exactly_what_their_order_says() {
        // Probabilities 0.4, 0.3, 0.2, 0.1 at temperature 1, in the order of ids 2, 0, 3, 1.
        let logits: Vec<f32> = [0.3f32, 0.1, 0.4, 0.2].iter().map(|p| p.ln()).collect();
        let base = Sampling { temperature: 1.0, seed: 11, ..Sampling::default() };
        let support = |sampling: Sampling| -> Vec<usize> {
            let got = frequencies(sampling, &logits, 4_000);
            (0..4).filter(|&id| got[id] > 0.0).collect()
        };
        assert_eq!(support(Sampling { top_k: 1, ..base }), [2]);
        assert_eq!(support(Sampling { top_k: 3, ..base }), [0, 2, 3]);
        assert_eq!(support(Sampling { top_p: 0.39, ..base }), [2]);
        assert_eq!(support(Sampling { top_p: 0.65, ..base }), [0, 2]);
        assert_eq!(support(Sampling { top_p: 0.85, ..base }), [0, 2, 3]);
        assert_eq!(support(Sampling { min_p: 0.45, ..base }), [0, 2, 3]);
        // After top-k 2 the two are 4/7 and 3/7: top-p 0.5 then keeps one, which top-p first would not.
        assert_eq!(support(Sampling { top_k: 2, top_p: 0.5, ..base }), [2]);
    }

    #[test]
    fn nucleus_wider_than_the_first_guess_is_complete() {
        let logits = vec![0f32; 5_000];
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, seed: 1, ..Sampling::default() };
        assert_eq!(sampling.truncate(&logits, |_| 1.0).1.len(), 4_500);
        let sampling = Sampling { top_k: 1_000, ..sampling };
        assert_eq!(sampling.truncate(&logits, |_| 1.0).0, (0..900).collect::<Vec<u32>>());
        let sampling = Sampling { top_p: 1.0, min_p: 0.5, ..sampling };
        assert_eq!(sampling.truncate(&logits, |_| 1.0).0.len(), 1_000);
    }

    #[test]
    fn top_ids_agree_with_a_full_sort_at_every_count() {
        let logits: Vec<f32> = (0..1500u32).map(|id| (id.wrapping_mul(2_654_435_761) >> 23) as f32).collect();
        let mut sorted: Vec<u32> = (0..1500).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        for count in [0, 1, 2, 20, 255, 256, 257, 1499, 1500, 2000] {
            assert_eq!(top_ids(&logits, count), sorted[..count.min(1500)], "{count}");
        }
    }

    #[test]
    fn inversion_meets_every_edge() {
        assert_eq!(invert(&[0.0, 1.0, 0.0, 1.0, 0.0], 0.0), 1);
        assert_eq!(invert(&[0.0, 1.0, 0.0, 1.0, 0.0], 0.4999), 1);
        assert_eq!(invert(&[0.0, 1.0, 0.0, 1.0, 0.0], 0.5), 3);
        assert_eq!(invert(&[0.0, 1.0, 0.0, 1.0, 0.0], 1.0 - f64::EPSILON / 2.0), 3);
        let many = vec![1.0; 1000];
        for index in [0, 63, 64, 65, 500, 999] {
            assert_eq!(invert(&many, (index as f64 + 0.5) / 1000.0), index);
        }
    }

    #[test]
    fn log_probs_are_the_log_softmax_at_temperature_one() {
        let logits: Vec<f32> = [0.3f32, 0.1, 0.4, 0.2].iter().map(|p| p.ln() + 5.0).collect();
        let (chosen, top) = log_probs(&logits, 1, 2);
        assert!((chosen - 0.1f32.ln()).abs() < 1e-5);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 0]);
        assert!((top[0].1 - 0.4f32.ln()).abs() < 1e-5);
    }
}
