//! `canopy-bench order`: what the order of a tree's rows does to their bits, and to the time, in every design.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::Schedule;
use clap::Args;
use cudarc::driver::CudaStream;
use serde_json::json;

use super::gdn::{self, Case};
use super::timer::{self, Pace};
use super::variant::Variant;
use crate::lines::Lines;

/// What to compare.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  canopy-bench order --nodes 64,128 --batch 1,16 --json order.jsonl")]
pub struct OrderArgs {
    /// Nodes of every tree
    #[arg(long, value_delimiter = ',', default_values_t = [32, 64, 128, 256])]
    nodes: Vec<usize>,
    /// Sequences of a batch
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    batch: Vec<usize>,
    /// Timed replays
    #[arg(long, default_value_t = 200)]
    repeats: usize,
    /// Milliseconds after which a variant gets no more of them (five at least); 0 is no limit
    #[arg(long, default_value_t = 0.0)]
    most_ms: f64,
    /// Appends one JSON line a variant and order to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Depth first, siblings in the order that `by` gives them.
fn depth_first(tree: &DraftTree, by: impl Fn(usize) -> u64) -> Vec<usize> {
    let children = tree.children();
    let (mut order, mut stack) = (Vec::with_capacity(tree.len()), vec![0]);
    while let Some(node) = stack.pop() {
        order.push(node);
        let mut siblings = children[node].clone();
        siblings.sort_by_key(|&child| std::cmp::Reverse(by(child)));
        stack.extend(siblings);
    }
    order
}

/// A number that says nothing about its node.
fn scattered(node: usize, seed: u64) -> u64 {
    ((node as u64 + 1) ^ seed << 32)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(29)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Orders of one tree, the first of which the others are compared with. Best first is how the builder gives a tree: by probability, a node
/// anywhere behind its parent.
fn orders(tree: &DraftTree) -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("depth first", tree.dfs_preorder()),
        ("depth first, siblings reversed", depth_first(tree, |node| u64::MAX - node as u64)),
        ("depth first, siblings shuffled", depth_first(tree, |node| scattered(node, 1))),
        ("levels", tree.level_order()),
        ("best first", (0..tree.len()).collect()),
    ]
}

/// How far two runs over the same nodes are apart.
struct Apart {
    rows_that_differ: usize,
    /// In units in the last place of the row's largest value.
    most_ulps: f64,
    relative: f64,
    max_abs: f64,
}

/// A unit in the last place of the largest value of a row, of bf16 where `half`.
fn ulp(row: &[f32], half: bool) -> f64 {
    let largest = row.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
    2f64.powi(largest.log2().floor() as i32 - if half { 7 } else { 23 })
}

