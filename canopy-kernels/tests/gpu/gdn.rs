//! tree_gdn: verify and commit against the serial float64 recurrence along each node's own path.

use std::sync::Arc;

use canopy_kernels::cuda::{PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{launch, oracle};
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, round_bf16, small, text, to_last, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::verify_and_commit_equal_the_oracle_at_every_tile_edge", tile_edges),
    ("tree_gdn::verify_equals_the_oracle_on_branching_trees", branching),
    ("tree_gdn::nearly_equal_keys_keep_the_bound", equal_keys),
    ("tree_gdn::decay_keeps_the_bound", decay),
    ("tree_gdn::bf16_rows_equal_the_oracle_on_the_same_rounded_inputs", bf16_rows),
    ("tree_gdn::a_ragged_batch_equals_each_tree_alone_bit_for_bit", ragged),
    ("tree_gdn::padding_is_zero_and_the_pool_is_untouched", padding),
    ("tree_gdn::a_nan_reaches_descendants_only", nan),
    ("tree_gdn::five_runs_are_byte_identical", repeat),
    ("tree_gdn::wrong_lengths_are_refused_by_name", refused),
];

/// What verify and commit wrote.
pub struct Output {
    pub o: Vec<f32>,
    pub u: Vec<f32>,
    pub g_cum: Vec<f32>,
    pub state: Vec<f32>,
}

