//! `canopy-bench`: one subcommand per kind of measurement or check.

use std::process::ExitCode;

use anyhow::Result;
use canopy_bench::{compare, contract, dispatch, machine, op};
use clap::{Parser, Subcommand};

const HELP: &str = "\
Example:
  canopy-bench example tree_gdn --out in.safetensors
  canopy-bench op tree_gdn --input in.safetensors --out out.safetensors
  canopy-bench contract tree_gdn";

#[derive(Parser)]
#[command(name = "canopy-bench", version, about = "Measurements and checks of canopy's kernels", after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs one op on the tensors of a safetensors file and writes its outputs to another
    Op(op::OpArgs),
    /// Writes a small seeded input file for an op
    Example(op::ExampleArgs),
    /// Prints this machine's record as one JSON line
    #[command(after_help = "Example:\n  canopy-bench env >> machine.jsonl")]
    Env,
    /// Runs the kernel contract: every gate on every kernel, and the faults planted to turn each gate red
    Contract(contract::ContractArgs),
    /// Writes the dispatch table of the GDN kernels from measured rows
    Dispatch(dispatch::DispatchArgs),
    /// Prints the ratios of two result files' times, with their spread
    Compare(compare::CompareArgs),
    /// Checks and times the CUDA kernels of the GDN layer over tree shapes and batch sizes
    #[cfg(feature = "cuda")]
    Sweep(canopy_bench::gpu::SweepArgs),
    /// Times the serial baseline against the one-launch solve over depth and width
    #[cfg(feature = "cuda")]
    Crossover(canopy_bench::gpu::CrossoverArgs),
    /// Allocates what verify leaves for commit, both ways, and reads the device's free memory before and after
    #[cfg(feature = "cuda")]
    Memory(canopy_bench::gpu::MemoryArgs),
    /// Compares every solve with float64 on chains of random and of nearly equal keys
    #[cfg(feature = "cuda")]
    Accuracy(canopy_bench::gpu::AccuracyArgs),
    /// Compares bits and times of one tree's rows in different orders
    #[cfg(feature = "cuda")]
    Order(canopy_bench::gpu::OrderArgs),
    /// Verifies and commits random trees round after round, and compares the states with a float64 run
    #[cfg(feature = "cuda")]
    Drift(canopy_bench::gpu::DriftArgs),
}

fn main() -> ExitCode {
    match run(Cli::try_parse().unwrap_or_else(|error| canopy_e2e::usage::refuse(error))) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        #[cfg(feature = "cuda")]
        Command::Op(args) if args.design.is_some() => canopy_bench::gpu::op(&args)?,
        Command::Op(args) => op::run(&args)?,
        Command::Example(args) => op::example(&args)?,
        Command::Env => canopy_e2e::say!("{}", serde_json::to_string(&machine::Record::take()?)?),
        Command::Contract(args) => return contract::run(&args),
        Command::Dispatch(args) => dispatch::run(&args)?,
        Command::Compare(args) => compare::run(&args)?,
        #[cfg(feature = "cuda")]
        Command::Sweep(args) => canopy_bench::gpu::sweep(&args)?,
        #[cfg(feature = "cuda")]
        Command::Crossover(args) => canopy_bench::gpu::crossover(&args)?,
        #[cfg(feature = "cuda")]
        Command::Memory(args) => canopy_bench::gpu::memory(&args)?,
        #[cfg(feature = "cuda")]
        Command::Accuracy(args) => canopy_bench::gpu::accuracy(&args)?,
        #[cfg(feature = "cuda")]
        Command::Order(args) => canopy_bench::gpu::order(&args)?,
        #[cfg(feature = "cuda")]
        Command::Drift(args) => canopy_bench::gpu::drift(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}