/// `got` in the order `order` against `want` in the order `first`, row by row.
fn apart(got: (&[f32], &[usize]), want: (&[f32], &[usize]), half: bool) -> Result<Apart> {
    let (nodes, sequences) = (got.1.len(), got.0.len() / want.0.len().max(1));
    anyhow::ensure!(sequences == 1, "{} values against {}", got.0.len(), want.0.len());
    let width = got.0.len() / nodes;
    let mut place = vec![0; nodes];
    want.1.iter().enumerate().for_each(|(row, &node)| place[node] = row);
    let mut apart = Apart { rows_that_differ: 0, most_ulps: 0.0, relative: 0.0, max_abs: 0.0 };
    let mut aligned = Vec::with_capacity(want.0.len());
    for (row, &node) in got.0.chunks_exact(width).zip(got.1) {
        let other = &want.0[place[node] * width..][..width];
        let far = row.iter().zip(other).map(|(&a, &b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        apart.rows_that_differ += usize::from(row.iter().zip(other).any(|(a, b)| a.to_bits() != b.to_bits()));
        apart.most_ulps = apart.most_ulps.max(far / ulp(other, half));
        apart.max_abs = apart.max_abs.max(far);
        aligned.extend_from_slice(other);
    }
    apart.relative = gdn::distance(got.0, &aligned)?;
    Ok(apart)
}

/// What is compared: each design of each tier, in the block that small batches take.
fn variants(tree: &DraftTree) -> Vec<Variant> {
    let schedule = Schedule::for_tree(tree);
    let mut all = vec![Variant::Split, Variant::FusedA(32, schedule), Variant::Wide(32)];
    all.extend([Variant::FusedB(32, schedule), Variant::Blocked(32), Variant::Snapshots(32)]);
    all
}

fn rows(
    stream: &Arc<CudaStream>,
    args: &OrderArgs,
    shape: &str,
    tree: &DraftTree,
    batch: usize,
    lines: &mut Lines,
) -> Result<()> {
    let orders = orders(tree);
    let mut cases = Vec::new();
    for (_, order) in &orders {
        cases.push(Case::ordered(stream, tree, order, batch)?);
    }
    for variant in variants(tree) {
        if !cases[0].fits(stream, variant) {
            continue;
        }
        let (mut outputs, mut graphs) = (Vec::new(), Vec::new());
        for case in &mut cases {
            case.reserve(stream, variant)?;
            outputs.push(case.outputs(stream, variant)?);
            let [cold, _] = case.launches(variant);
            graphs.push((timer::capture(stream, cold, |n| case.launch(stream, variant, n))?, cold));
        }
        let times = timer::interleaved(stream, &graphs, Pace::within(args.repeats, args.most_ms))?;
        let first_len = outputs[0].0.len() / batch.min(2);
        for (((name, order), (o, u)), time) in orders.iter().zip(&outputs).zip(&times) {
            let (first, first_order) = (&outputs[0], &orders[0].1);
            // one sequence's rows: the order is that of one tree
            let o_apart =
                apart((&o[..first_len], order), (&first.0[..first_len], first_order), variant.tier_b())?;
            let mut row = json!({"schema": 1, "case": "tree_gdn.order", "variant": variant.name(), "shape": shape, "nodes": tree.len(),
                "depth": tree.max_depth(), "batch": batch, "order": name, "us_median": time.us_median, "us_p10": time.us_p10,
                "us_p90": time.us_p90, "repeats": time.replays, "rows_that_differ_o": o_apart.rows_that_differ,
                "most_ulps_o": o_apart.most_ulps, "max_abs_o": o_apart.max_abs, "relative_o": o_apart.relative});
            if let (Some(u), Some(first_u)) = (u, &first.1) {
                let u_apart = apart((&u[..first_len], order), (&first_u[..first_len], first_order), false)?;
                row["rows_that_differ_u"] = u_apart.rows_that_differ.into();
                row["most_ulps_u"] = u_apart.most_ulps.into();
                row["max_abs_u"] = u_apart.max_abs.into();
                row["relative_u"] = u_apart.relative.into();
            }
            canopy_e2e::say!(
                "{:22} {shape:>7} {batch:>6} {:>6} {name:32} {:>9.2} {:>6} {:>9.2} {:>10.2e}",
                variant.name(),
                tree.len(),
                time.us_median,
                o_apart.rows_that_differ,
                o_apart.most_ulps,
                o_apart.relative
            );
            lines.write(row)?;
        }
    }
    Ok(())
}

/// Runs every order of Bole's and of random trees and prints a line each; rows go to `--json`.
///
/// # Errors
/// From the launchers or the driver.
pub fn run(args: &OrderArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let mut lines = Lines::open(args.json.as_deref())?;
    canopy_e2e::say!(
        "{:22} {:>7} {:>6} {:>6} {:32} {:>9} {:>6} {:>9} {:>10}",
        "variant",
        "shape",
        "batch",
        "nodes",
        "order",
        "cold us",
        "rows",
        "ulps",
        "relative"
    );
    for &batch in &args.batch {
        for &nodes in &args.nodes {
            for (shape, tree) in
                [("bole", DraftTree::bole(nodes, 3)?), ("random", DraftTree::random(nodes, 3)?)]
            {
                rows(&stream, args, shape, &tree, batch, &mut lines)?;
            }
        }
    }
    lines.finish()
}