/// Verifies a case in the split design and commits `paths`.
pub fn run<T: launch::Element + Clone + Default>(
    stream: &Arc<CudaStream>,
    case: &Case,
    paths: &[Vec<usize>],
    convert: fn(f32) -> T,
) -> Result<Output, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let qkv: Vec<T> = case.qkv.iter().map(|&x| convert(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let mut state = stream.clone_htod(&case.state).map_err(text)?;
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let mut scratch = poison(launch::scratch_len(dims, batch))?;
    let planes = batch.rows() * dims.v_heads;
    let (mut o, mut u, mut g_cum) = (poison(planes * dims.dv)?, poison(planes * dims.dv)?, poison(planes)?);
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let buffers = launch::VerifyBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        scratch: &mut scratch,
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    launch::verify(stream, dims, batch, &tree, buffers).map_err(text)?;
    let accepted = AcceptedPaths::new(batch, paths).map_err(text)?;
    let on_device = PathsOnDevice::new(stream, &accepted).map_err(text)?;
    let tape = launch::LayerTape { qkv: qkv.as_view(), gates: gates.as_view(), u: u.as_view() };
    launch::commit(stream, dims, &accepted, &on_device, &[tape], &mut state.as_view_mut()).map_err(text)?;
    let copy = |slice| stream.clone_dtoh(slice).map_err(text);
    Ok(Output { o: copy(&o)?, u: copy(&u)?, g_cum: copy(&g_cum)?, state: copy(&state)? })
}

/// Every sequence of the case against the oracle; each commits the path to its last node.
fn against_oracle(name: &str, case: &Case, got: &Output, paths: &[Vec<usize>]) -> Result<(), String> {
    let dims = case.dims;
    for (b, (first, tree, slot)) in case.batch.iter().enumerate() {
        let Some(slot) = slot else { continue };
        let rows = first..first + tree.len();
        let cut = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let (qkv, gates) =
            (wide(&cut(&case.qkv, dims.qkv_width())), wide(&cut(&case.gates, 2 * dims.v_heads)));
        let state = wide(&case.state[slot * dims.state_len()..][..dims.state_len()]);
        let input = oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
        let truth = oracle::verify(dims, tree, input);
        let plane = dims.v_heads * dims.dv;
        compare(&format!("{name}: o of sequence {b}"), &cut(&got.o, plane), &truth.o)?;
        compare(&format!("{name}: u of sequence {b}"), &cut(&got.u, plane), &truth.u)?;
        compare(&format!("{name}: g_cum of sequence {b}"), &cut(&got.g_cum, dims.v_heads), &truth.g_cum)?;
        if let Some(&last) = paths[b].last() {
            let end = oracle::commit(dims, tree, last, input);
            let got = &got.state[slot * dims.state_len()..][..dims.state_len()];
            compare(&format!("{name}: state of sequence {b}"), got, &end)?;
        }
    }
    Ok(())
}

fn check_tree(
    stream: &Arc<CudaStream>,
    name: &str,
    tree: DraftTree,
    hardness: Hardness,
) -> Result<(), String> {
    let case = Case::new(small(), TreeBatch::single(tree, 1), 2, hardness, |x| x, 7);
    let paths = to_last(&case.batch);
    let got = run::<f32>(stream, &case, &paths, |x| x)?;
    against_oracle(name, &case, &got, &paths)
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]) {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check_tree(stream, &format!("chain of {nodes}"), tree, Hardness::Random)?;
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        check_tree(stream, &format!("random tree of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn branching(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [8, 16, 64, 128, 256] {
        let tree = DraftTree::bole(nodes, 3).map_err(text)?;
        let order = tree.level_order();
        let level = tree.reorder(&order).map_err(text)?.0;
        check_tree(stream, &format!("Bole's shape, {nodes} nodes"), tree, Hardness::Random)?;
        check_tree(stream, &format!("Bole's shape, {nodes} nodes, level order"), level, Hardness::Random)?;
    }
    check_tree(stream, "top-2, depth 6", DraftTree::balanced(2, 6).map_err(text)?, Hardness::Random)
}

fn equal_keys(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [16, 24, 32, 64, 128] {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check_tree(stream, &format!("nearly equal keys, chain of {nodes}"), tree, Hardness::EqualKeys)?;
    }
    check_tree(
        stream,
        "nearly equal keys, Bole's shape",
        DraftTree::bole(64, 5).map_err(text)?,
        Hardness::EqualKeys,
    )
}

fn decay(stream: &Arc<CudaStream>) -> Result<(), String> {
    check_tree(stream, "g alternates 0 and -20", DraftTree::chain(64).map_err(text)?, Hardness::Decay)
}

fn bf16_rows(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = GdnDims::new(16, 32, 128, 128).map_err(text)?;
    let batch = TreeBatch::single(DraftTree::bole(128, 1).map_err(text)?, 0);
    let case = Case::new(dims, batch, 1, Hardness::Random, round_bf16, 11);
    let paths = to_last(&case.batch);
    let got = run::<bf16>(stream, &case, &paths, bf16::from_f32)?;
    against_oracle("9B heads, bf16", &case, &got, &paths)
}

fn ragged(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let trees: Vec<DraftTree> = [7, 21, 1, 64]
        .iter()
        .map(|&n| DraftTree::random(n, n as u64))
        .collect::<Result<_, _>>()
        .map_err(text)?;
    let batch = TreeBatch::new(trees, vec![3, 0, 4, 1]).map_err(text)?;
    let case = Case::new(dims, batch, 5, Hardness::Random, |x| x, 5);
    let paths = to_last(&case.batch);
    let together = run::<f32>(stream, &case, &paths, |x| x)?;
    against_oracle("ragged batch", &case, &together, &paths)?;
    for (b, (first, tree, slot)) in case.batch.iter().enumerate() {
        let slot = slot.ok_or("no padding here")?;
        let rows = first..first + tree.len();
        let cut = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let alone = case.alone(first, tree, slot);
        let got = run::<f32>(stream, &alone, &paths[b..=b], |x| x)?;
        let plane = dims.v_heads * dims.dv;
        let state = &together.state[slot * dims.state_len()..][..dims.state_len()];
        let equal = bits(&got.o) == bits(&cut(&together.o, plane))
            && bits(&got.u) == bits(&cut(&together.u, plane))
            && bits(&got.state) == bits(state);
        if !equal {
            return Err(format!("sequence {b} differs from its run alone"));
        }
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees = vec![DraftTree::chain(5).map_err(text)?, DraftTree::chain(9).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![-1, 1]).map_err(text)?;
    let case = Case::new(small(), batch, 3, Hardness::Random, |x| x, 9);
    let got = run::<f32>(stream, &case, &[vec![0, 1], vec![]], |x| x)?;
    if got.o[..5 * 256].iter().chain(&got.u[..5 * 256]).any(|&x| x != 0.0) {
        return Err("a padding row is not zero".into());
    }
    if bits(&got.state) != bits(&case.state) {
        return Err("the pool changed, though nothing was committed".into());
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let tree = DraftTree::bole(64, 2).map_err(text)?;
    let clean = Case::new(dims, TreeBatch::single(tree.clone(), 0), 1, Hardness::Random, |x| x, 3);
    let before = run::<f32>(stream, &clean, &[vec![]], |x| x)?;
    let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
    let mut dirty = Case {
        qkv: clean.qkv.clone(),
        gates: clean.gates.clone(),
        state: clean.state.clone(),
        batch: clean.batch.clone(),
        dims,
    };
    for (node, channel, value) in planted {
        dirty.qkv[node * dims.qkv_width() + channel] = value;
    }
    let after = run::<f32>(stream, &dirty, &[vec![]], |x| x)?;
    let plane = dims.v_heads * dims.dv;
    for node in 0..tree.len() {
        let path = tree.path(node);
        let below = planted.iter().any(|(bad, _, _)| path.contains(bad));
        let cut = |x: &Output| bits(&x.o[node * plane..(node + 1) * plane]);
        if !below && cut(&before) != cut(&after) {
            return Err(format!("node {node} changed, though no ancestor of it is bad"));
        }
        if planted.iter().any(|&(bad, _, _)| bad == node)
            && after.o[node * plane..(node + 1) * plane].iter().all(|x| x.is_finite())
        {
            return Err(format!("node {node} is finite, though it was planted"));
        }
    }
    Ok(())
}

fn repeat(stream: &Arc<CudaStream>) -> Result<(), String> {
    let batch = TreeBatch::single(DraftTree::bole(128, 8).map_err(text)?, 0);
    let case = Case::new(small(), batch, 1, Hardness::Random, |x| x, 21);
    let paths = to_last(&case.batch);
    let first = run::<f32>(stream, &case, &paths, |x| x)?;
    for _ in 0..4 {
        let again = run::<f32>(stream, &case, &paths, |x| x)?;
        if bits(&first.o) != bits(&again.o)
            || bits(&first.u) != bits(&again.u)
            || bits(&first.state) != bits(&again.state)
        {
            return Err("two runs differ".into());
        }
    }
    Ok(())
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let batch = TreeBatch::single(DraftTree::chain(3).map_err(text)?, 7);
    let case = Case::new(small(), batch, 2, Hardness::Random, |x| x, 1);
    match run::<f32>(stream, &case, &[vec![]], |x| x) {
        Err(message) if message.contains("slots") => Ok(()),
        Err(message) => Err(format!("the message does not name the slots: {message}")),
        Ok(_) => Err("a slot outside the pool was accepted".into()),
    }
}
