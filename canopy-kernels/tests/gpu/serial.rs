//! tree_gdn_serial: snapshots and chains against the float64 oracle, and against each other bit for bit.

use std::sync::Arc;

use canopy_kernels::cuda::{PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{self, fused, oracle};
use canopy_kernels::tree_gdn_serial::launch::{self, Element, Pool};
use canopy_kernels::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, round_bf16, small, text, to_last, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn_serial::snapshots_equal_the_oracle_at_every_stage_edge", trees_at_edges),
    ("tree_gdn_serial::chains_equal_the_oracle_at_every_stage_edge", chains_at_edges),
    ("tree_gdn_serial::snapshots_equal_the_oracle_in_every_order", orders),
    ("tree_gdn_serial::nearly_equal_keys_and_decays_keep_the_bound", hard),
    ("tree_gdn_serial::bf16_rows_equal_the_oracle_on_the_same_rounded_inputs", bf16_rows),
    ("tree_gdn_serial::every_node_can_be_committed", every_node),
    ("tree_gdn_serial::rows_do_not_depend_on_form_columns_batch_or_slot", invariant),
    ("tree_gdn_serial::padding_is_zero_and_the_pool_is_untouched", padding),
    ("tree_gdn_serial::a_nan_reaches_descendants_only", nan),
    ("tree_gdn_serial::infinite_log_gates_forget_everything", infinite_gates),
    ("tree_gdn_serial::five_runs_are_byte_identical", repeat),
    ("tree_gdn_serial::chains_and_solved_trees_share_a_batch", shared_batch),
    ("tree_gdn_serial::wrong_arguments_are_refused_by_name", refused),
];

#[derive(PartialEq)]
struct Output {
    o: Vec<u32>,
    state: Vec<u32>,
}

impl Output {
    fn new(o: &[f32], state: &[f32]) -> Self {
        Self { o: bits(o), state: bits(state) }
    }

    fn o(&self) -> Vec<f32> {
        self.o.iter().map(|&x| f32::from_bits(x)).collect()
    }

    fn state(&self) -> Vec<f32> {
        self.state.iter().map(|&x| f32::from_bits(x)).collect()
    }
}

/// The baseline on a case, then a commit of `paths`; every output starts as NaN.
fn snapshots<T: Element>(
    stream: &Arc<CudaStream>,
    case: &Case,
    columns: usize,
    paths: &[Vec<usize>],
    convert: fn(f32) -> T,
) -> Result<Output, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let qkv: Vec<T> = case.qkv.iter().map(|&x| convert(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let mut state = stream.clone_htod(&case.state).map_err(text)?;
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let mut o = poison(batch.rows() * dims.v_heads * dims.dv)?;
    let mut kept = poison(batch.rows() * dims.state_len())?;
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let buffers = launch::SnapshotBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        snapshots: kept.as_view_mut(),
        o: o.as_view_mut(),
    };
    launch::verify(stream, dims, batch, &tree, columns, buffers).map_err(text)?;
    let accepted = AcceptedPaths::new(batch, paths).map_err(text)?;
    let on_device = PathsOnDevice::new(stream, &accepted).map_err(text)?;
    launch::commit(stream, dims, &accepted, &on_device, kept.as_view(), state.as_view_mut()).map_err(text)?;
    let copy = |slice| stream.clone_dtoh(slice).map_err(text);
    Ok(Output::new(&copy(&o)?, &copy(&state)?))
}

/// What a chain call wrote: outputs and pool, then the tape.
struct ChainOutput {
    out: Output,
    u: Vec<f32>,
    g_cum: Vec<f32>,
}

