//! The contract of every CUDA kernel with its controls, on the first device: what `canopy-bench contract --device cuda` prints, without candle.
//! An argument is part of the kernels' names. `CANOPY_REQUIRE_GPU=1` makes a missing device a failure.

use std::process::ExitCode;

use canopy_kernels::contract::{self, Choice, Sum};
use canopy_kernels::cuda::has_driver;

fn main() -> ExitCode {
    if !has_driver() {
        eprintln!("contract not run: no CUDA driver, or no device, on this machine");
        let required = std::env::var_os("CANOPY_REQUIRE_GPU").is_some_and(|value| value == "1");
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let choice = Choice { filter, cuda: Some(0), no_cpu: true, gate: None };
    let (mut sum, mut lines) = (Sum::default(), 0);
    let ran = contract::run(&choice, |line| {
        println!("{line}");
        sum.take(&line);
        lines += 1;
    });
    if let Err(why) = ran {
        eprintln!("contract: {why}");
        return ExitCode::FAILURE;
    }
    println!("SUMMARY {sum}");
    if sum.holds() && lines > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
