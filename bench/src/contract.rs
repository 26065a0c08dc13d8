//! `canopy-bench contract`: the kernel contract's report.

use std::process::ExitCode;

use anyhow::{Result, bail};
use canopy_kernels::contract::{self, Gate, Line};
use clap::Args;

const HELP: &str = "\
Example:
  canopy-bench contract                 # every kernel
  canopy-bench contract --only tree_gdn # kernels whose name contains tree_gdn

Exit code 1 when a gate is red, or when a control (a gate with a planted fault) stays green.";

/// `canopy-bench contract`.
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct ContractArgs {
    /// Only kernels whose name contains this
    #[arg(long, default_value = "", hide_default_value = true)]
    pub only: String,
}

#[derive(Default)]
struct Counts {
    green: usize,
    red: usize,
    controls: usize,
    blind: usize,
}

/// Runs the suite and prints a line per kernel, gate and control, then the summary.
///
/// # Errors
/// When no kernel's name fits.
pub fn run(args: &ContractArgs) -> Result<ExitCode> {
    let kernels = contract::kernels();
    let fitting = kernels.iter().filter(|name| name.contains(&args.only)).count();
    if fitting == 0 {
        bail!("contract: --only, expected: part of one of {}, got: {}", kernels.join(", "), args.only);
    }
    let mut counts = Counts::default();
    contract::run(&args.only, |line| {
        println!("{}", text(&line));
        match (line.control, line.as_it_should_be()) {
            (None, true) => counts.green += 1,
            (None, false) => counts.red += 1,
            (Some(_), true) => counts.controls += 1,
            (Some(_), false) => counts.blind += 1,
        }
    });
    let Counts { green, red, controls, blind } = counts;
    println!("all kernels | {} | not run here: needs nvcc", Gate::Limits.name());
    println!(
        "SUMMARY {fitting} kernels: {green} gates green, {red} red; {controls} controls red as they must, {blind} stayed green"
    );
    Ok(if red + blind == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(line: &Line) -> String {
    let (kernel, gate) = (&line.kernel, line.gate.name());
    match (line.control, &line.outcome) {
        (None, Ok(covered)) => format!("{kernel} | {gate} | green: {covered}"),
        (None, Err(fault)) => format!("{kernel} | {gate} | RED: {fault}"),
        (Some(control), Err(fault)) => format!("{kernel} | {gate} | control {} red: {fault}", control.name()),
        (Some(control), Ok(_)) => format!("{kernel} | {gate} | control {} STAYED GREEN", control.name()),
    }
}
