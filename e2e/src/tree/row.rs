//! One row of logits: its log-sum-exp over the whole vocabulary and its best tokens.
//!
//! Every value is rounded in one fixed order, multiply-adds once: the same bits on every machine.

/// Values that one pass of the vectorised loops takes together.
const LANES: usize = 16;

/// `exp(x)` for `x <= 0`, relative error about 1e-7; NaN stays NaN, below -87 is as -87 (1.6e-38).
#[inline(always)]
fn exp_non_positive(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let p = 1.987_569_1e-4f32
        .mul_add(r, 1.398_2e-3)
        .mul_add(r, 8.333_452e-3)
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 0.5)
        .mul_add(r, 1.0)
        .mul_add(r, 1.0);
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

#[inline(always)]
fn block_maxima_body(row: &[f32], width: usize, maxima: &mut [f32]) {
    for (block, best) in row.chunks(width).zip(maxima) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let groups = block.chunks_exact(LANES);
        *best = f32::NEG_INFINITY;
        for &x in groups.remainder() {
            *best = if x > *best { x } else { *best };
        }
        for group in groups {
            for (lane, &x) in lanes.iter_mut().zip(group) {
                *lane = if x > *lane { x } else { *lane };
            }
        }
        for lane in lanes {
            *best = if lane > *best { lane } else { *best };
        }
    }
}

#[inline(always)]
fn sum_exp_body(row: &[f32], max: f32) -> f64 {
    let mut total = 0f64;
    for part in row.chunks(1024) {
        let mut lanes = [0f32; LANES];
        let groups = part.chunks_exact(LANES);
        let rest: f32 = groups.remainder().iter().map(|&x| exp_non_positive(x - max)).sum();
        for group in groups {
            for (lane, &x) in lanes.iter_mut().zip(group) {
                *lane += exp_non_positive(x - max);
            }
        }
        total += f64::from(lanes.iter().sum::<f32>()) + f64::from(rest);
    }
    total
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn block_maxima_avx2(row: &[f32], width: usize, maxima: &mut [f32]) {
    block_maxima_body(row, width, maxima);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn sum_exp_avx2(row: &[f32], max: f32) -> f64 {
    sum_exp_body(row, max)
}

fn block_maxima(row: &[f32], width: usize, maxima: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, checked on the line above.
        return unsafe { block_maxima_avx2(row, width, maxima) };
    }
    block_maxima_body(row, width, maxima);
}

fn sum_exp(row: &[f32], max: f32) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has AVX2 and FMA, checked on the line above.
        return unsafe { sum_exp_avx2(row, max) };
    }
    sum_exp_body(row, max)
}

/// Width of the blocks whose maxima bound the k-th best logit: few blocks, but several times `k`.
fn block_width(vocab: usize, k: usize) -> usize {
    (vocab / (4 * k).max(256)).next_power_of_two().clamp(LANES, 256)
}

/// The best `k` tokens of `row`, best first, equal logits by token id, as (token, ln p) with p over the whole
/// row. Tokens of probability 0 are left out. `None` when the row holds NaN or +infinity, or nothing but
/// -infinity: such a row has no distribution.
pub(super) fn best_tokens(row: &[f32], k: usize) -> Option<Vec<(u32, f64)>> {
    let k = k.min(row.len());
    let width = block_width(row.len(), k);
    let mut maxima = vec![f32::NEG_INFINITY; row.len().div_ceil(width)];
    block_maxima(row, width, &mut maxima);
    let max = maxima.iter().copied().fold(f32::NEG_INFINITY, |a, x| if x > a { x } else { a });
    if !max.is_finite() {
        return None;
    }
    let sum = sum_exp(row, max);
    if !sum.is_finite() {
        return None;
    }
    let log_sum = f64::from(max) + sum.ln();
    let mut best = candidates(row, k, width, &maxima);
    best.truncate(k);
    Some(best.into_iter().map(|(token, x)| (token, (f64::from(x) - log_sum).min(0.0))).collect())
}

