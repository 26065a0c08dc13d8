//! Inputs from a seed, and the comparison of a float32 result with float64 truth.

use canopy_kernels::{DraftTree, GdnDims, TreeBatch};
use half::bf16;

/// A small counter-based generator, so that a case is its seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Uniform below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// About normal: the sum of twelve uniforms.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// How hard the keys and gates are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hardness {
    Random,
    /// Keys of a path nearly equal, beta 1, g 0: where the series lose all accuracy.
    EqualKeys,
    /// g alternates 0 and -20.
    Decay,
}

/// One verify call's inputs, already rounded to what the device will read.
pub struct Case {
    pub dims: GdnDims,
    pub batch: TreeBatch,
    pub qkv: Vec<f32>,
    pub gates: Vec<f32>,
    pub state: Vec<f32>,
}

impl Case {
    pub fn new(
        dims: GdnDims,
        batch: TreeBatch,
        pool: usize,
        hardness: Hardness,
        round: fn(f32) -> f32,
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed);
        let (rows, key) = (batch.rows(), dims.k_heads * dims.dk);
        let mut qkv = random.normals(rows * dims.qkv_width());
        if hardness == Hardness::EqualKeys {
            let base = random.normals(key);
            for row in qkv.chunks_mut(dims.qkv_width()) {
                for (k, b) in row[key..2 * key].iter_mut().zip(&base) {
                    *k = b + 0.02 * *k;
                }
            }
        }
        qkv.iter_mut().for_each(|x| *x = round(*x));
        let mut gates = Vec::new();
        for row in 0..rows {
            for _ in 0..dims.v_heads {
                gates.push(match hardness {
                    Hardness::Random => -2.0 * random.uniform(),
                    Hardness::EqualKeys => 0.0,
                    Hardness::Decay => -20.0 * (row % 2) as f32,
                });
            }
            for _ in 0..dims.v_heads {
                gates.push(if hardness == Hardness::EqualKeys { 1.0 } else { random.uniform() });
            }
        }
        let state = random.normals(pool * dims.state_len()).into_iter().map(|x| 0.1 * x).collect();
        Self { dims, batch, qkv, gates, state }
    }
}

impl Case {
    /// The sequence of `tree`, whose rows start at `first` and whose state is in `slot`, as a case of its own.
    pub fn alone(&self, first: usize, tree: &DraftTree, slot: usize) -> Self {
        let cut = |x: &[f32], width: usize| x[first * width..(first + tree.len()) * width].to_vec();
        let dims = self.dims;
        Self {
            dims,
            batch: TreeBatch::single(tree.clone(), 0),
            qkv: cut(&self.qkv, dims.qkv_width()),
            gates: cut(&self.gates, 2 * dims.v_heads),
            state: self.state[slot * dims.state_len()..][..dims.state_len()].to_vec(),
        }
    }
}

/// The path to the last node of every tree.
pub fn to_last(batch: &TreeBatch) -> Vec<Vec<usize>> {
    batch.trees().iter().map(|tree| tree.path(tree.len() - 1)).collect()
}

/// An error as a test's message.
pub fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// One key head and two value heads.
pub fn small() -> GdnDims {
    GdnDims::new(1, 2, 128, 128).expect("valid")
}

pub fn round_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Largest absolute difference, largest true value, relative Frobenius error.
fn errors(what: &str, got: &[f32], truth: &[f64]) -> Result<(f64, f64, f64), String> {
    if got.len() != truth.len() {
        return Err(format!("{what}: {} values, expected {}", got.len(), truth.len()));
    }
    let largest = truth.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    let (mut worst, mut error, mut norm) = (0.0f64, 0.0f64, 0.0f64);
    for (&g, &t) in got.iter().zip(truth) {
        let diff = (f64::from(g) - t).abs();
        if diff.is_nan() {
            return Err(format!("{what}: got {g}, expected {t}"));
        }
        worst = worst.max(diff);
        error += diff * diff;
        norm += t * t;
    }
    Ok((worst, largest, (error / norm.max(f64::MIN_POSITIVE)).sqrt()))
}

/// Fails above the bounds of the kernel contract for f32: 1e-4 of max abs (scaled by the largest value) and 1e-5 relative Frobenius.
pub fn compare(what: &str, got: &[f32], truth: &[f64]) -> Result<(), String> {
    let (worst, largest, relative) = errors(what, got, truth)?;
    if worst > 1e-4 * largest || relative > 1e-5 {
        return Err(format!(
            "{what}: max abs {worst:.2e} (largest value {largest:.1}), relative {relative:.2e}"
        ));
    }
    Ok(())
}

/// Fails above a relative Frobenius error of `bound`.
pub fn compare_within(what: &str, got: &[f32], truth: &[f64], bound: f64) -> Result<(), String> {
    let (_, _, relative) = errors(what, got, truth)?;
    if relative > bound { Err(format!("{what}: relative {relative:.2e}, bound {bound:.0e}")) } else { Ok(()) }
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}
