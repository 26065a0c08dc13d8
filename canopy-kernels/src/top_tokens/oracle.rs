//! Truth by a full sort of a row and a float64 sum.

/// (token, logit), best first, equal logits by token, and `ln sum exp(x - x_best)`; the row holds no NaN.
pub fn row(logits: &[f32]) -> (Vec<(u32, f32)>, f64) {
    let mut all: Vec<(u32, f32)> = logits.iter().enumerate().map(|(i, &x)| (i as u32, x)).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
    let best = f64::from(all[0].1);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - best).exp()).sum();
    (all, sum.ln())
}
