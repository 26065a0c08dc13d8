//! Rotary embedding: sines and cosines of `position * inv_freq`, and the rotate-half step.

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

/// pi/2 minus its nearest f64.
const FRAC_PI_2_LOW: f64 = 6.123_233_995_736_766e-17;

/// Cosines and sines of one position.
pub(super) struct Table<'a> {
    inv_freq: &'a [f32],
    position: Option<i32>,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl<'a> Table<'a> {
    /// For these `[rotary_dim / 2]` frequencies.
    pub fn new(inv_freq: &'a [f32]) -> Self {
        let zeros = vec![0f32; inv_freq.len()];
        Self { inv_freq, position: None, cos: zeros.clone(), sin: zeros }
    }

    /// Cosine and sine of the f32 product `position * inv_freq[i]`, each within 0.51 f32 ulp or 1e-10. The product
    /// is rounded to f32 as transformers does; the reduction runs in f64.
    #[inline(always)]
    pub fn set(&mut self, position: i32) {
        if self.position.replace(position) == Some(position) {
            return;
        }
        let tables = self.cos.iter_mut().zip(&mut self.sin);
        for (&freq, (cos, sin)) in self.inv_freq.iter().zip(tables) {
            (*cos, *sin) = cos_sin(position as f32 * freq);
        }
    }

    /// Rotates the pairs `(i, i + rotary_dim / 2)` of one head; the rest passes through.
    #[inline(always)]
    pub fn rotate(&self, head: &mut [f32]) {
        let (first, rest) = head.split_at_mut(self.cos.len());
        for (((a, b), &cos), &sin) in first.iter_mut().zip(rest).zip(&self.cos).zip(&self.sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[inline(always)]
fn cos_sin(angle: f32) -> (f32, f32) {
    // Adding 1.5 * 2^52 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let angle = f64::from(angle);
    let shifted = angle * FRAC_2_PI + ROUND;
    let (quarter, turn) = (shifted - ROUND, shifted.to_bits());
    let r = (angle - quarter * FRAC_PI_2) - quarter * FRAC_PI_2_LOW;
    let (sin, cos) = (sin_reduced(r), cos_reduced(r));
    let odd = turn & 1 == 1;
    let (sin, cos) = (if odd { cos } else { sin }, if odd { sin } else { cos });
    let sin = f64::from_bits(sin.to_bits() ^ ((turn & 2) << 62));
    let cos = f64::from_bits(cos.to_bits() ^ ((turn.wrapping_add(1) & 2) << 62));
    (cos as f32, sin as f32)
}

/// Taylor series of sin on `|r| <= pi/4`, error below 1e-11.
#[inline(always)]
fn sin_reduced(r: f64) -> f64 {
    let z = r * r;
    let mut series = -1.0 / 39_916_800.0;
    for c in [1.0 / 362_880.0, -1.0 / 5_040.0, 1.0 / 120.0, -1.0 / 6.0] {
        series = series * z + c;
    }
    r + r * z * series
}

/// Taylor series of cos on `|r| <= pi/4`, error below 1e-12.
#[inline(always)]
fn cos_reduced(r: f64) -> f64 {
    let z = r * r;
    let mut series = 1.0 / 479_001_600.0;
    for c in [-1.0 / 3_628_800.0, 1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5] {
        series = series * z + c;
    }
    1.0 + z * series
}
