//! `canopy-bench contract`: the kernel contract's report.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use canopy_kernels::contract::{self, Choice, Gate, Line, Sum};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::lines::Lines;

const HELP: &str = "\
Example:
  canopy-bench contract                                 # every kernel of the CPU, and of CUDA where there is a device
  canopy-bench contract tree_gdn                        # kernels whose name contains tree_gdn
  canopy-bench contract --device cuda --json gates.jsonl
  canopy-bench contract --device cuda --gate invariant

Exit code 1 when a gate is red, or when a control (a gate with a planted fault) stays green.";

/// `canopy-bench contract`.
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct ContractArgs {
    /// Only kernels whose name contains this
    #[arg(default_value = "", hide_default_value = true)]
    pub filter: String,
    /// Kernels of which device
    #[arg(long, value_enum, default_value = "all")]
    pub device: Devices,
    /// One gate alone: nonfinite, repeat, shapes, sums, invariant or limits
    #[arg(long, value_parser = gate)]
    pub gate: Option<Gate>,
    /// Number of the CUDA device
    #[arg(long, default_value_t = 0)]
    pub cuda_device: usize,
    /// Appends a JSON line for every gate and control to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The gate of a name.
fn gate(name: &str) -> std::result::Result<Gate, String> {
    let all = || Gate::RUNNING.into_iter().chain([Gate::Limits]);
    let names = || all().map(Gate::name).collect::<Vec<_>>().join(", ");
    all().find(|gate| gate.name() == name).ok_or_else(|| format!("expected: one of {}", names()))
}

/// Which kernels a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Devices {
    /// The CPU's.
    Cpu,
    /// CUDA's; an error without a device or in a build without them.
    Cuda,
    /// The CPU's, and CUDA's where there is a device.
    All,
}

/// Runs the suite and prints a line per kernel, gate and control, then the summary.
///
/// # Errors
/// When no kernel's name fits, CUDA is asked for where there is none, or the file cannot be written.
pub fn run(args: &ContractArgs) -> Result<ExitCode> {
    let no_cpu = args.device == Devices::Cuda;
    let cpu = Choice { filter: args.filter.clone(), cuda: None, no_cpu, gate: args.gate };
    let with_cuda = Choice { cuda: Some(args.cuda_device), ..cpu.clone() };
    let (choice, kernels) = match (args.device, contract::kernels(&with_cuda)) {
        (Devices::Cpu, _) => (cpu.clone(), contract::kernels(&cpu)),
        (Devices::All, Err(why)) => {
            canopy_e2e::say!("cuda | not run: {why}");
            (cpu.clone(), contract::kernels(&cpu))
        }
        (_, kernels) => (with_cuda, kernels),
    };
    let kernels = kernels.map_err(anyhow::Error::msg)?;
    let fitting = kernels.iter().filter(|name| name.contains(&args.filter)).count();
    if fitting == 0 {
        bail!("contract: FILTER, expected: part of one of {}, got: {}", kernels.join(", "), args.filter);
    }
    let mut file = Lines::open(args.json.as_deref())?;
    let (mut sum, mut written) = (Sum::default(), Ok(()));
    contract::run(&choice, |line| {
        canopy_e2e::say!("{line}");
        sum.take(&line);
        if written.is_ok() {
            written = file.write(row(&line));
        }
    })
    .map_err(anyhow::Error::msg)?;
    written?;
    file.finish()?;
    canopy_e2e::say!("SUMMARY {fitting} kernels: {sum}");
    Ok(if sum.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn row(line: &Line) -> Value {
    let (outcome, said) = match &line.outcome {
        Ok(covered) => ("green", covered),
        Err(fault) => ("red", fault),
    };
    json!({
        "schema": 1,
        "case": "contract",
        "runs_on": line.device.name(),
        "kernel": line.kernel,
        "gate": line.gate.name(),
        "control": line.control.map(|control| control.name()),
        "outcome": outcome,
        "as_it_should_be": line.as_it_should_be(),
        "text": said,
        "seconds": line.seconds,
    })
}
