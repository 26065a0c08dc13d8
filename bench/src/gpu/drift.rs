//! `canopy-bench drift`: rounds of verify and commit on random trees, each tier's state against a float64 run of the same path.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use canopy_kernels::cuda::{PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::oracle::{self, OracleInput};
use canopy_kernels::tree_gdn::{blocked, fused, launch};
use canopy_kernels::tree_gdn_serial::launch as serial;
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use clap::Args;
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;
use serde_json::json;

use super::gdn::{self, noise};
use super::timer;
use crate::lines::Lines;

/// Rows of the random projection: what stands for a vocabulary.
const TOKENS: usize = 512;

/// The ways to verify and commit: the baseline, tier A, and tier B in both of its designs.
const NAMES: [&str; 4] = ["serial", "a", "b", "blocked"];

/// What to run.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  canopy-bench drift --rounds 100 --json drift.jsonl")]
pub struct DriftArgs {
    /// Rounds of verify and commit
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// Nodes of every tree
    #[arg(long, default_value_t = 32)]
    nodes: usize,
    /// Appends one JSON line a round and a summary to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// One round's rows and gates, as every way reads them.
struct Round {
    tree: DraftTree,
    node: usize,
    qkv: Vec<bf16>,
    gates: Vec<f32>,
}

impl Round {
    /// Heads forget at rates from 1e-3 to 1e-1 a token, so that some carry every error on.
    fn new(dims: GdnDims, nodes: usize, seed: u64) -> Result<Self> {
        let tree = DraftTree::random(nodes, seed)?;
        let qkv = noise(nodes * dims.qkv_width(), 2 * seed + 1).map(bf16::from_f32).collect();
        let heads = dims.v_heads;
        let gate = |(i, x): (usize, f32)| match i / heads % 2 {
            0 => -x.abs() * 10f32.powf(-3.0 + 2.0 * (i % heads) as f32 / heads as f32),
            _ => 1.0 / (1.0 + (-x).exp()),
        };
        let gates = noise(nodes * 2 * heads, 2 * seed + 2).enumerate().map(gate).collect();
        let node = (seed as usize * 7919) % nodes;
        Ok(Self { tree, node, qkv, gates })
    }
}

/// A way to verify and commit, with the pool that its own commits make.
struct Way {
    name: &'static str,
    pool: CudaSlice<f32>,
    differing: usize,
}

/// Device buffers that all ways share.
struct Shared {
    dims: GdnDims,
    o: CudaSlice<f32>,
    o16: CudaSlice<bf16>,
    u: CudaSlice<f32>,
    g_cum: CudaSlice<f32>,
    snapshots: CudaSlice<f32>,
}

impl Shared {
    /// Verifies and commits one round; the outputs of every node.
    fn run(&mut self, stream: &Arc<CudaStream>, way: &mut Way, round: &Round) -> Result<Vec<f32>> {
        let (dims, batch) = (self.dims, TreeBatch::single(round.tree.clone(), 0));
        let (qkv, gates) = (stream.clone_htod(&round.qkv)?, stream.clone_htod(&round.gates)?);
        let tree = TreeOnDevice::new(stream, &batch)?;
        let paths = AcceptedPaths::new(&batch, &[round.tree.path(round.node)])?;
        let on_device = PathsOnDevice::new(stream, &paths)?;
        macro_rules! fused {
            ($design:ident, $o:ident) => {{
                let (o, u, g_cum) = (self.$o.as_view_mut(), self.u.as_view_mut(), self.g_cum.as_view_mut());
                let buffers = fused::FusedBuffers {
                    qkv: qkv.as_view(),
                    gates: gates.as_view(),
                    state: way.pool.as_view(),
                    o,
                    u,
                    g_cum,
                };
                $design::verify(stream, dims, &batch, &tree, 32, buffers)?;
                let tape =
                    launch::LayerTape { qkv: qkv.as_view(), gates: gates.as_view(), u: self.u.as_view() };
                let state = &mut way.pool.as_view_mut();
                launch::commit(stream, dims, &paths, &on_device, &[tape], state)?;
            }};
        }
        match way.name {
            "a" => fused!(fused, o),
            "b" | "blocked" => {
                match way.name {
                    "b" => fused!(fused, o16),
                    _ => fused!(blocked, o16),
                }
                return Ok(stream.clone_dtoh(&self.o16)?.into_iter().map(bf16::to_f32).collect());
            }
            _ => {
                let (snapshots, o) = (self.snapshots.as_view_mut(), self.o.as_view_mut());
                let state = way.pool.as_view();
                let buffers = serial::SnapshotBuffers {
                    qkv: qkv.as_view(),
                    gates: gates.as_view(),
                    state,
                    snapshots,
                    o,
                };
                serial::verify(stream, dims, &batch, &tree, 32, buffers)?;
                let (snapshots, state) = (self.snapshots.as_view(), way.pool.as_view_mut());
                serial::commit(stream, dims, &paths, &on_device, snapshots, state)?;
            }
        }
        Ok(stream.clone_dtoh(&self.o)?)
    }
}

/// For every row of `o`, the row of `projection` with the largest product.
fn argmax(o: &[f32], projection: &[f32], width: usize) -> Vec<usize> {
    let dot = |a: &[f32], b: &[f32]| {
        let mut sums = [0f32; 16];
        for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
            sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
        }
        sums.iter().sum::<f32>()
    };
    let best = |row: &[f32]| {
        let products = projection.chunks_exact(width).map(|token| dot(row, token));
        products.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(token, _)| token)
    };
    let mut tokens = vec![0; o.len() / width];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = tokens.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (rows, tokens) in o.chunks(share * width).zip(tokens.chunks_mut(share)) {
            scope.spawn(move || {
                rows.chunks_exact(width).zip(tokens).for_each(|(row, token)| *token = best(row))
            });
        }
    });
    tokens
}

