//! tree_gdn, split design under every solve: against the float64 oracle, and what nearly equal keys do to the series.

use std::sync::Arc;

use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_gdn::launch::VerifyBuffers;
use canopy_kernels::tree_gdn::{Solve, series};
use canopy_kernels::{DraftTree, TreeBatch};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, compare_within, small, text};
use crate::fused::{Output, truth};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::every_solve_equals_the_oracle_at_every_tile_edge", tile_edges),
    ("tree_gdn::the_inverse_keeps_nearly_equal_keys_and_the_series_lose_them", equal_keys),
    ("tree_gdn::every_solves_rows_do_not_depend_on_batch_or_slot_and_padding_is_zero", invariant),
    ("tree_gdn::a_nan_reaches_descendants_only_under_every_solve", nan),
    ("tree_gdn::a_solve_that_is_not_built_and_short_scratch_are_refused_by_name", refused),
];

fn run(stream: &Arc<CudaStream>, case: &Case, solve: Solve, missing: usize) -> Result<Output, String> {
    let (dims, batch) = (case.dims, &case.batch);
    let up = |x: &[f32]| stream.clone_htod(x).map_err(text);
    let (qkv, gates, state) = (up(&case.qkv)?, up(&case.gates)?, up(&case.state)?);
    let poison = |n: usize| stream.clone_htod(&vec![f32::NAN; n]).map_err(text);
    let mut scratch = poison(series::scratch_len(dims, batch, solve).map_err(text)? - missing)?;
    let planes = batch.rows() * dims.v_heads;
    let (mut o, mut u, mut g_cum) = (poison(planes * dims.dv)?, poison(planes * dims.dv)?, poison(planes)?);
    let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
    let buffers = VerifyBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view(),
        scratch: &mut scratch,
        o: o.as_view_mut(),
        u: u.as_view_mut(),
        g_cum: g_cum.as_view_mut(),
    };
    series::verify(stream, dims, batch, &tree, solve, buffers).map_err(text)?;
    let down = |x| stream.clone_dtoh(x).map_err(text);
    Ok(Output { o: down(&o)?, u: down(&u)?, g_cum: down(&g_cum)? })
}

fn case(tree: DraftTree, hardness: Hardness) -> Case {
    Case::new(small(), TreeBatch::single(tree, 0), 1, hardness, |x| x, 7)
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 128, 129, 256] {
        let chain = DraftTree::chain(nodes).map_err(text)?;
        let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
        for (name, tree) in [("chain", chain), ("random tree", tree)] {
            let case = case(tree, Hardness::Random);
            let truth = truth(&case);
            for solve in series::SOLVES {
                let got = run(stream, &case, solve, 0)?;
                let name = format!("{solve}, {name} of {nodes}");
                compare(&format!("{name}: o"), &got.o, &truth.o)?;
                compare(&format!("{name}: u"), &got.u, &truth.u)?;
                compare(&format!("{name}: g_cum"), &got.g_cum, &truth.g_cum)?;
            }
        }
    }
    Ok(())
}

fn equal_keys(stream: &Arc<CudaStream>) -> Result<(), String> {
    for nodes in [16, 32, 64, 128, 256] {
        let case = case(DraftTree::chain(nodes).map_err(text)?, Hardness::EqualKeys);
        let truth = truth(&case);
        for solve in [Solve::Forward, Solve::Dense] {
            let got = run(stream, &case, solve, 0)?;
            compare(&format!("{solve}, nearly equal keys, chain of {nodes}: u"), &got.u, &truth.u)?;
            compare(&format!("{solve}, nearly equal keys, chain of {nodes}: o"), &got.o, &truth.o)?;
        }
        for solve in [Solve::Neumann, Solve::Squaring] {
            let got = run(stream, &case, solve, 0)?;
            if nodes >= 64 && compare_within("u", &got.u, &truth.u, 1.0).is_ok() {
                return Err(format!(
                    "{solve} keeps nearly equal keys on a chain of {nodes}: the keys are not hard"
                ));
            }
        }
    }
    Ok(())
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let sizes = [7, 21, 1, 64, 100];
    let trees: Vec<DraftTree> =
        sizes.iter().map(|&n| DraftTree::random(n, n as u64)).collect::<Result<_, _>>().map_err(text)?;
    let batch = TreeBatch::new(trees, vec![3, 0, -1, 1, 2]).map_err(text)?;
    let case = Case::new(small(), batch, 5, Hardness::Random, |x| x, 5);
    let plane = small().v_heads * small().dv;
    for solve in series::SOLVES {
        let together = run(stream, &case, solve, 0)?;
        for (first, tree, slot) in case.batch.iter() {
            let rows = first * plane..(first + tree.len()) * plane;
            let Some(slot) = slot else {
                if together.o[rows.clone()].iter().chain(&together.u[rows]).any(|&x| x != 0.0) {
                    return Err(format!("{solve}: a padding row is not zero"));
                }
                continue;
            };
            let alone = run(stream, &case.alone(first, tree, slot), solve, 0)?;
            if bits(&alone.o) != bits(&together.o[rows.clone()]) || bits(&alone.u) != bits(&together.u[rows])
            {
                return Err(format!("{solve}: a tree of {} differs from its run alone", tree.len()));
            }
        }
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (dims, tree) = (small(), DraftTree::bole(100, 2).map_err(text)?);
    let plane = dims.v_heads * dims.dv;
    for solve in series::SOLVES {
        let mut case = case(tree.clone(), Hardness::Random);
        let before = run(stream, &case, solve, 0)?;
        let planted = [(5usize, 300usize, f32::NAN), (9, 260, f32::INFINITY), (12, 130, f32::NAN)];
        for (node, channel, value) in planted {
            case.qkv[node * dims.qkv_width() + channel] = value;
        }
        let (after, truth) = (run(stream, &case, solve, 0)?, truth(&case));
        for node in 0..tree.len() {
            let (path, rows) = (tree.path(node), node * plane..(node + 1) * plane);
            let reached = planted.iter().any(|(bad, _, _)| path.contains(bad));
            if !reached && bits(&before.o[rows.clone()]) != bits(&after.o[rows]) {
                return Err(format!("{solve}: node {node} changed, though no ancestor of it is bad"));
            }
        }
        if let Some((got, want)) =
            after.o.iter().zip(&truth.o).find(|(got, want)| got.is_finite() != want.is_finite())
        {
            return Err(format!("{solve}: got {got}, float64 gives {want}"));
        }
    }
    Ok(())
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let case = case(DraftTree::chain(40).map_err(text)?, Hardness::Random);
    for (solve, missing, part) in [(Solve::Level, 0, "level"), (Solve::Squaring, 1, "scratch")] {
        match run(stream, &case, solve, missing) {
            Err(message) if message.contains(part) => {}
            Err(message) => return Err(format!("the message does not name {part}: {message}")),
            Ok(_) => return Err(format!("{solve}, {missing} elements of scratch missing, was accepted")),
        }
    }
    Ok(())
}
