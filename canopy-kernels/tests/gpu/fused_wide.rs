//! tree_gdn, fused design on f32 rows: against the float64 oracle on the same rows, every block.

use std::sync::Arc;

use canopy_kernels::cuda::{Kernels, TreeOnDevice};
use canopy_kernels::tree_gdn::fused;
use canopy_kernels::{DraftTree, TreeBatch};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, small, text};
use crate::fused::{Output, truth};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::fused_f32_rows_equal_the_oracle_at_every_tile_edge", tile_edges),
    ("tree_gdn::fused_f32_rows_keep_the_bound_on_branching_trees_nearly_equal_keys_and_decays", hard),
    ("tree_gdn::fused_f32_rows_do_not_depend_on_columns_batch_or_slot_and_padding_is_zero", invariant),
    ("tree_gdn::fused_f32_rows_a_nan_reaches_descendants_only", nan),
    ("tree_gdn::fused_f32_rows_of_more_than_128_nodes_are_refused", refused),
];

const COLUMNS: [usize; 2] = [32, 64];

/// Runs a case; every output starts as NaN. `None` where the blocks of this device cannot hold the tree.
fn run(stream: &Arc<CudaStream>, case: &Case, columns: usize) -> Result<Option<Output>, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let up = |x: &[f32]| stream.clone_htod(x).map_err(text);
    let (qkv, gates, state) = (up(&case.qkv)?, up(&case.gates)?, up(&case.state)?);
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let planes = batch.rows() * dims.v_heads;
    let (mut o, mut u, mut g_cum) = (poison(planes * dims.dv)?, poison(planes * dims.dv)?, poison(planes)?);
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let limit = Kernels::on(stream.context()).map_err(text)?.shared_limit();
    if fused::wide_shared_bytes(&tree, columns).is_some_and(|bytes| bytes > limit) {
        return Ok(None);
    }
    let buffers = fused::FusedBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    fused::verify_wide(stream, dims, batch, &tree, columns, buffers).map_err(text)?;
    let down = |x| stream.clone_dtoh(x).map_err(text);
    Ok(Some(Output { o: down(&o)?, u: down(&u)?, g_cum: down(&g_cum)? }))
}

fn of(tree: DraftTree, hardness: Hardness) -> Case {
    Case::new(small(), TreeBatch::single(tree, 0), 1, hardness, |x| x, 7)
}

fn check(stream: &Arc<CudaStream>, name: &str, tree: DraftTree, hardness: Hardness) -> Result<(), String> {
    let case = of(tree, hardness);
    let truth = truth(&case);
    for columns in COLUMNS {
        let name = format!("{name}, {columns} columns");
        let Some(got) = run(stream, &case, columns)? else { continue };
        compare(&format!("{name}: o"), &got.o, &truth.o)?;
        compare(&format!("{name}: u"), &got.u, &truth.u)?;
        compare(&format!("{name}: g_cum"), &got.g_cum, &truth.g_cum)?;
    }
    Ok(())
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([63, 64, 65, 100, 127, 128]) {
        let chain = DraftTree::chain(nodes).map_err(text)?;
        check(stream, &format!("chain of {nodes}"), chain, Hardness::Random)?;
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        check(stream, &format!("random tree of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn hard(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [8, 16, 64, 128] {
        let tree = DraftTree::bole(nodes, 3).map_err(text)?;
        check(stream, &format!("Bole's shape, {nodes} nodes"), tree, Hardness::Random)?;
    }
    for nodes in [16, 24, 32, 64, 100] {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check(stream, &format!("nearly equal keys, chain of {nodes}"), tree, Hardness::EqualKeys)?;
    }
    let tree = DraftTree::bole(64, 5).map_err(text)?;
    check(stream, "nearly equal keys, Bole's shape", tree, Hardness::EqualKeys)?;
    check(stream, "g alternates 0 and -20", DraftTree::chain(64).map_err(text)?, Hardness::Decay)
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees: Vec<DraftTree> = [7, 21, 1, 64, 100]
        .iter()
        .map(|&n| DraftTree::random(n, n as u64))
        .collect::<Result<_, _>>()
        .map_err(text)?;
    let batch = TreeBatch::new(trees, vec![3, 0, -1, 1, 2]).map_err(text)?;
    let case = Case::new(small(), batch, 5, Hardness::Random, |x| x, 5);
    let plane = small().v_heads * small().dv;
    let missing = || "the block does not fit".to_string();
    let together = run(stream, &case, 32)?.ok_or_else(missing)?;
    let wider = run(stream, &case, 64)?.ok_or_else(missing)?;
    if bits(&together.o) != bits(&wider.o) || bits(&together.u) != bits(&wider.u) {
        return Err("32 and 64 columns differ in bits".into());
    }
    for (first, tree, slot) in case.batch.iter() {
        let rows = first * plane..(first + tree.len()) * plane;
        let Some(slot) = slot else {
            if together.o[rows.clone()].iter().chain(&together.u[rows]).any(|&x| x != 0.0) {
                return Err("a padding row is not zero".into());
            }
            continue;
        };
        let alone = run(stream, &case.alone(first, tree, slot), 32)?.ok_or_else(missing)?;
        if bits(&alone.o) != bits(&together.o[rows.clone()]) || bits(&alone.u) != bits(&together.u[rows]) {
            return Err(format!("a tree of {} differs from its run alone", tree.len()));
        }
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (dims, tree) = (small(), DraftTree::bole(64, 2).map_err(text)?);
    let plane = dims.v_heads * dims.dv;
    let missing = || "the block does not fit".to_string();
    let mut case = of(tree.clone(), Hardness::Random);
    let before = run(stream, &case, 32)?.ok_or_else(missing)?;
    let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
    for (node, channel, value) in planted {
        case.qkv[node * dims.qkv_width() + channel] = value;
    }
    let (after, truth) = (run(stream, &case, 32)?.ok_or_else(missing)?, truth(&case));
    for node in 0..tree.len() {
        let (path, rows) = (tree.path(node), node * plane..(node + 1) * plane);
        let reached = planted.iter().any(|(bad, _, _)| path.contains(bad));
        if !reached && bits(&before.o[rows.clone()]) != bits(&after.o[rows]) {
            return Err(format!("node {node} changed, though no ancestor of it is bad"));
        }
    }
    match after.o.iter().zip(&truth.o).find(|(got, want)| got.is_finite() != want.is_finite()) {
        Some((got, want)) => Err(format!("got {got}, float64 gives {want}")),
        None => Ok(()),
    }
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let case = of(DraftTree::random(129, 1).map_err(text)?, Hardness::Random);
    match run(stream, &case, 32) {
        Err(message) if message.contains("129 nodes") => Ok(()),
        Err(message) => Err(format!("the message does not name the nodes: {message}")),
        Ok(_) => Err("129 nodes were accepted".into()),
    }
}
