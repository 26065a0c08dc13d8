//! Ops on a device: what one launch gives against what several give, bit by bit. Without a device every test is listed as ignored;
//! `CANOPY_REQUIRE_GPU=1` turns that into a failure.

/// The convolution with the gates in its launch.
mod conv;
/// tree_gdn: bf16 outputs, commit and verify in one.
mod gdn;

use std::process::ExitCode;

use candle_core::{DType, Device, Result, Tensor};
use canopy_kernels::cuda::has_driver;
use libtest_mimic::{Arguments, Trial};

type Check = fn(&Device) -> anyhow::Result<()>;

/// Seeded normal values.
fn random(device: &Device, seed: u64, shape: &[usize]) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    let normal = |_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
    let values = (0..shape.iter().product()).map(normal).collect::<Vec<f32>>();
    Tensor::from_vec(values, shape, device)
}

/// The bits of a tensor of f32 or bf16.
fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let device = match has_driver() {
        true => Device::new_cuda(0).map_err(|error| error.to_string()),
        false => Err("no CUDA driver, or no device, on this machine".into()),
    };
    if let Err(why) = &device {
        eprintln!("ops on CUDA ignored: {why}");
        if std::env::var_os("CANOPY_REQUIRE_GPU").is_some_and(|value| value == "1") {
            return ExitCode::FAILURE;
        }
    }
    let trials = [conv::TESTS, gdn::TESTS].into_iter().flatten().map(|&(name, check): &(&str, Check)| {
        let device = device.clone();
        let ignored = device.is_err();
        let run = move || check(&device?).map_err(|error| format!("{error:#}").into());
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}
