//! `canopy-bench sweep`: every variant of the GDN kernels, and the kernels around them, over tree shapes, node counts and batch sizes, checked before it is timed.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use canopy_kernels::DraftTree;
use clap::Args;
use cudarc::driver::CudaStream;
use serde_json::{Value, json};

use super::gdn::{Case, Truth};
use super::variant::Variant;
use super::{rows, shapes, timer};
use crate::lines::Lines;

/// What to sweep.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  canopy-bench sweep --nodes 16,128 --batch 1,16 --shapes bole --skip split,snapshots --json sweep.jsonl"
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
    /// Only variants whose name contains one of these
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// No variant whose name contains one of these
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Timed replays of every variant
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Milliseconds after which a variant gets no more of them (five at least); 0 is no limit
    #[arg(long, default_value_t = 0.0)]
    most_ms: f64,
    /// Appends one JSON line a variant to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

impl SweepArgs {
    fn wants(&self, name: &str) -> bool {
        let names = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        (self.only.is_empty() || names(&self.only)) && !names(&self.skip)
    }
}

fn shape_rows(
    stream: &Arc<CudaStream>,
    args: &SweepArgs,
    shape: &str,
    tree: &DraftTree,
    batch: usize,
) -> Result<Vec<Value>> {
    let mut case = Case::new(stream, tree, batch)?;
    let truth = Truth::new(stream, &mut case)?;
    let wanted = |variant: &Variant| args.wants(&variant.name()) && case.fits(stream, *variant);
    let candidates: Vec<Variant> =
        Variant::candidates(tree.max_depth(), tree.is_chain()).into_iter().filter(wanted).collect();
    for &variant in &candidates {
        case.reserve(stream, variant)?;
    }
    let (mut variants, mut graphs, mut parity) = (Vec::new(), Vec::new(), Vec::new());
    for variant in candidates {
        let checked = if variant.commits() { None } else { Some(truth.check(stream, &mut case, variant)) };
        match checked.transpose() {
            Ok(found) => parity.push(found),
            // a series outside the bound is no failure of the sweep, and is not timed
            Err(error) if matches!(variant, Variant::Series(_)) => {
                canopy_e2e::say!("not timed: {error}");
                continue;
            }
            Err(error) => return Err(error),
        }
        variants.push(variant);
        let [cold, warm] = case.launches(variant);
        graphs.push((timer::capture(stream, cold, |n| case.launch(stream, variant, n))?, cold));
        graphs.push((timer::capture(stream, warm, |_| case.launch(stream, variant, 0))?, warm));
    }
    let times = timer::interleaved(stream, &graphs, timer::Pace::within(args.repeats, args.most_ms))?;
    let mut kernels = Vec::new();
    for &variant in &variants {
        kernels.push(case.kernels(stream, variant)?);
    }
    let rows = variants.iter().zip(kernels).zip(&parity).zip(times.chunks_exact(2));
    Ok(rows
        .map(|(((variant, kernels), parity), times)| {
            json!({
                "schema": 1,
                "case": variant.case(),
                "variant": variant.name(),
                "shape": shape,
                "nodes": tree.len(),
                "depth": tree.max_depth(),
                "batch": batch,
                "dtype": variant.rows_dtype(),
                "graph": true,
                "l2": "rotated",
                "bytes": case.bytes(*variant),
                "flops": case.flops(*variant),
                "registers": kernels,
                "us_median": times[0].us_median,
                "us_p10": times[0].us_p10,
                "us_p90": times[0].us_p90,
                "us_warm": times[1].us_median,
                "distance_o": parity.map(|parity| parity.o),
                "distance_u": parity.and_then(|parity| parity.u),
                "max_abs_o": parity.map(|parity| parity.max_abs_o),
                "tape_bytes": case.tape_bytes(),
                "snapshot_bytes": case.snapshot_bytes(),
                "repeats": times[0].replays,
                "launches": case.launches(*variant)[0],
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
    let mut lines = Lines::open(args.json.as_deref())?;
    canopy_e2e::say!(
        "{:24} {:>7} {:>6} {:>6} {:>6} {:>10} {:>10}",
        "variant",
        "shape",
        "batch",
        "nodes",
        "depth",
        "cold us",
        "warm us"
    );
    let mut done = HashSet::new();
    for &batch in &args.batch {
        for &nodes in &args.nodes {
            for shape in &args.shapes {
                let Some(tree) = shapes::tree(shape, nodes)? else { continue };
                // a shape's trees do not have every size
                if !done.insert((batch, shape.clone(), tree.len())) {
                    continue;
                }
                let pace = timer::Pace::within(args.repeats, args.most_ms);
                let around = rows::rows(&stream, (shape, &tree), batch, |name| args.wants(name), pace)?;
                for row in shape_rows(&stream, args, shape, &tree, batch)?.into_iter().chain(around) {
                    canopy_e2e::say!(
                        "{:24} {shape:>7} {batch:>6} {:>6} {:>6} {:>10.2} {:>10.2}",
                        row["variant"].as_str().unwrap_or_default(),
                        tree.len(),
                        tree.max_depth(),
                        row["us_median"].as_f64().unwrap_or_default(),
                        row["us_warm"].as_f64().unwrap_or_default()
                    );
                    lines.write(row)?;
                }
            }
        }
    }
    lines.finish()
}
