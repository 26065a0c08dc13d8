//! `canopy-bench crossover`: where the one-launch solve beats the serial walk, over depth and width.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::Solve;
use canopy_kernels::tree_gdn::blocked::COLUMNS;
use clap::Args;
use cudarc::driver::CudaStream;
use serde_json::{Value, json};

use super::gdn::{Case, Truth};
use super::shapes;
use super::timer::{self, Pace, Timing};
use super::variant::{SERIES, Variant};
use crate::lines::Lines;

/// The map to measure: trees are combs, a spine of the depth whose every node has `width` children; width 1 is a chain.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  canopy-bench crossover --batch 1,16 --json crossover.jsonl")]
pub struct CrossoverArgs {
    /// Depths
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 255])]
    depths: Vec<usize>,
    /// Children of every spine node
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4, 8, 16, 32, 64, 128, 255])]
    widths: Vec<usize>,
    /// Sequences of a batch
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    batch: Vec<usize>,
    /// Timed replays of the fastest variant of each kind
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Milliseconds after which a variant gets no more of them (five at least); 0 is no limit
    #[arg(long, default_value_t = 0.0)]
    most_ms: f64,
    /// Appends one JSON line a cell to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

fn named(solve: Solve) -> &'static str {
    match solve {
        Solve::Dense => "dense",
        Solve::Neumann => "neumann",
        _ => "squaring",
    }
}

/// What is compared: every kind's variants, the fastest of which stands for it.
fn kinds(tree: &DraftTree) -> Vec<(&'static str, Vec<Variant>)> {
    let (a, mut b): (Vec<_>, Vec<_>) = Variant::fused(tree.max_depth())
        .into_iter()
        .partition(|variant| matches!(variant, Variant::FusedA(..)));
    b.extend(COLUMNS.map(Variant::Blocked));
    let mut kinds =
        vec![("snapshots", [32, 64].map(Variant::Snapshots).to_vec()), ("solve", a), ("solve_b", b)];
    kinds.push(("wide", [32, 64].map(Variant::Wide).to_vec()));
    kinds.extend(SERIES.map(|solve| (named(solve), vec![Variant::Series(solve)])));
    if tree.is_chain() {
        kinds.push(("registers", [32, 64, 128].map(Variant::Chain).to_vec()));
    }
    kinds
}

/// Times every variant in cold graphs, interleaved.
fn times(stream: &Arc<CudaStream>, case: &mut Case, variants: &[Variant], pace: Pace) -> Result<Vec<Timing>> {
    let mut graphs = Vec::new();
    for &variant in variants {
        let [cold, _] = case.launches(variant);
        graphs.push((timer::capture(stream, cold, |n| case.launch(stream, variant, n))?, cold));
    }
    timer::interleaved(stream, &graphs, pace)
}

/// The fastest variant of a kind by a few replays, once it gives what the split design gives; the split design where no fused block fits.
fn fastest(
    stream: &Arc<CudaStream>,
    case: &mut Case,
    truth: &Truth,
    variants: &[Variant],
) -> Result<Option<Variant>> {
    let mut fitting: Vec<Variant> =
        variants.iter().copied().filter(|&variant| case.fits(stream, variant)).collect();
    if fitting.is_empty() && variants.iter().any(|variant| matches!(variant, Variant::FusedA(..))) {
        fitting.push(Variant::Split);
    }
    for &variant in &fitting {
        case.reserve(stream, variant)?;
    }
    let times = times(stream, case, &fitting, Pace { warm_ups: 1, ..Pace::full(3) })?;
    let by_time = |a: &(&Variant, &Timing), b: &(&Variant, &Timing)| a.1.us_median.total_cmp(&b.1.us_median);
    let Some((&fastest, _)) = fitting.iter().zip(&times).min_by(by_time) else { return Ok(None) };
    match truth.check(stream, case, fastest) {
        // a series outside the bound has no time
        Err(_) if matches!(fastest, Variant::Series(_)) => Ok(None),
        checked => checked.map(|_| Some(fastest)),
    }
}

fn cell(stream: &Arc<CudaStream>, tree: &DraftTree, batch: usize, pace: Pace) -> Result<Value> {
    let mut case = Case::new(stream, tree, batch)?;
    let truth = Truth::new(stream, &mut case)?;
    let mut chosen = Vec::new();
    for (kind, variants) in kinds(tree) {
        if let Some(variant) = fastest(stream, &mut case, &truth, &variants)? {
            chosen.push((kind, variant));
        }
    }
    let variants: Vec<Variant> = chosen.iter().map(|&(_, variant)| variant).collect();
    let times = times(stream, &mut case, &variants, pace)?;
    let mut row = json!({"schema": 1, "case": "crossover", "shape": "comb", "nodes": tree.len(), "depth": tree.max_depth(),
        "batch": batch, "repeats": pace.repeats});
    for (&(kind, variant), time) in chosen.iter().zip(&times) {
        row[kind] = variant.name().into();
        row[format!("us_{kind}")] = time.us_median.into();
        row[format!("us_{kind}_p10")] = time.us_p10.into();
        row[format!("us_{kind}_p90")] = time.us_p90.into();
        row[format!("replays_{kind}")] = time.replays.into();
    }
    let serial = ["snapshots", "registers"].iter().filter_map(|kind| row[format!("us_{kind}")].as_f64());
    row["us_serial"] = serial.reduce(f64::min).context("a serial time")?.into();
    ensure!(row["us_solve"].is_number(), "no one-solve time");
    Ok(row)
}

/// Measures the map and prints a line a cell; rows go to `--json`.
///
/// # Errors
/// A variant outside its bound, or the driver.
pub fn run(args: &CrossoverArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let mut lines = Lines::open(args.json.as_deref())?;
    canopy_e2e::say!(
        "{:>6} {:>6} {:>6} {:>6} {:>12} {:>12} {:>12}",
        "batch",
        "depth",
        "width",
        "nodes",
        "serial us",
        "tier A us",
        "tier B us"
    );
    for &batch in &args.batch {
        for &depth in &args.depths {
            for &width in &args.widths {
                let Some(tree) = shapes::comb(depth, width)? else { continue };
                let mut row = cell(&stream, &tree, batch, Pace::within(args.repeats, args.most_ms))?;
                row["width"] = width.into();
                let us = |name: &str| row[name].as_f64().map_or("-".into(), |us| format!("{us:.2}"));
                let [serial, a, b] = ["us_serial", "us_solve", "us_solve_b"].map(us);
                canopy_e2e::say!(
                    "{batch:>6} {depth:>6} {width:>6} {:>6} {serial:>12} {a:>12} {b:>12}",
                    tree.len()
                );
                lines.write(row)?;
            }
        }
    }
    lines.finish()
}
