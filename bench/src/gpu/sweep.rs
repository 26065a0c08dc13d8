//! `canopy-bench sweep`: every variant of the GDN kernels over tree shapes, node counts and batch sizes, checked before it is timed.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::Schedule;
use clap::Args;
use cudarc::driver::CudaStream;
use serde_json::{Value, json};

use super::gdn::{Case, Variant, distance};
use super::timer;

/// Seed of the seeded shapes.
const SEED: u64 = 3;

/// What to sweep.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  canopy-bench sweep --nodes 16,128 --batch 1,16 --shapes bole --json sweep.jsonl"
)]
pub struct SweepArgs {
    /// Nodes of a tree, root included
    #[arg(long, value_delimiter = ',', default_values_t = [3, 8, 16, 32, 64, 100, 128, 200, 256])]
    nodes: Vec<usize>,
    /// Sequences of a batch
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    batch: Vec<usize>,
    /// Tree shapes: chain, top2, top4, skewed, bole, specla
    #[arg(long, value_delimiter = ',', default_values_t = ["chain", "top2", "top4", "skewed", "bole", "specla"].map(String::from))]
    shapes: Vec<String>,
    /// Timed replays of every variant
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Appends one JSON line a variant to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The tree of a shape with at most `nodes` nodes; `None` where the shape has no tree of about that size.
fn tree(shape: &str, nodes: usize) -> Result<Option<DraftTree>> {
    let balanced = |k: usize| {
        let size = |depth: u32| (0..=depth).map(|level| k.pow(level)).sum::<usize>();
        let depth = (0..8).take_while(|&depth| size(depth) <= nodes).last();
        depth.filter(|&depth| depth > 0).map(|depth| DraftTree::balanced(k, depth as usize)).transpose()
    };
    Ok(match shape {
        "chain" => Some(DraftTree::chain(nodes)?),
        "top2" => balanced(2)?,
        "top4" => balanced(4)?,
        "skewed" if nodes >= 3 => Some(DraftTree::skewed(2, (nodes - 1) / 2)?),
        "bole" if nodes >= 8 => Some(DraftTree::bole(nodes, SEED)?),
        "specla" if nodes == 16 || nodes == 32 => {
            Some(DraftTree::specla(4, if nodes == 16 { 12 } else { 24 }, nodes, SEED)?)
        }
        "skewed" | "bole" | "specla" => None,
        other => {
            anyhow::bail!("--shapes: expected chain, top2, top4, skewed, bole or specla, got: {other:?}")
        }
    })
}

/// Name, clocks, temperature and power of the device, as the driver's own tool prints them.
fn device_state() -> Value {
    let fields = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw";
    let output =
        Command::new("nvidia-smi").args([&format!("--query-gpu={fields}"), "--format=csv,noheader"]).output();
    let line = output
        .ok()
        .map(|o| String::from_utf8_lossy(&o.stdout).lines().next().unwrap_or_default().to_string());
    let values: Vec<String> = line.unwrap_or_default().split(", ").map(String::from).collect();
    Value::Object(
        fields.split(',').zip(values).map(|(name, value)| (name.to_string(), Value::String(value))).collect(),
    )
}

fn candidates(depth: usize) -> Vec<Variant> {
    let schedules: &[Schedule] =
        if depth < 2 { &[Schedule::Levels] } else { &[Schedule::Levels, Schedule::Chains] };
    let mut all = vec![Variant::Split];
    for &schedule in schedules {
        for columns in [32, 64, 128] {
            all.push(Variant::FusedA(columns, schedule));
            all.push(Variant::FusedB(columns, schedule));
        }
    }
    all.push(Variant::Commit);
    all
}

/// Distances of `o` and `u` from the split f32 design; an error when they are outside the variant's bound.
fn check(
    stream: &Arc<CudaStream>,
    case: &mut Case,
    variant: Variant,
    want: &(Vec<f32>, Vec<f32>),
) -> Result<(f64, f64)> {
    let got = case.outputs(stream, variant)?;
    let (o, u) = (distance(&got.0, &want.0)?, distance(&got.1, &want.1)?);
    let bound = if matches!(variant, Variant::FusedB(..)) { 1e-2 } else { 1e-5 };
    ensure!(
        o <= bound && u <= bound,
        "{}: relative distance o {o:.1e}, u {u:.1e}, bound {bound:.0e}",
        variant.name()
    );
    Ok((o, u))
}

fn shape_rows(
    stream: &Arc<CudaStream>,
    args: &SweepArgs,
    shape: &str,
    tree: &DraftTree,
    batch: usize,
) -> Result<Vec<Value>> {
    let mut case = Case::new(stream, tree, batch)?;
    let want = case.outputs(stream, Variant::Split)?;
    let variants: Vec<Variant> =
        candidates(tree.max_depth()).into_iter().filter(|&variant| case.fits(stream, variant)).collect();
    let (mut graphs, mut parity) = (Vec::new(), Vec::new());
    for &variant in &variants {
        parity.push(match variant {
            Variant::Commit => None,
            _ => Some(check(stream, &mut case, variant, &want)?),
        });
        let sets = case.sets().max(8);
        graphs.push((timer::capture(stream, sets, |n| case.launch(stream, variant, n))?, sets));
        graphs.push((timer::capture(stream, 20, |_| case.launch(stream, variant, 0))?, 20));
    }
    let times = timer::interleaved(stream, &graphs, args.repeats)?;
    let rows = variants.iter().zip(&parity).zip(times.chunks_exact(2));
    Ok(rows
        .map(|((variant, parity), times)| {
            json!({
                "schema": 1,
                "case": if *variant == Variant::Commit { "tree_gdn.commit" } else { "tree_gdn.verify" },
                "variant": variant.name(),
                "shape": shape,
                "nodes": tree.len(),
                "depth": tree.max_depth(),
                "batch": batch,
                "us_median": times[0].us_median,
                "us_p10": times[0].us_p10,
                "us_p90": times[0].us_p90,
                "us_warm": times[1].us_median,
                "distance_o": parity.map(|(o, _)| o),
                "distance_u": parity.map(|(_, u)| u),
                "tape_bytes": case.tape_bytes(),
                "snapshot_bytes": case.snapshot_bytes(),
                "repeats": args.repeats,
            })
        })
        .collect())
}

/// Runs the sweep and prints a table; rows go to `--json`.
///
/// # Errors
/// A variant outside its bound, a bad argument, or the driver.
pub fn run(args: &SweepArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let mut file = match &args.json {
        Some(path) => Some(
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .with_context(|| path.display().to_string())?,
        ),
        None => None,
    };
    let before = device_state();
    let command: Vec<String> = std::env::args().skip(1).collect();
    println!(
        "{:24} {:>7} {:>6} {:>6} {:>6} {:>10} {:>10}",
        "variant", "shape", "batch", "nodes", "depth", "cold us", "warm us"
    );
    for &batch in &args.batch {
        for &nodes in &args.nodes {
            for shape in &args.shapes {
                let Some(tree) = tree(shape, nodes)? else { continue };
                for mut row in shape_rows(&stream, args, shape, &tree, batch)? {
                    println!(
                        "{:24} {shape:>7} {batch:>6} {:>6} {:>6} {:>10.2} {:>10.2}",
                        row["variant"].as_str().unwrap_or_default(),
                        tree.len(),
                        tree.max_depth(),
                        row["us_median"].as_f64().unwrap_or_default(),
                        row["us_warm"].as_f64().unwrap_or_default()
                    );
                    row["device"] = before["name"].clone();
                    row["command"] = format!("canopy-bench {}", command.join(" ")).into();
                    if let Some(file) = &mut file {
                        writeln!(file, "{row}")?;
                    }
                }
            }
        }
    }
    if let Some(file) = &mut file {
        writeln!(
            file,
            "{}",
            json!({"schema": 1, "case": "machine.gpu", "before": before, "after": device_state()})
        )?;
    }
    Ok(())
}
