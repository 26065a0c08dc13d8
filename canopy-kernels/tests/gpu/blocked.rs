//! tree_gdn, blocked design: against the float64 oracle on the same rounded rows, every block shape.

use std::sync::Arc;

use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_gdn::{blocked, fused};
use canopy_kernels::{DraftTree, TreeBatch};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare_within, round_bf16, small, text};
use crate::fused::{Output, truth};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::blocked_equals_the_oracle_at_every_tile_edge", tile_edges),
    ("tree_gdn::blocked_keeps_the_bound_on_branching_trees_nearly_equal_keys_and_decays", hard),
    ("tree_gdn::blocked_rows_do_not_depend_on_columns_batch_or_slot", invariant),
    ("tree_gdn::blocked_padding_is_zero", padding),
    ("tree_gdn::blocked_a_nan_reaches_descendants_only", nan),
    ("tree_gdn::blocked_infinite_log_gates_forget_everything", infinite_gates),
    ("tree_gdn::blocked_refuses_what_is_not_built", refused),
];

const BOUND: f64 = 1e-2;

/// Runs a case; every output starts as NaN.
fn run(stream: &Arc<CudaStream>, case: &Case, columns: usize) -> Result<Output, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let qkv: Vec<bf16> = case.qkv.iter().map(|&x| bf16::from_f32(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let state = stream.clone_htod(&case.state).map_err(text)?;
    let planes = batch.rows() * dims.v_heads;
    let mut o = stream.clone_htod(&vec![bf16::NAN; planes * dims.dv]).map_err(text)?;
    let mut u = stream.clone_htod(&vec![f32::NAN; planes * dims.dv]).map_err(text)?;
    let mut g_cum = stream.clone_htod(&vec![f32::NAN; planes]).map_err(text)?;
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let buffers = fused::FusedBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    blocked::verify(stream, dims, batch, &tree, columns, buffers).map_err(text)?;
    let o = stream.clone_dtoh(&o).map_err(text)?.into_iter().map(bf16::to_f32).collect();
    Ok(Output { o, u: stream.clone_dtoh(&u).map_err(text)?, g_cum: stream.clone_dtoh(&g_cum).map_err(text)? })
}

/// The column counts that are built for a tree of so many nodes.
fn columns(nodes: usize) -> impl Iterator<Item = usize> {
    blocked::COLUMNS.into_iter().filter(move |&columns| blocked::fits(nodes, columns, usize::MAX))
}

fn check(stream: &Arc<CudaStream>, name: &str, tree: DraftTree, hardness: Hardness) -> Result<(), String> {
    let nodes = tree.len();
    let case = Case::new(small(), TreeBatch::single(tree, 0), 1, hardness, round_bf16, 7);
    let truth = truth(&case);
    let mut first: Option<Output> = None;
    for columns in columns(nodes) {
        let name = format!("{name}, {columns} columns");
        let got = run(stream, &case, columns)?;
        compare_within(&format!("{name}: o"), &got.o, &truth.o, BOUND)?;
        compare_within(&format!("{name}: u"), &got.u, &truth.u, BOUND)?;
        compare_within(&format!("{name}: g_cum"), &got.g_cum, &truth.g_cum, 1e-5)?;
        match &first {
            Some(first) => equal(&name, first, &got)?,
            None => first = Some(got),
        }
    }
    first.map(drop).ok_or_else(|| format!("{name}: no block takes {nodes} nodes"))
}

fn equal(what: &str, a: &Output, b: &Output) -> Result<(), String> {
    if bits(&a.o) == bits(&b.o) && bits(&a.u) == bits(&b.u) && bits(&a.g_cum) == bits(&b.g_cum) {
        return Ok(());
    }
    Err(format!("{what}: the bits differ"))
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256]) {
        let chain = DraftTree::chain(nodes).map_err(text)?;
        check(stream, &format!("chain of {nodes}"), chain, Hardness::Random)?;
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        check(stream, &format!("random tree of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn hard(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [16, 64, 128, 256] {
        let tree = DraftTree::bole(nodes, 3).map_err(text)?;
        let level = tree.reorder(&tree.level_order()).map_err(text)?.0;
        check(stream, &format!("Bole's shape, {nodes} nodes"), tree, Hardness::Random)?;
        check(stream, &format!("Bole's shape, {nodes} nodes, level order"), level, Hardness::Random)?;
    }
    for nodes in [16, 24, 32, 64, 128, 256] {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check(stream, &format!("nearly equal keys, chain of {nodes}"), tree, Hardness::EqualKeys)?;
    }
    let tree = DraftTree::bole(64, 5).map_err(text)?;
    check(stream, "nearly equal keys, Bole's shape", tree, Hardness::EqualKeys)?;
    check(stream, "skewed", DraftTree::skewed(2, 99).map_err(text)?, Hardness::Random)?;
    check(stream, "g alternates 0 and -20", DraftTree::chain(64).map_err(text)?, Hardness::Decay)
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    for sizes in [[7, 21, 1, 64, 100], [7, 250, 1, 64, 100]] {
        let trees: Vec<DraftTree> =
            sizes.iter().map(|&n| DraftTree::random(n, n as u64)).collect::<Result<_, _>>().map_err(text)?;
        let batch = TreeBatch::new(trees, vec![3, 0, 4, 1, 2]).map_err(text)?;
        let case = Case::new(dims, batch, 5, Hardness::Random, round_bf16, 5);
        let plane = dims.v_heads * dims.dv;
        let together = run(stream, &case, 32)?;
        for columns in columns(*sizes.iter().max().unwrap_or(&1)) {
            equal(&format!("32 against {columns} columns"), &together, &run(stream, &case, columns)?)?;
        }
        for (first, tree, slot) in case.batch.iter() {
            let slot = slot.ok_or("no padding here")?;
            let cut = |x: &[f32], width: usize| x[first * width..(first + tree.len()) * width].to_vec();
            let part = Output {
                o: cut(&together.o, plane),
                u: cut(&together.u, plane),
                g_cum: cut(&together.g_cum, dims.v_heads),
            };
            for columns in columns(tree.len()) {
                let got = run(stream, &case.alone(first, tree, slot), columns)?;
                equal(&format!("a tree of {} alone, {columns} columns", tree.len()), &got, &part)?;
            }
        }
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees = vec![DraftTree::chain(5).map_err(text)?, DraftTree::chain(9).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![-1, 1]).map_err(text)?;
    let case = Case::new(small(), batch, 3, Hardness::Random, round_bf16, 9);
    for columns in columns(9) {
        let got = run(stream, &case, columns)?;
        let zero = |x: &[f32]| x.iter().all(|&x| x == 0.0);
        if !(zero(&got.o[..5 * 256]) && zero(&got.u[..5 * 256]) && zero(&got.g_cum[..10])) {
            return Err(format!("{columns} columns: a padding row is not zero"));
        }
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    for nodes in [64, 200] {
        let tree = DraftTree::bole(nodes, 2).map_err(text)?;
        let mut case =
            Case::new(dims, TreeBatch::single(tree.clone(), 0), 1, Hardness::Random, round_bf16, 3);
        let before = run(stream, &case, 32)?;
        let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
        for (node, channel, value) in planted {
            case.qkv[node * dims.qkv_width() + channel] = value;
        }
        let truth = truth(&case);
        for columns in columns(nodes) {
            let after = run(stream, &case, columns)?;
            nan_rows(&format!("{nodes} nodes, {columns} columns"), &tree, &planted, [&before, &after])?;
            let pairs = after.o.iter().zip(&truth.o).chain(after.u.iter().zip(&truth.u));
            if let Some((got, want)) =
                pairs.into_iter().find(|(got, want)| got.is_finite() != want.is_finite())
            {
                return Err(format!("{nodes} nodes, {columns} columns: got {got}, float64 gives {want}"));
            }
        }
    }
    Ok(())
}

/// Fails where a row without a planted value on its path has changed.
fn nan_rows(
    what: &str,
    tree: &DraftTree,
    planted: &[(usize, usize, f32)],
    [before, after]: [&Output; 2],
) -> Result<(), String> {
    let plane = small().v_heads * small().dv;
    for node in 0..tree.len() {
        let path = tree.path(node);
        let rows = node * plane..(node + 1) * plane;
        let same = bits(&before.o[rows.clone()]) == bits(&after.o[rows.clone()])
            && bits(&before.u[rows.clone()]) == bits(&after.u[rows]);
        if !same && !planted.iter().any(|(bad, _, _)| path.contains(bad)) {
            return Err(format!("{what}: node {node} changed, though no ancestor of it is bad"));
        }
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
    let (got, truth) = (run(stream, &case, 32)?, truth(&case));
    compare_within("o under decays of exactly 0", &got.o, &truth.o, BOUND)?;
    compare_within("u under decays of exactly 0", &got.u, &truth.u, BOUND)
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let case = Case::new(
        small(),
        TreeBatch::single(DraftTree::chain(200).map_err(text)?, 0),
        1,
        Hardness::Random,
        round_bf16,
        1,
    );
    match run(stream, &case, 128) {
        Err(message) if message.contains("128 value columns") => Ok(()),
        Err(message) => Err(format!("the message does not name the columns: {message}")),
        Ok(_) => Err("128 columns of 200 nodes were accepted".into()),
    }
}
