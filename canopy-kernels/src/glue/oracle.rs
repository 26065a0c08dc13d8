//! f64 truth of the row-wise steps, one value at a time.

/// `x * rsqrt(mean x^2 + eps) * factor` of one row.
pub fn rms_norm(x: &[f64], factor: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(factor).map(|(x, factor)| x / (mean + eps).sqrt() * factor).collect()
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Rotate-half of one head by the given angles: pair `(i, i + angles.len())` is a complex number times `e^(i angle)`.
pub fn rotate(head: &[f64], angles: &[f64]) -> Vec<f64> {
    let (mut out, half) = (head.to_vec(), angles.len());
    for (i, angle) in angles.iter().enumerate() {
        out[i] = head[i] * angle.cos() - head[i + half] * angle.sin();
        out[i + half] = head[i] * angle.sin() + head[i + half] * angle.cos();
    }
    out
}
