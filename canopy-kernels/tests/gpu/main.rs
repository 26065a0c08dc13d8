//! CUDA kernels against the float64 oracles, on a device. Without one every test is listed as ignored and one line says why;
//! `CANOPY_REQUIRE_GPU=1` turns that into a failure. Outputs start as NaN, so an element that a kernel does not write shows.

mod accept_walk;
mod attention;
mod block;
mod blocked;
mod conv;
mod data;
mod drafted_tokens;
mod folds;
mod fused;
mod fused_commit;
mod fused_wide;
mod gdn;
mod glue;
mod int8;
mod linear;
mod prefill;
mod scene;
mod serial;
mod series;
mod top_tokens;
mod tree_build;

use std::process::ExitCode;
use std::sync::Arc;

use canopy_kernels::cuda::{BUILT_ARCHS, has_driver};
use cudarc::driver::{CudaContext, CudaStream};
use libtest_mimic::{Arguments, Trial};

type Check = fn(&Arc<CudaStream>) -> Result<(), String>;

fn stream() -> Result<Arc<CudaStream>, String> {
    if !has_driver() {
        return Err("no CUDA driver, or no device, on this machine".into());
    }
    let context = CudaContext::new(0).map_err(|e| e.to_string())?;
    context.new_stream().map_err(|e| e.to_string())
}

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let device = stream();
    let required = std::env::var_os("CANOPY_REQUIRE_GPU").is_some_and(|value| value == "1");
    if let Err(why) = &device {
        eprintln!("GPU tests ignored: {why}; kernels built for sm {BUILT_ARCHS}");
        if required {
            return ExitCode::FAILURE;
        }
    }
    let rooms = [
        accept_walk::TESTS,
        attention::TESTS,
        block::TESTS,
        blocked::TESTS,
        conv::TESTS,
        drafted_tokens::TESTS,
        folds::TESTS,
        fused::TESTS,
        fused_commit::TESTS,
        fused_wide::TESTS,
        gdn::TESTS,
        glue::TESTS,
        int8::TESTS,
        linear::TESTS,
        prefill::TESTS,
        serial::TESTS,
        series::TESTS,
        top_tokens::TESTS,
        tree_build::TESTS,
    ];
    let tests = rooms.into_iter().flatten().copied();
    let trials = tests.map(|(name, check)| {
        let device = device.clone();
        let ignored = device.is_err();
        Trial::test(name, move || Ok(check(&device?)?)).with_ignored_flag(ignored)
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}
