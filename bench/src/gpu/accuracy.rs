//! `canopy-bench accuracy`: every solve on chains of random and of nearly equal keys, against float64.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use canopy_kernels::tree_gdn::Schedule;
use canopy_kernels::tree_gdn::oracle::{self, OracleInput, OracleOutput};
use canopy_kernels::{DraftTree, GdnDims};
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

/// The part of every row that belongs to the first key head and its value heads, which is what float64 runs.
struct Part {
    dims: GdnDims,
    v_heads: usize,
}

impl Part {
    fn new() -> Result<Self> {
        let all = gdn::dims()?;
        let dims = GdnDims::new(1, all.v_heads / all.k_heads, all.dk, all.dv)?;
        Ok(Self { dims, v_heads: all.v_heads })
    }

    /// Its part of a plane of value heads.
    fn of(&self, plane: &[f32]) -> Vec<f32> {
        let width = self.v_heads * self.dims.dv;
        plane.chunks_exact(width).flat_map(|row| row[..self.dims.v_heads * self.dims.dv].to_vec()).collect()
    }

    /// Float64's outputs on the rows as the device reads them.
    fn truth(&self, tree: &DraftTree, inputs: &Inputs) -> Result<OracleOutput> {
        let (all, own) = (gdn::dims()?, self.dims);
        let wide = |x: &f32| f64::from(*x);
        let mut qkv = Vec::new();
        for row in inputs.qkv.chunks_exact(all.qkv_width()) {
            let (q, rest) = row.split_at(all.k_heads * all.dk);
            let (k, v) = rest.split_at(all.k_heads * all.dk);
            let part = q[..own.dk].iter().chain(&k[..own.dk]).chain(&v[..own.v_heads * own.dv]);
            qkv.extend(part.map(|x: &bf16| f64::from(x.to_f32())));
        }
        let planes = inputs.gates.chunks_exact(all.v_heads);
        let gates: Vec<f64> = planes.flat_map(|plane| plane[..own.v_heads].iter().map(wide)).collect();
        let state: Vec<f64> = inputs.state[..own.state_len()].iter().map(wide).collect();
        Ok(oracle::verify(own, tree, OracleInput { qkv: &qkv, gates: &gates, state: &state }))
    }
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

/// A chain with float64's outputs.
struct Chain {
    tree: DraftTree,
    keys: Keys,
    inputs: Inputs,
    truth: OracleOutput,
}

impl Chain {
    fn new(part: &Part, nodes: usize, keys: Keys) -> Result<Self> {
        let (tree, inputs) = (DraftTree::chain(nodes)?, Inputs::new(nodes, 1, keys)?);
        let truth = part.truth(&tree, &inputs)?;
        Ok(Self { tree, keys, inputs, truth })
    }

    fn compare(&self, stream: &Arc<CudaStream>, part: &Part, lines: &mut Lines) -> Result<()> {
        let (nodes, mut case) = (self.tree.len(), Case::of(stream, &self.tree, 1, &self.inputs)?);
        let keys = if self.keys == Keys::Random { "random" } else { "nearly equal" };
        for variant in variants(&self.tree) {
            if !case.fits(stream, variant) {
                continue;
            }
            let (o, u) = case.outputs(stream, variant)?;
            let o = error(&part.of(&o), &self.truth.o);
            let u = u.and_then(|u| error(&part.of(&u), &self.truth.u));
            let shown =
                |error: Option<f64>| error.map_or("not finite".into(), |error| format!("{error:.2e}"));
            canopy_e2e::say!("{keys:>12} {nodes:>6} {:24} {:>12} {:>12}", variant.name(), shown(o), shown(u));
            lines.write(
                json!({"schema": 1, "case": "tree_gdn.accuracy", "variant": variant.name(), "shape": "chain",
                "keys": keys, "nodes": nodes, "depth": nodes - 1, "relative_o": o, "relative_u": u}),
            )?;
        }
        Ok(())
    }
}

/// Runs every chain and prints a line a variant; rows go to `--json`.
///
/// # Errors
/// From the launchers or the driver.
pub fn run(args: &AccuracyArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let mut lines = Lines::open(args.json.as_deref())?;
    canopy_e2e::say!("{:>12} {:>6} {:24} {:>12} {:>12}", "keys", "nodes", "variant", "o", "u");
    let (part, sizes) = (Part::new()?, [Keys::Random, Keys::NearlyEqual]);
    let chains: Vec<_> = std::thread::scope(|scope| {
        let of = |keys: Keys| args.nodes.iter().map(move |&nodes| (nodes, keys));
        let part = &part;
        let running: Vec<_> = sizes
            .into_iter()
            .flat_map(of)
            .map(|(nodes, keys)| scope.spawn(move || Chain::new(part, nodes, keys)))
            .collect();
        running.into_iter().map(|chain| chain.join().expect("no oracle panics")).collect::<Result<_>>()
    })?;
    for chain in chains {
        chain.compare(&stream, &part, &mut lines)?;
    }
    lines.finish()
}