/// At least the best `k` tokens with a logit above -infinity (all of them when there are fewer), best first.
fn candidates(row: &[f32], k: usize, width: usize, maxima: &[f32]) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    // k blocks have a maximum at or above the k-th largest maximum, hence k logits are at or above it.
    let floor = match k <= maxima.len() {
        true => *maxima.to_vec().select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1,
        false => f32::NEG_INFINITY,
    };
    let mut best = Vec::with_capacity(4 * k);
    for (index, block) in row.chunks(width).enumerate().filter(|&(index, _)| maxima[index] >= floor) {
        let first = index * width;
        let kept = block.iter().enumerate().filter(|&(_, &x)| x >= floor && x > f32::NEG_INFINITY);
        best.extend(kept.map(|(i, &x)| ((first + i) as u32, x)));
    }
    let order = |a: &(u32, f32), b: &(u32, f32)| {
        b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0))
    };
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, order);
        best.truncate(k);
    }
    best.sort_unstable_by(order);
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic values without a generator's dependency.
    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..n)
            .map(|_| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (x >> 8) as f32 / (1 << 20) as f32 - 8.0
            })
            .collect()
    }

    fn slow(row: &[f32], k: usize) -> Vec<(u32, f64)> {
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        let mut all: Vec<(u32, f32)> = row.iter().enumerate().map(|(i, &x)| (i as u32, x)).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        all.into_iter().take(k).map(|(i, x)| (i, f64::from(x) - sum.ln())).collect()
    }

    #[test]
    fn best_tokens_are_those_of_a_full_sort() {
        for (seed, n) in [1, 5, 16, 17, 31, 512, 1000, 6144, 70_001].into_iter().enumerate() {
            let mut row = values(n, seed as u32);
            if n > 600 {
                row[600] = row[3];
                row[n - 1] = row[3];
            }
            for k in [1, 2, 15, 64, 255, 400, n + 3] {
                let got = best_tokens(&row, k).expect("finite row");
                let want = slow(&row, k);
                assert_eq!(got.len(), k.min(n));
                for (g, w) in got.iter().zip(&want) {
                    assert_eq!(g.0, w.0, "n {n}, k {k}");
                    assert!((g.1 - w.1).abs() < 1e-6, "n {n}, k {k}: {} and {}", g.1, w.1);
                }
            }
        }
    }

    #[test]
    fn equal_logits_rank_by_token_id() {
        let row = vec![0.25f32; 6144];
        let got = best_tokens(&row, 40).expect("finite row");
        assert!(got.iter().enumerate().all(|(i, &(token, _))| token == i as u32));
        let mixed = [0.0, -0.0, 1.0, 0.0];
        let tokens: Vec<u32> = best_tokens(&mixed, 4).expect("finite row").iter().map(|t| t.0).collect();
        assert_eq!(tokens, [2, 0, 1, 3]);
    }

    #[test]
    fn rows_without_a_distribution_give_none() {
        for bad in [f32::NAN, f32::INFINITY] {
            for place in [0, 700, 6143] {
                let mut row = values(6144, 3);
                row[place] = bad;
                assert_eq!(best_tokens(&row, 8), None, "{bad} at {place}");
            }
        }
        assert_eq!(best_tokens(&[f32::NEG_INFINITY; 40], 8), None);
        assert_eq!(best_tokens(&[], 8), None);
    }

    #[test]
    fn tokens_of_probability_zero_are_left_out() {
        let mut row = vec![f32::NEG_INFINITY; 100];
        (row[40], row[90]) = (1.0, 3.0);
        let got = best_tokens(&row, 8).expect("two finite logits");
        assert_eq!(got.iter().map(|t| t.0).collect::<Vec<_>>(), [90, 40]);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn vector_and_portable_bodies_give_the_same_bits() {
        for n in [1, 16, 100, 6144, 6150] {
            let row = values(n, 9);
            assert_eq!(sum_exp(&row, 8.0).to_bits(), sum_exp_body(&row, 8.0).to_bits());
            let (mut a, mut b) = (vec![0.0; n.div_ceil(32)], vec![0.0; n.div_ceil(32)]);
            block_maxima(&row, 32, &mut a);
            block_maxima_body(&row, 32, &mut b);
            assert_eq!(a, b);
        }
    }

    #[test]
    fn exp_is_accurate_and_keeps_nan() {
        for i in 0..=8700 {
            let x = -(i as f32) / 100.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp_non_positive(x)) / want - 1.0).abs() < 4e-7, "{x}");
        }
        assert!(exp_non_positive(f32::NAN).is_nan());
        assert!(exp_non_positive(f32::NEG_INFINITY) < 1e-37);
    }
}
