//! Rotary embedding: sines and cosines of `position * inv_freq`, and the rotate-half step.

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

/// pi/2 minus its nearest f64.
const FRAC_PI_2_LOW: f64 = 6.123_233_995_736_766e-17;

/// Cosine and sine of the f32 product `position * inv_freq[i]`, each within one f32 ulp. The product is rounded to
/// f32 as transformers does; the reduction runs in f64, good to 1e-10 up to 2^22 radians.
#[inline(always)]
pub(super) fn angles(position: i32, inv_freq: &[f32], cos: &mut [f32], sin: &mut [f32]) {
    for ((&freq, cos), sin) in inv_freq.iter().zip(cos).zip(sin) {
        let angle = f64::from(position as f32 * freq);
        let quarter = (angle * FRAC_2_PI).round_ties_even();
        let r = (angle - quarter * FRAC_PI_2) - quarter * FRAC_PI_2_LOW;
        let (s, c) = (sin_reduced(r), cos_reduced(r));
        let turn = (quarter as i64) & 3;
        let (s, c) = if turn & 1 == 1 { (c, s) } else { (s, c) };
        *sin = if turn & 2 == 2 { -s } else { s } as f32;
        *cos = if (turn + 1) & 2 == 2 { -c } else { c } as f32;
    }
}

/// Taylor series of sin on `|r| <= pi/4`, error below 1e-11.
#[inline(always)]
fn sin_reduced(r: f64) -> f64 {
    let z = r * r;
    let series = -1.0 / 39_916_800.0;
    let series = series * z + 1.0 / 362_880.0;
    let series = series * z - 1.0 / 5_040.0;
    let series = series * z + 1.0 / 120.0;
    let series = series * z - 1.0 / 6.0;
    r + r * z * series
}

/// Taylor series of cos on `|r| <= pi/4`, error below 1e-12.
#[inline(always)]
fn cos_reduced(r: f64) -> f64 {
    let z = r * r;
    let series = 1.0 / 479_001_600.0;
    let series = series * z - 1.0 / 3_628_800.0;
    let series = series * z + 1.0 / 40_320.0;
    let series = series * z - 1.0 / 720.0;
    let series = series * z + 1.0 / 24.0;
    let series = series * z - 0.5;
    1.0 + z * series
}

/// Rotates the pairs `(i, i + half)` of one head; the rest passes through.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, rest) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
