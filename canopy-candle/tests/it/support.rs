//! Seeded tensors, layouts of one tensor, comparisons.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, DraftTree, TreeBatch};

/// A small seeded generator.
pub struct Rng(pub u64);

impl Rng {
    /// Uniform in (-1, 1).
    pub fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f32 + 0.5) / (1u64 << 23) as f32 - 1.0
    }

    pub fn tensor(&mut self, shape: &[usize]) -> Tensor {
        let len = shape.iter().product();
        let values = (0..len).map(|_| self.uniform()).collect::<Vec<_>>();
        Tensor::from_vec(values, shape, &Device::Cpu).expect("the element count fits the shape")
    }

    /// `[N, 2, Hv]`: log gates in (-1, 0), write strengths in (0, 1).
    pub fn gates(&mut self, rows: usize, v_heads: usize) -> Tensor {
        let row = |rng: &mut Self| {
            let mut row = (0..v_heads).map(|_| -rng.uniform().abs()).collect::<Vec<_>>();
            row.extend((0..v_heads).map(|_| rng.uniform().abs()));
            row
        };
        let values = (0..rows).flat_map(|_| row(self)).collect::<Vec<_>>();
        Tensor::from_vec(values, (rows, 2, v_heads), &Device::Cpu).expect("2 Hv values a row")
    }
}

/// The same values as views: contiguous, behind an offset, inside a wider row, transposed. Everything around the
/// view is NaN.
pub fn layouts(tensor: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let last = tensor.rank() - 1;
    let mut views = vec![("contiguous", tensor.clone()), ("offset", inside_nan(tensor, 0)?)];
    views.push(("narrowed", inside_nan(tensor, last)?));
    if tensor.rank() > 1 {
        views.push(("transposed", tensor.transpose(0, last)?.contiguous()?.transpose(0, last)?));
        views.push((
            "offset and transposed",
            inside_nan(tensor, 0)?.transpose(0, last)?.contiguous()?.transpose(0, last)?,
        ));
    }
    Ok(views)
}

/// A view of `tensor`'s values in a tensor that is NaN before and after them along `dim`.
pub fn inside_nan(tensor: &Tensor, dim: usize) -> Result<Tensor> {
    let mut shape = tensor.dims().to_vec();
    shape[dim] = 3;
    let pad = Tensor::full(f32::NAN, shape, &Device::Cpu)?.to_dtype(tensor.dtype())?;
    Tensor::cat(&[&pad, tensor, &pad], dim)?.narrow(dim, 3, tensor.dim(dim)?)
}

pub fn f32s(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).and_then(|t| t.flatten_all());
    tensor.and_then(|t| t.to_vec1()).expect("a float tensor")
}

pub fn f64s(tensor: &Tensor) -> Vec<f64> {
    f32s(tensor).into_iter().map(f64::from).collect()
}

pub fn bits(tensor: &Tensor) -> Vec<u32> {
    f32s(tensor).into_iter().map(f32::to_bits).collect()
}

/// Largest difference; infinite when the counts differ or a value is NaN.
pub fn max_abs(got: &[f32], expected: &[f64]) -> f64 {
    if got.len() != expected.len() {
        return f64::INFINITY;
    }
    let difference = |(&got, &expected): (&f32, &f64)| (f64::from(got) - expected).abs();
    let largest = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
    got.iter().zip(expected).map(difference).fold(0.0, largest)
}

/// Three trees with their rows packed; the second is padding.
pub fn batch() -> TreeBatch {
    let random = DraftTree::new(vec![-1, 0, 0, 1, 1, 2, 4]).expect("parents come first");
    let padding = DraftTree::chain(2).expect("two nodes");
    let chain = DraftTree::chain(5).expect("five nodes");
    TreeBatch::new(vec![random, padding, chain], vec![2, -1, 0]).expect("three slots")
}

/// Accepted paths of [`batch`]: not a prefix of the rows, nothing, and a prefix.
pub fn paths(batch: &TreeBatch) -> DevicePaths {
    let paths = AcceptedPaths::new(batch, &[vec![0, 1, 4, 6], vec![0], vec![0, 1]]).expect("three paths");
    DevicePaths::new(paths, &Device::Cpu).expect("a CPU")
}

pub fn on_cpu(batch: TreeBatch) -> DeviceTree {
    DeviceTree::new(batch, &Device::Cpu).expect("a CPU")
}
