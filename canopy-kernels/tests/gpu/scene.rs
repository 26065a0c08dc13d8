//! What the attention tests share: pools and queries, the float64 truth with the size of its terms, and the bound.

use std::sync::Arc;
use std::thread;

use canopy_kernels::AttnDims;
use canopy_kernels::tree_attention::launch::Output;
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use crate::data::{Random, text};

/// Queries and pools, bf16 as the device reads them.
#[derive(Clone)]
pub struct Pools {
    pub dims: AttnDims,
    pub capacity: usize,
    pub q: Vec<bf16>,
    pub keys: Vec<bf16>,
    pub values: Vec<bf16>,
}

impl Pools {
    /// Normal values; keys `sharp` times as large, so that some weights vanish.
    pub fn new(dims: AttnDims, rows: usize, slots: usize, capacity: usize, sharp: f32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut draw = |n: usize, scale: f32| -> Vec<bf16> {
            random.normals(n).into_iter().map(|x| bf16::from_f32(scale * x)).collect()
        };
        let pool = slots * capacity * dims.kv_width();
        Self {
            dims,
            capacity,
            q: draw(rows * dims.q_width(), 1.0),
            keys: draw(pool, sharp),
            values: draw(pool, 1.0),
        }
    }

    /// Where KV head `kv_head` of pool row `row` of `slot` starts.
    pub fn at(&self, slot: usize, row: usize, kv_head: usize) -> usize {
        ((slot * self.capacity + row) * self.dims.kv_heads + kv_head) * self.dims.head_dim
    }

    /// Float64's outputs; `rows[r]` is the slot of packed row r and the pool rows that it sees, `None` for padding.
    pub fn truth(&self, rows: &[Option<(usize, Vec<usize>)>]) -> Truth {
        let dims = self.dims;
        let width = dims.q_width();
        let (mut out, mut size) = (vec![0.0; rows.len() * width], vec![0.0; rows.len() * width]);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(16);
        let share = rows.len().div_ceil(threads).max(1);
        thread::scope(|scope| {
            let parts = out.chunks_mut(share * width).zip(size.chunks_mut(share * width));
            for ((some, (out, size)), first) in rows.chunks(share).zip(parts).zip((0..).step_by(share)) {
                scope.spawn(move || {
                    for (i, row) in some.iter().enumerate() {
                        let Some((slot, seen)) = row else { continue };
                        for head in 0..dims.q_heads {
                            let at = i * width + head * dims.head_dim;
                            let query = &self.q[((first + i) * dims.q_heads + head) * dims.head_dim..];
                            self.head(
                                (*slot, seen, dims.kv_head(head)),
                                &query[..dims.head_dim],
                                &mut out[at..at + dims.head_dim],
                                &mut size[at..at + dims.head_dim],
                            );
                        }
                    }
                });
            }
        });
        Truth { out, size }
    }

    fn head(
        &self,
        (slot, seen, kv_head): (usize, &[usize], usize),
        query: &[bf16],
        out: &mut [f64],
        size: &mut [f64],
    ) {
        let d = self.dims.head_dim;
        let score = |&row: &usize| {
            let key = &self.keys[self.at(slot, row, kv_head)..][..d];
            query.iter().zip(key).map(|(q, k)| q.to_f64() * k.to_f64()).sum::<f64>() / (d as f64).sqrt()
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut total = 0.0;
        for (row, score) in seen.iter().zip(scores) {
            let weight = (score - largest).exp();
            total += weight;
            let value = &self.values[self.at(slot, *row, kv_head)..][..d];
            for ((out, size), value) in out.iter_mut().zip(size.iter_mut()).zip(value) {
                *out += weight * value.to_f64();
                *size += weight * value.to_f64().abs();
            }
        }
        out.iter_mut().chain(size.iter_mut()).for_each(|x| *x /= total);
    }
}

/// Outputs, and `sum p |v| / sum p` of each.
pub struct Truth {
    pub out: Vec<f64>,
    pub size: Vec<f64>,
}

impl Truth {
    /// The largest error over its bound, `2^-7 sum p |v| / sum p` plus half a bf16 ulp for bf16 outputs; an error above 1, or where a
    /// value that is not finite is not float64's.
    pub fn worst(&self, what: &str, got: &[f32], rounded: bool) -> Result<f64, String> {
        if got.len() != self.out.len() {
            return Err(format!("{what}: {} values, expected {}", got.len(), self.out.len()));
        }
        let mut worst = 0.0f64;
        for (i, ((&got, &truth), &size)) in got.iter().zip(&self.out).zip(&self.size).enumerate() {
            if !truth.is_finite() || truth.abs() > f64::from(f32::MAX) {
                let same = if truth.is_nan() { got.is_nan() } else { got == truth as f32 };
                if !same {
                    return Err(format!("{what}: element {i} is {got}, float64 gives {truth}"));
                }
                continue;
            }
            let half_ulp = if rounded { truth.abs() * 2f64.powi(-8) } else { 0.0 };
            let bound = size.min(f64::MAX) * 2f64.powi(-7) + half_ulp + 1e-30;
            let ratio = (f64::from(got) - truth).abs() / bound;
            if ratio.is_nan() || ratio > 1.0 {
                return Err(format!(
                    "{what}: element {i} is {got}, float64 gives {truth}, {ratio:.2} of the bound"
                ));
            }
            worst = worst.max(ratio);
        }
        Ok(worst)
    }
}

/// An output type, its NaN, and how it widens.
pub trait Kind: Output + Copy {
    const NAN: Self;
    const ROUNDED: bool;
    fn widen(self) -> f32;
}

impl Kind for f32 {
    const NAN: Self = f32::NAN;
    const ROUNDED: bool = false;
    fn widen(self) -> f32 {
        self
    }
}

impl Kind for bf16 {
    const NAN: Self = bf16::NAN;
    const ROUNDED: bool = true;
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Pools and queries on the device, between guard elements that are NaN.
pub struct OnDevice {
    pub q: CudaSlice<bf16>,
    pub keys: CudaSlice<bf16>,
    pub values: CudaSlice<bf16>,
}

/// Guard elements before and after each buffer: 16 bytes, so that the buffer stays aligned.
pub const GUARD: usize = 8;

impl OnDevice {
    pub fn new(stream: &Arc<CudaStream>, pools: &Pools) -> Result<Self, String> {
        let upload = |x: &[bf16]| {
            let guard = [bf16::NAN; GUARD];
            stream.clone_htod(&[&guard, x, &guard].concat()).map_err(text)
        };
        Ok(Self { q: upload(&pools.q)?, keys: upload(&pools.keys)?, values: upload(&pools.values)? })
    }

    /// Fails where a kernel wrote to an input.
    pub fn untouched(&self, stream: &Arc<CudaStream>, pools: &Pools) -> Result<(), String> {
        for (name, buffer, want) in [
            ("q", &self.q, &pools.q),
            ("keys", &self.keys, &pools.keys),
            ("values", &self.values, &pools.values),
        ] {
            let got = stream.clone_dtoh(buffer).map_err(text)?;
            let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let guard = [bf16::NAN; GUARD];
            if bits(&got) != bits(&[&guard, &want[..], &guard].concat()) {
                return Err(format!("{name} was written to"));
            }
        }
        Ok(())
    }
}
