//! f64 truth: the plain dot product.

/// `y [rows, out] = x [rows, in] W^T` in f64, W row-major `[out, in]`.
pub fn forward(inputs: usize, weight: &[f64], x: &[f64]) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum();
    x.chunks_exact(inputs).flat_map(|x| weight.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
}