/// Relative Frobenius error, and the largest difference.
fn errors(got: &[f32], want: &[f64]) -> (f64, f64) {
    let (mut error, mut norm, mut worst) = (0.0f64, 0.0f64, 0.0f64);
    for (&g, &w) in got.iter().zip(want) {
        let difference = (f64::from(g) - w).abs();
        error += difference * difference;
        norm += w * w;
        worst = if difference > worst || difference.is_nan() { difference } else { worst };
    }
    ((error / norm).sqrt(), worst)
}

/// Runs the rounds and prints every tenth; rows go to `--json`.
///
/// # Errors
/// When tier A's state leaves 1e-3 of the float64 run, or from the driver.
pub fn run(args: &DriftArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let (dims, mut lines) = (gdn::dims()?, Lines::open(args.json.as_deref())?);
    let planes = args.nodes * dims.v_heads;
    let mut shared = Shared {
        dims,
        o: stream.alloc_zeros(planes * dims.dv)?,
        o16: stream.alloc_zeros(planes * dims.dv)?,
        u: stream.alloc_zeros(planes * dims.dv)?,
        g_cum: stream.alloc_zeros(planes)?,
        snapshots: stream.alloc_zeros(args.nodes * dims.state_len())?,
    };
    let width = dims.v_heads * dims.dv;
    let projection: Vec<f32> = noise(TOKENS * width, 11).collect();
    let start: Vec<f32> = noise(dims.state_len(), 12).map(|x| 0.1 * x).collect();
    let mut truth: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
    let mut ways = Vec::new();
    for name in NAMES {
        ways.push(Way { name, pool: stream.clone_htod(&start)?, differing: 0 });
    }
    let (mut nodes, mut committed, mut last) = (0, 0, json!({}));
    canopy_e2e::say!(
        "{:>6} {:>8} {:>12} {:>12} {:>12} {:>12}",
        "round",
        "tokens",
        "serial",
        "tier A",
        "tier B",
        "blocked"
    );
    for at in 0..args.rounds {
        let round = Round::new(dims, args.nodes, at as u64 + 1)?;
        let wide = |x: f32| f64::from(x);
        let qkv: Vec<f64> = round.qkv.iter().map(|x| wide(x.to_f32())).collect();
        let gates: Vec<f64> = round.gates.iter().copied().map(wide).collect();
        let input = OracleInput { qkv: &qkv, gates: &gates, state: &truth };
        truth = oracle::commit(dims, &round.tree, round.node, input);
        nodes += round.tree.len();
        committed += round.tree.path(round.node).len();
        let mut row = json!({"schema": 1, "case": "tree_gdn.drift", "round": at + 1, "tokens": committed, "nodes": args.nodes});
        let mut picks = Vec::new();
        for way in &mut ways {
            let o = shared.run(&stream, way, &round)?;
            let tokens = argmax(&o, &projection, width);
            let (relative, worst) = errors(&stream.clone_dtoh(&way.pool)?, &truth);
            row[format!("relative_{}", way.name)] = relative.into();
            row[format!("max_abs_{}", way.name)] = worst.into();
            let serial: &Vec<usize> = picks.first().unwrap_or(&tokens);
            way.differing += serial.iter().zip(&tokens).filter(|(a, b)| a != b).count();
            picks.push(tokens);
        }
        if (at + 1) % 10 == 0 || at == 0 {
            let [serial, a, b, blocked] =
                NAMES.map(|name| row[format!("relative_{name}")].as_f64().unwrap_or(f64::NAN));
            canopy_e2e::say!(
                "{:>6} {committed:>8} {serial:>12.2e} {a:>12.2e} {b:>12.2e} {blocked:>12.2e}",
                at + 1
            );
        }
        ensure!(
            row["relative_a"].as_f64().is_some_and(|error| error <= 1e-3),
            "round {}: tier A's state: {row}",
            at + 1
        );
        lines.write(row.clone())?;
        last = row;
    }
    let differing = |name| ways.iter().find(|way| way.name == name).map_or(0, |way| way.differing);
    canopy_e2e::say!(
        "argmax of {TOKENS} products over {nodes} nodes differs from serial: tier A {}, tier B {}, blocked {}",
        differing("a"),
        differing("b"),
        differing("blocked")
    );
    lines.write(json!({"schema": 1, "case": "tree_gdn.drift.summary", "rounds": args.rounds, "tokens": committed, "nodes_compared": nodes,
        "projection_rows": TOKENS, "argmax_differs_a": differing("a"), "argmax_differs_b": differing("b"),
        "argmax_differs_blocked": differing("blocked"), "relative_serial": last["relative_serial"], "relative_a": last["relative_a"],
        "relative_b": last["relative_b"], "relative_blocked": last["relative_blocked"]}))?;
    lines.finish()
}