fn chain<T: Element>(
    stream: &Arc<CudaStream>,
    case: &Case,
    columns: usize,
    advance: bool,
    convert: fn(f32) -> T,
) -> Result<ChainOutput, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let qkv: Vec<T> = case.qkv.iter().map(|&x| convert(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let mut state = stream.clone_htod(&case.state).map_err(text)?;
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let planes = batch.rows() * dims.v_heads;
    let (mut o, mut u, mut g_cum) = (poison(planes * dims.dv)?, poison(planes * dims.dv)?, poison(planes)?);
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let buffers = launch::ChainBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: if advance { Pool::Advance(state.as_view_mut()) } else { Pool::Read(state.as_view()) },
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    launch::chain(stream, dims, batch, &tree, columns, buffers).map_err(text)?;
    let copy = |slice| stream.clone_dtoh(slice).map_err(text);
    Ok(ChainOutput { out: Output::new(&copy(&o)?, &copy(&state)?), u: copy(&u)?, g_cum: copy(&g_cum)? })
}

/// Oracle of a case with one tree, and the state after its last node.
fn truth(case: &Case) -> (oracle::OracleOutput, Vec<f64>) {
    let (qkv, gates, state) = (wide(&case.qkv), wide(&case.gates), wide(&case.state));
    let input = oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
    let tree = &case.batch.trees()[0];
    (oracle::verify(case.dims, tree, input), oracle::commit(case.dims, tree, tree.len() - 1, input))
}

fn check_tree(
    stream: &Arc<CudaStream>,
    name: &str,
    tree: DraftTree,
    hardness: Hardness,
) -> Result<(), String> {
    let case = Case::new(small(), TreeBatch::single(tree, 0), 1, hardness, |x| x, 7);
    let (verify, end) = truth(&case);
    for columns in [32, 64] {
        let name = format!("{name}, {columns} columns");
        let got = snapshots::<f32>(stream, &case, columns, &to_last(&case.batch), |x| x)?;
        compare(&format!("{name}: o"), &got.o(), &verify.o)?;
        compare(&format!("{name}: state"), &got.state(), &end)?;
    }
    if !case.batch.trees()[0].is_chain() {
        return Ok(());
    }
    for columns in [32, 64, 128] {
        let name = format!("{name}, {columns} columns in registers");
        let got = chain::<f32>(stream, &case, columns, true, |x| x)?;
        compare(&format!("{name}: o"), &got.out.o(), &verify.o)?;
        compare(&format!("{name}: u"), &got.u, &verify.u)?;
        compare(&format!("{name}: g_cum"), &got.g_cum, &verify.g_cum)?;
        compare(&format!("{name}: state"), &got.out.state(), &end)?;
    }
    Ok(())
}

fn trees_at_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]) {
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        check_tree(stream, &format!("random tree of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn chains_at_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in (1..=33).chain([63, 64, 65, 127, 128, 256]) {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check_tree(stream, &format!("chain of {nodes}"), tree, Hardness::Random)?;
    }
    Ok(())
}

fn orders(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (name, tree) in [
        ("Bole's shape", DraftTree::bole(100, 3).map_err(text)?),
        ("top-2, depth 6", DraftTree::balanced(2, 6).map_err(text)?),
        ("skewed", DraftTree::skewed(3, 20).map_err(text)?),
        ("a star", DraftTree::balanced(40, 1).map_err(text)?),
    ] {
        for (how, order) in [("depth first", tree.dfs_preorder()), ("by level", tree.level_order())] {
            let tree = tree.reorder(&order).map_err(text)?.0;
            check_tree(stream, &format!("{name}, {how}"), tree, Hardness::Random)?;
        }
    }
    Ok(())
}

fn hard(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [16, 32, 64, 128] {
        let tree = DraftTree::chain(nodes).map_err(text)?;
        check_tree(stream, &format!("nearly equal keys, chain of {nodes}"), tree, Hardness::EqualKeys)?;
    }
    let tree = DraftTree::bole(64, 5).map_err(text)?;
    check_tree(stream, "nearly equal keys, Bole's shape", tree, Hardness::EqualKeys)?;
    check_tree(stream, "g alternates 0 and -20", DraftTree::chain(64).map_err(text)?, Hardness::Decay)
}

fn bf16_rows(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = GdnDims::new(16, 32, 128, 128).map_err(text)?;
    for tree in [DraftTree::bole(32, 1).map_err(text)?, DraftTree::chain(24).map_err(text)?] {
        let case = Case::new(dims, TreeBatch::single(tree, 0), 1, Hardness::Random, round_bf16, 11);
        let (verify, end) = truth(&case);
        let got = snapshots::<bf16>(stream, &case, 32, &to_last(&case.batch), bf16::from_f32)?;
        compare("9B heads, bf16: o", &got.o(), &verify.o)?;
        compare("9B heads, bf16: state", &got.state(), &end)?;
        if case.batch.trees()[0].is_chain() {
            let got = chain::<bf16>(stream, &case, 128, true, bf16::from_f32)?;
            compare("9B heads, bf16, in registers: o", &got.out.o(), &verify.o)?;
            compare("9B heads, bf16, in registers: u", &got.u, &verify.u)?;
            compare("9B heads, bf16, in registers: state", &got.out.state(), &end)?;
        }
    }
    Ok(())
}

fn every_node(stream: &Arc<CudaStream>) -> Result<(), String> {
    let tree = DraftTree::random(24, 8).map_err(text)?;
    let case = Case::new(small(), TreeBatch::single(tree.clone(), 1), 2, Hardness::Random, |x| x, 13);
    let len = case.dims.state_len();
    let alone = case.alone(0, &tree, 1);
    let (qkv, gates, state) = (wide(&alone.qkv), wide(&alone.gates), wide(&alone.state));
    let input = oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
    for node in 0..tree.len() {
        let got = snapshots::<f32>(stream, &case, 64, &[tree.path(node)], |x| x)?;
        let end = oracle::commit(case.dims, &tree, node, input);
        compare(&format!("state of node {node}"), &got.state()[len..], &end)?;
        if got.state[..len] != bits(&case.state[..len]) {
            return Err(format!("node {node}: another slot changed"));
        }
    }
    Ok(())
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let same = |what: &str, equal: bool| if equal { Ok(()) } else { Err(format!("{what}: the bits differ")) };
    for chains in [false, true] {
        let tree = |n: usize| if chains { DraftTree::chain(n) } else { DraftTree::random(n, n as u64) };
        let trees: Vec<DraftTree> =
            [7, 21, 1, 64].map(tree).into_iter().collect::<Result<_, _>>().map_err(text)?;
        let batch = TreeBatch::new(trees, vec![3, 0, 4, 1]).map_err(text)?;
        let case = Case::new(small(), batch, 5, Hardness::Random, |x| x, 5);
        let (paths, plane) = (to_last(&case.batch), case.dims.v_heads * case.dims.dv);
        let together = snapshots::<f32>(stream, &case, 32, &paths, |x| x)?;
        same("32 against 64 columns", together == snapshots::<f32>(stream, &case, 64, &paths, |x| x)?)?;
        if chains {
            for columns in [32, 64, 128] {
                let got = chain::<f32>(stream, &case, columns, true, |x| x)?;
                same(&format!("snapshots against registers, {columns} columns"), together == got.out)?;
            }
        }
        for (b, (first, tree, slot)) in case.batch.iter().enumerate() {
            let slot = slot.ok_or("no padding here")?;
            let got = snapshots::<f32>(stream, &case.alone(first, tree, slot), 32, &paths[b..=b], |x| x)?;
            let len = case.dims.state_len();
            let equal = got.o == together.o[first * plane..(first + tree.len()) * plane]
                && got.state == together.state[slot * len..][..len];
            same(&format!("a tree of {} alone", tree.len()), equal)?;
        }
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees = vec![DraftTree::chain(5).map_err(text)?, DraftTree::chain(9).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![-1, 1]).map_err(text)?;
    let case = Case::new(small(), batch, 3, Hardness::Random, |x| x, 9);
    let got = snapshots::<f32>(stream, &case, 32, &[vec![0, 1], vec![]], |x| x)?;
    let in_registers = chain::<f32>(stream, &case, 64, false, |x| x)?;
    let zero = |x: &[f32]| x.iter().all(|x| x.to_bits() == 0);
    if !zero(&got.o()[..5 * 256]) || !zero(&in_registers.out.o()[..5 * 256]) {
        return Err("a padding row of o is not zero".into());
    }
    if !zero(&in_registers.u[..5 * 256]) || !zero(&in_registers.g_cum[..5 * 2]) {
        return Err("a padding row of the tape is not zero".into());
    }
    if got.o[5 * 256..] != in_registers.out.o[5 * 256..] {
        return Err("the row beside the padding differs between the forms".into());
    }
    if got.state != bits(&case.state) || in_registers.out.state != bits(&case.state) {
        return Err("the pool changed, though nothing was committed".into());
    }
    let advanced = chain::<f32>(stream, &case, 64, true, |x| x)?.out.state;
    let len = case.dims.state_len();
    if advanced[..len] != got.state[..len] || advanced[2 * len..] != got.state[2 * len..] {
        return Err("advancing slot 1 changed another slot".into());
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let tree = DraftTree::bole(64, 2).map_err(text)?;
    let mut case = Case::new(dims, TreeBatch::single(tree.clone(), 0), 1, Hardness::Random, |x| x, 3);
    let before = snapshots::<f32>(stream, &case, 32, &[vec![]], |x| x)?;
    let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
    for (node, channel, value) in planted {
        case.qkv[node * dims.qkv_width() + channel] = value;
    }
    let (after, (truth, _)) = (snapshots::<f32>(stream, &case, 32, &[vec![]], |x| x)?, truth(&case));
    let plane = dims.v_heads * dims.dv;
    for node in 0..tree.len() {
        let rows = node * plane..(node + 1) * plane;
        let below = planted.iter().any(|(bad, _, _)| tree.path(node).contains(bad));
        if !below && before.o[rows.clone()] != after.o[rows.clone()] {
            return Err(format!("node {node} changed, though no ancestor of it is bad"));
        }
        for (got, want) in after.o()[rows.clone()].iter().zip(&truth.o[rows]) {
            if got.is_finite() != want.is_finite() {
                return Err(format!("node {node}: got {got}, float64 gives {want}"));
            }
        }
    }
    Ok(())
}

fn infinite_gates(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    for tree in [DraftTree::random(40, 6).map_err(text)?, DraftTree::chain(20).map_err(text)?] {
        let mut case = Case::new(dims, TreeBatch::single(tree, 0), 1, Hardness::Random, |x| x, 4);
        for node in [2, 3, 11] {
            case.gates[node * 2 * dims.v_heads] = f32::NEG_INFINITY;
        }
        let (verify, _) = truth(&case);
        let got = snapshots::<f32>(stream, &case, 32, &[vec![]], |x| x)?;
        compare("o under decays of exactly 0", &got.o(), &verify.o)?;
        if case.batch.trees()[0].is_chain() {
            let got = chain::<f32>(stream, &case, 32, false, |x| x)?;
            compare("u under decays of exactly 0", &got.u, &verify.u)?;
        }
    }
    Ok(())
}

fn repeat(stream: &Arc<CudaStream>) -> Result<(), String> {
    let batch = TreeBatch::single(DraftTree::bole(128, 8).map_err(text)?, 0);
    let case = Case::new(small(), batch, 1, Hardness::Random, |x| x, 21);
    let paths = to_last(&case.batch);
    let first = snapshots::<f32>(stream, &case, 32, &paths, |x| x)?;
    for _ in 0..4 {
        if first != snapshots::<f32>(stream, &case, 32, &paths, |x| x)? {
            return Err("two runs differ".into());
        }
    }
    Ok(())
}

/// Chains walked and trees solved by two launches into the same buffers: each row has the bits of its sequence alone in its own form.
fn shared_batch(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let chain_of = |nodes| DraftTree::chain(nodes).map_err(text);
    let trees = vec![
        chain_of(7)?,
        DraftTree::random(21, 3).map_err(text)?,
        chain_of(1)?,
        DraftTree::bole(64, 2).map_err(text)?,
        chain_of(5)?,
    ];
    let batch = TreeBatch::new(trees, vec![3, 0, 2, 1, -1]).map_err(text)?;
    let walked: Vec<bool> = batch.trees().iter().map(DraftTree::is_chain).collect();
    let solved: Vec<bool> = walked.iter().map(|walked| !walked).collect();
    let case = Case::new(dims, batch, 4, Hardness::Random, round_bf16, 19);
    let qkv: Vec<bf16> = case.qkv.iter().map(|&x| bf16::from_f32(x)).collect();
    let (qkv, gates) =
        (stream.clone_htod(&qkv).map_err(text)?, stream.clone_htod(&case.gates).map_err(text)?);
    let state = stream.clone_htod(&case.state).map_err(text)?;
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let planes = case.batch.rows() * dims.v_heads;
    for split in [false, true] {
        let (mut o, mut u, mut g_cum) =
            (poison(planes * dims.dv)?, poison(planes * dims.dv)?, poison(planes)?);
        let tree = TreeOnDevice::part(stream, &case.batch, &solved).map_err(text)?;
        let (rows, weights, pool) = (qkv.as_view(), gates.as_view(), state.as_view());
        let planes = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
        if split {
            let mut scratch = poison(tree_gdn::launch::scratch_len(dims, &case.batch))?;
            let buffers = tree_gdn::launch::VerifyBuffers {
                qkv: rows,
                gates: weights,
                state: pool,
                scratch: &mut scratch,
                o: planes.0,
                u: planes.1,
                g_cum: planes.2,
            };
            tree_gdn::launch::verify(stream, dims, &case.batch, &tree, buffers).map_err(text)?;
        } else {
            let buffers = fused::FusedBuffers {
                qkv: rows,
                gates: weights,
                state: pool,
                o: planes.0,
                u: planes.1,
                g_cum: planes.2,
            };
            fused::verify::<f32>(stream, dims, &case.batch, &tree, 32, buffers).map_err(text)?;
        }
        let tree = TreeOnDevice::part(stream, &case.batch, &walked).map_err(text)?;
        let buffers = launch::ChainBuffers {
            qkv: qkv.as_view(),
            gates: gates.as_view(),
            state: Pool::Read(state.as_view()),
            o: o.as_view_mut(),
            u: u.as_view_mut(),
            g_cum: g_cum.as_view_mut(),
        };
        launch::chain(stream, dims, &case.batch, &tree, 32, buffers).map_err(text)?;
        let [o, u, g_cum] = [&o, &u, &g_cum].map(|x| stream.clone_dtoh(x).map_err(text));
        let (o, u, g_cum) = (bits(&o?), bits(&u?), bits(&g_cum?));
        for (first, tree, slot) in case.batch.iter() {
            let (rows, plane) = (first..first + tree.len(), dims.v_heads * dims.dv);
            let part = |x: &[u32], width: usize| x[rows.start * width..rows.end * width].to_vec();
            let got = [part(&o, plane), part(&u, plane), part(&g_cum, dims.v_heads)];
            let want = match slot {
                None => got.clone().map(|x| vec![0; x.len()]),
                Some(slot) => alone(stream, &case.alone(first, tree, slot), split)?,
            };
            if got != want {
                return Err(format!(
                    "a tree of {} nodes differs from its run alone (split {split})",
                    tree.len()
                ));
            }
        }
    }
    Ok(())
}

/// `o`, `u` and `g_cum` of a case with one tree: a chain walked, another tree solved.
fn alone(stream: &Arc<CudaStream>, case: &Case, split: bool) -> Result<[Vec<u32>; 3], String> {
    if case.batch.trees()[0].is_chain() {
        let got = chain::<bf16>(stream, case, 32, false, bf16::from_f32)?;
        return Ok([got.out.o, bits(&got.u), bits(&got.g_cum)]);
    }
    if split {
        let got = crate::gdn::run::<bf16>(stream, case, &[vec![]], bf16::from_f32)?;
        return Ok([bits(&got.o), bits(&got.u), bits(&got.g_cum)]);
    }
    let got = crate::fused::run::<f32>(stream, case, None, 32, (f32::NAN, |x| x))?;
    Ok([bits(&got.o), bits(&got.u), bits(&got.g_cum)])
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let expect = |what: &str, result: Result<(), String>| match result {
        Err(message) if message.contains(what) => Ok(()),
        Err(message) => Err(format!("the message does not name {what}: {message}")),
        Ok(()) => Err(format!("accepted, though {what} are wrong")),
    };
    let case = |tree, slot, pool| {
        Case::new(small(), TreeBatch::single(tree, slot), pool, Hardness::Random, |x| x, 1)
    };
    let tree = DraftTree::chain(3).map_err(text)?;
    let far = case(tree.clone(), 7, 2);
    expect("slots", snapshots::<f32>(stream, &far, 32, &[vec![]], |x| x).map(drop))?;
    expect("slots", chain::<f32>(stream, &far, 32, true, |x| x).map(drop))?;
    let good = case(tree, 0, 1);
    expect("128 value columns", snapshots::<f32>(stream, &good, 128, &[vec![]], |x| x).map(drop))?;
    expect("16 value columns", chain::<f32>(stream, &good, 16, true, |x| x).map(drop))?;
    let branching = case(DraftTree::balanced(2, 2).map_err(text)?, 0, 1);
    expect("trees", chain::<f32>(stream, &branching, 32, false, |x| x).map(drop))?;
    let mut short = case(DraftTree::chain(3).map_err(text)?, 0, 1);
    short.gates.pop();
    expect("gates", snapshots::<f32>(stream, &short, 32, &[vec![]], |x| x).map(drop))
}
