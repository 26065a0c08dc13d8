//! Values that keep a random model's activations finite and its gates within their range.

use candle_core::{DType, Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Result;

/// The seed of one tensor: FNV-1a of its name, over the model's seed.
fn seed_of(name: &str, seed: u64) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325 ^ seed, step)
}

/// Seed and scale of a matrix: a row of unit mean square gives outputs of about that.
pub(super) fn matrix(name: &str, inputs: usize, seed: u64) -> (u64, f32) {
    (seed_of(name, seed), (3.0 / inputs as f32).sqrt())
}

/// A small tensor, f32 on the CPU, in the range that its name has in trained models.
pub(super) fn tensor(name: &str, shape: &[usize], seed: u64) -> Result<Tensor> {
    let range = match name.rsplit('.').find(|part| *part != "weight") {
        Some("A_log") => 0.0..2.7f32,
        Some("dt_bias") => -6.0..-2.0,
        Some("conv1d") => -0.5..0.5,
        // Norms that multiply by 1 + weight, or by the weight itself: both keep a row's scale.
        _ if name.ends_with("linear_attn.norm.weight") => 0.9..1.1,
        _ => -0.1..0.1,
    };
    let mut random = ChaCha8Rng::seed_from_u64(seed_of(name, seed));
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.random_range(range.clone())).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(DType::F32)?)
}
