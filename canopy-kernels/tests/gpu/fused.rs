//! tree_gdn, fused design: against the float64 oracle on the same rounded rows, every block shape and both schedules.

use std::sync::Arc;

use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_gdn::{Schedule, fused, oracle};
use canopy_kernels::{DraftTree, TreeBatch};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, compare_within, round_bf16, small, text, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::fused_equals_the_oracle_at_every_tile_edge", tile_edges),
    ("tree_gdn::fused_equals_the_oracle_on_branching_trees", branching),
    ("tree_gdn::fused_keeps_the_bound_on_nearly_equal_keys_and_decays", hard),
    ("tree_gdn::fused_rows_do_not_depend_on_schedule_columns_batch_or_slot", invariant),
    ("tree_gdn::fused_padding_is_zero", padding),
    ("tree_gdn::fused_a_nan_reaches_descendants_only", nan),
    ("tree_gdn::fused_infinite_log_gates_forget_everything", infinite_gates),
];

/// What one call wrote, widened to f32.
#[derive(Debug)]
pub struct Output {
    pub o: Vec<f32>,
    pub u: Vec<f32>,
    pub g_cum: Vec<f32>,
}

/// Runs tier A (`Out` f32) or tier B (bf16) on a case; `out` starts as NaN.
pub fn run<Out: fused::Tier + Copy>(
    stream: &Arc<CudaStream>,
    case: &Case,
    schedule: Option<Schedule>,
    columns: usize,
    (nan, widen): (Out, fn(Out) -> f32),
) -> Result<Output, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let qkv: Vec<bf16> = case.qkv.iter().map(|&x| bf16::from_f32(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let state = stream.clone_htod(&case.state).map_err(text)?;
    let planes = batch.rows() * dims.v_heads;
    let mut o = stream.clone_htod(&vec![nan; planes * dims.dv]).map_err(text)?;
    let mut u = stream.clone_htod(&vec![f32::NAN; planes * dims.dv]).map_err(text)?;
    let mut g_cum = stream.clone_htod(&vec![f32::NAN; planes]).map_err(text)?;
    let tree = TreeOnDevice::with_schedule(stream, batch, |tree| {
        schedule.unwrap_or_else(|| Schedule::for_tree(tree))
    })
    .map_err(text)?;
    let buffers = fused::FusedBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    fused::verify(stream, dims, batch, &tree, columns, buffers).map_err(text)?;
    let o = stream.clone_dtoh(&o).map_err(text)?.into_iter().map(widen).collect();
    Ok(Output { o, u: stream.clone_dtoh(&u).map_err(text)?, g_cum: stream.clone_dtoh(&g_cum).map_err(text)? })
}

fn tier_a(
    stream: &Arc<CudaStream>,
    case: &Case,
    schedule: Option<Schedule>,
    columns: usize,
) -> Result<Output, String> {
    run::<f32>(stream, case, schedule, columns, (f32::NAN, |x| x))
}

fn tier_b(stream: &Arc<CudaStream>, case: &Case, columns: usize) -> Result<Output, String> {
    run::<bf16>(stream, case, None, columns, (bf16::NAN, bf16::to_f32))
}

pub fn truth(case: &Case) -> oracle::OracleOutput {
    let (qkv, gates, state) = (wide(&case.qkv), wide(&case.gates), wide(&case.state));
    let input = oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
    oracle::verify(case.dims, &case.batch.trees()[0], input)
}

fn check(stream: &Arc<CudaStream>, name: &str, tree: DraftTree, hardness: Hardness) -> Result<(), String> {
    let columns: &[usize] = if tree.len() <= 128 { &[32, 64, 128] } else { &[32, 64] };
    let case = Case::new(small(), TreeBatch::single(tree, 0), 1, hardness, round_bf16, 7);
    let truth = truth(&case);
    for &columns in columns {
        let name = format!("{name}, {columns} columns");
        let got = tier_a(stream, &case, None, columns)?;
        compare(&format!("{name}: o"), &got.o, &truth.o)?;
        compare(&format!("{name}: u"), &got.u, &truth.u)?;
        compare(&format!("{name}: g_cum"), &got.g_cum, &truth.g_cum)?;
        let got = tier_b(stream, &case, columns)?;
        compare_within(&format!("{name}: tier B o"), &got.o, &truth.o, 1e-2)?;
        compare_within(&format!("{name}: tier B u"), &got.u, &truth.u, 1e-2)?;
    }
    Ok(())
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]) {
        if nodes <= 128 {
            check(
                stream,
                &format!("chain of {nodes}"),
                DraftTree::chain(nodes).map_err(text)?,
                Hardness::Random,
            )?;
        }
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        check(stream, &format!("random tree of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn branching(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [8, 16, 64, 128, 256] {
        let tree = DraftTree::bole(nodes, 3).map_err(text)?;
        let level = tree.reorder(&tree.level_order()).map_err(text)?.0;
        check(stream, &format!("Bole's shape, {nodes} nodes"), tree, Hardness::Random)?;
        check(stream, &format!("Bole's shape, {nodes} nodes, level order"), level, Hardness::Random)?;
    }
    check(stream, "top-2, depth 6", DraftTree::balanced(2, 6).map_err(text)?, Hardness::Random)?;
    check(stream, "skewed", DraftTree::skewed(2, 40).map_err(text)?, Hardness::Random)
}

fn hard(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [16, 24, 32, 64, 128] {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check(stream, &format!("nearly equal keys, chain of {nodes}"), tree, Hardness::EqualKeys)?;
    }
    check(
        stream,
        "nearly equal keys, Bole's shape",
        DraftTree::bole(64, 5).map_err(text)?,
        Hardness::EqualKeys,
    )?;
    check(stream, "g alternates 0 and -20", DraftTree::chain(64).map_err(text)?, Hardness::Decay)
}

fn same(what: &str, a: &[f32], b: &[f32]) -> Result<(), String> {
    if bits(a) == bits(b) { Ok(()) } else { Err(format!("{what}: the bits differ")) }
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let trees: Vec<DraftTree> = [7, 21, 1, 64, 100]
        .iter()
        .map(|&n| DraftTree::random(n, n as u64))
        .collect::<Result<_, _>>()
        .map_err(text)?;
    let batch = TreeBatch::new(trees, vec![3, 0, 4, 1, 2]).map_err(text)?;
    let case = Case::new(dims, batch, 5, Hardness::Random, round_bf16, 5);
    let plane = dims.v_heads * dims.dv;
    let together = tier_a(stream, &case, Some(Schedule::Levels), 32)?;
    let chains = tier_a(stream, &case, Some(Schedule::Chains), 32)?;
    same("levels against chains: o", &together.o, &chains.o)?;
    same("levels against chains: u", &together.u, &chains.u)?;
    for columns in [64, 128] {
        let wide = tier_a(stream, &case, None, columns)?;
        same(&format!("32 against {columns} columns: o"), &together.o, &wide.o)?;
    }
    for (first, tree, slot) in case.batch.iter() {
        let slot = slot.ok_or("no padding here")?;
        let cut = |x: &[f32], width: usize| x[first * width..(first + tree.len()) * width].to_vec();
        let alone = case.alone(first, tree, slot);
        let got = tier_a(stream, &alone, None, 32)?;
        same(&format!("a tree of {} alone: o", tree.len()), &got.o, &cut(&together.o, plane))?;
        same(&format!("a tree of {} alone: u", tree.len()), &got.u, &cut(&together.u, plane))?;
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees = vec![DraftTree::chain(5).map_err(text)?, DraftTree::chain(9).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![-1, 1]).map_err(text)?;
    let case = Case::new(small(), batch, 3, Hardness::Random, round_bf16, 9);
    let got = tier_a(stream, &case, None, 32)?;
    let zero = |x: &[f32]| x.iter().all(|&x| x == 0.0);
    if zero(&got.o[..5 * 256]) && zero(&got.u[..5 * 256]) && zero(&got.g_cum[..10]) {
        return Ok(());
    }
    Err("a padding row is not zero".into())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let tree = DraftTree::bole(64, 2).map_err(text)?;
    let mut case = Case::new(dims, TreeBatch::single(tree.clone(), 0), 1, Hardness::Random, round_bf16, 3);
    let before = tier_a(stream, &case, None, 32)?;
    let clean = case.qkv.clone();
    let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
    for (node, channel, value) in planted {
        case.qkv[node * dims.qkv_width() + channel] = value;
    }
    let (after, truth) = (tier_a(stream, &case, None, 32)?, truth(&case));
    let plane = dims.v_heads * dims.dv;
    for node in 0..tree.len() {
        let path = tree.path(node);
        let below = planted.iter().any(|(bad, _, _)| path.contains(bad));
        let rows = node * plane..(node + 1) * plane;
        if !below {
            same(&format!("node {node}, no bad ancestor"), &before.o[rows.clone()], &after.o[rows.clone()])?;
        }
        for (got, want) in after.o[rows.clone()].iter().zip(&truth.o[rows]) {
            if got.is_finite() != want.is_finite() {
                return Err(format!("node {node}: got {got}, float64 gives {want}"));
            }
        }
    }
    // whichever node a kernel takes last, its value may not reach the nodes above
    case.qkv = clean;
    let is_leaf = |node: usize| !tree.parents().contains(&(node as i32));
    for leaf in (0..tree.len()).filter(|&node| is_leaf(node)) {
        case.qkv[leaf * dims.qkv_width() + 300] = f32::NAN;
    }
    let after = tier_a(stream, &case, None, 32)?;
    for node in (0..tree.len()).filter(|&node| !is_leaf(node)) {
        let rows = node * plane..(node + 1) * plane;
        same(&format!("node {node}, above leaves that are NaN"), &before.o[rows.clone()], &after.o[rows])?;
    }
    Ok(())
}

fn infinite_gates(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let tree = DraftTree::random(40, 6).map_err(text)?;
    let mut case = Case::new(dims, TreeBatch::single(tree, 0), 1, Hardness::Random, round_bf16, 4);
    for node in [2, 3, 11] {
        case.gates[node * 2 * dims.v_heads] = f32::NEG_INFINITY;
    }
    let (got, truth) = (tier_a(stream, &case, None, 32)?, truth(&case));
    compare("o under decays of exactly 0", &got.o, &truth.o)?;
    compare("u under decays of exactly 0", &got.u, &truth.u)
}
