//! `canopy-bench accuracy`: every solve on chains of random and of nearly equal keys, against float64.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::Schedule;
use canopy_kernels::tree_gdn::oracle::{self, OracleInput, OracleOutput};
use clap::Args;
use cudarc::driver::CudaStream;
use half::bf16;
use serde_json::json;

use super::gdn::{self, Case, Inputs, Keys};
use super::timer;
use super::variant::{SERIES, Variant};
use crate::lines::Lines;

/// What to compare.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  canopy-bench accuracy --json accuracy.jsonl")]
pub struct AccuracyArgs {
    /// Rows of every chain
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 24, 32, 48, 64, 96, 128, 256])]
    nodes: Vec<usize>,
    /// Appends one JSON line a variant and chain to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Every solve, in the block that small batches take.
fn variants(tree: &DraftTree) -> Vec<Variant> {
    let schedule = Schedule::for_tree(tree);
    let mut all = vec![Variant::Chain(32), Variant::Split, Variant::FusedA(32, schedule), Variant::Wide(32)];
    all.extend(SERIES.map(Variant::Series));
    all.extend([Variant::FusedB(32, schedule), Variant::Blocked(32)]);
    all
}

/// Float64's outputs on the rows as the device reads them.
fn truth(tree: &DraftTree, inputs: &Inputs) -> Result<OracleOutput> {
    let wide = |x: &f32| f64::from(*x);
    let qkv: Vec<f64> = inputs.qkv.iter().map(|x: &bf16| f64::from(x.to_f32())).collect();
    let gates: Vec<f64> = inputs.gates.iter().map(wide).collect();
    let state: Vec<f64> = inputs.state.iter().map(wide).collect();
    Ok(oracle::verify(gdn::dims()?, tree, OracleInput { qkv: &qkv, gates: &gates, state: &state }))
}

/// Relative Frobenius error; `None` where a value is not finite.
fn error(got: &[f32], want: &[f64]) -> Option<f64> {
    let (mut error, mut norm) = (0.0f64, 0.0f64);
    for (&got, &want) in got.iter().zip(want) {
        error += (f64::from(got) - want).powi(2);
        norm += want * want;
    }
    Some((error / norm).sqrt()).filter(|error| error.is_finite())
}

fn chain(stream: &Arc<CudaStream>, nodes: usize, keys: Keys, lines: &mut Lines) -> Result<()> {
    let (tree, inputs) = (DraftTree::chain(nodes)?, Inputs::new(nodes, 1, keys)?);
    let (truth, mut case) = (truth(&tree, &inputs)?, Case::of(stream, &tree, 1, &inputs)?);
    let keys = if keys == Keys::Random { "random" } else { "nearly equal" };
    for variant in variants(&tree) {
        if !case.fits(stream, variant) {
            continue;
        }
        let (o, u) = case.outputs(stream, variant)?;
        let (o, u) = (error(&o, &truth.o), u.and_then(|u| error(&u, &truth.u)));
        let shown = |error: Option<f64>| error.map_or("not finite".into(), |error| format!("{error:.2e}"));
        println!("{keys:>12} {nodes:>6} {:24} {:>12} {:>12}", variant.name(), shown(o), shown(u));
        lines.write(json!({"schema": 1, "case": "tree_gdn.accuracy", "variant": variant.name(), "shape": "chain", "keys": keys,
            "nodes": nodes, "depth": nodes - 1, "relative_o": o, "relative_u": u}))?;
    }
    Ok(())
}

/// Runs every chain and prints a line a variant; rows go to `--json`.
///
/// # Errors
/// From the launchers or the driver.
pub fn run(args: &AccuracyArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let mut lines = Lines::open(args.json.as_deref())?;
    println!("{:>12} {:>6} {:24} {:>12} {:>12}", "keys", "nodes", "variant", "o", "u");
    for keys in [Keys::Random, Keys::NearlyEqual] {
        for &nodes in &args.nodes {
            chain(&stream, nodes, keys, &mut lines)?;
        }
    }
    lines.finish()
}
