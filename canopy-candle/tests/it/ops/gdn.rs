//! tree_gdn.

use candle_core::{DType, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DraftTree, GdnDims, GdnPending, GdnTape, Solve, TreeBatch, TreeGdnOutput,
    Variant, tree_gdn_commit, tree_gdn_commit_layers, tree_gdn_commit_verify, tree_gdn_verify,
    tree_gdn_verify_into, tree_gdn_verify_to,
};
use canopy_kernels::tree_gdn::oracle::{self, OracleInput};

use crate::support::{Rng, batch, bits, f32s, f64s, inside_nan, layouts, max_abs, on_cpu, paths};

const VARIANTS: [Variant; 2] = [Variant::Walk, Variant::Solve(Solve::Forward)];

pub struct Scene {
    pub dims: GdnDims,
    pub qkv: Tensor,
    pub gates: Tensor,
    pub state: Tensor,
}

pub fn scene() -> Scene {
    let dims = GdnDims::new(2, 4, 8, 6).expect("2 divides 4");
    let (mut rng, rows) = (Rng(1), batch().rows());
    let qkv = rng.tensor(&[rows, dims.qkv_width()]);
    Scene { dims, qkv, gates: rng.gates(rows, 4), state: rng.tensor(&[3, 4, 6, 8]) }
}

#[test]
fn verify_equals_the_oracle_and_padding_is_zero() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let tree = on_cpu(batch());
    for variant in VARIANTS {
        let out = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &state)?;
        assert_eq!(out.o.dims(), [tree.host().rows(), 4, 6]);
        assert_eq!(out.g_cum.dims(), [tree.host().rows(), 4]);
        for (first, tree, slot) in tree.host().iter() {
            let rows = |tensor: &Tensor| tensor.narrow(0, first, tree.len());
            let Some(slot) = slot else {
                for plane in [&out.o, &out.u, &out.g_cum] {
                    assert!(f32s(&rows(plane)?).iter().all(|&x| x == 0.0));
                }
                continue;
            };
            let (qkv, gates, state) = (f64s(&rows(&qkv)?), f64s(&rows(&gates)?), f64s(&state.get(slot)?));
            let expected =
                oracle::verify(dims, tree, OracleInput { qkv: &qkv, gates: &gates, state: &state });
            assert!(max_abs(&f32s(&rows(&out.o)?), &expected.o) < 2e-6);
            assert!(max_abs(&f32s(&rows(&out.u)?), &expected.u) < 2e-6);
            assert!(max_abs(&f32s(&rows(&out.g_cum)?), &expected.g_cum) < 2e-6);
        }
    }
    Ok(())
}

#[test]
fn commit_equals_the_oracle_state_of_the_accepted_node() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths) = (on_cpu(batch()), paths(&batch()));
    for variant in VARIANTS {
        let pool = state.copy()?;
        let verified = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &pool)?;
        tree_gdn_commit(&pool, &paths, dims, variant, &verified, &qkv, &gates)?;
        for ((first, tree, slot), last) in tree.host().iter().zip([6, 0, 1]) {
            let Some(slot) = slot else { continue };
            let rows =
                |tensor: &Tensor| Ok::<_, candle_core::Error>(f64s(&tensor.narrow(0, first, tree.len())?));
            let input =
                OracleInput { qkv: &rows(&qkv)?, gates: &rows(&gates)?, state: &f64s(&state.get(slot)?) };
            let expected = oracle::commit(dims, tree, last, input);
            assert!(max_abs(&f32s(&pool.get(slot)?), &expected) < 2e-6, "{variant:?}, slot {slot}");
        }
    }
    Ok(())
}

#[test]
fn layers_together_are_committed_as_each_alone() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths, variant) = (on_cpu(batch()), paths(&batch()), Variant::Walk);
    let inputs = [(qkv.clone(), state.clone()), (qkv.affine(0.5, 0.1)?, state.affine(-1.0, 0.2)?)];
    let states = Tensor::stack(&[&inputs[0].1, &inputs[1].1], 0)?;
    let verify = |(qkv, state): &(Tensor, Tensor)| tree_gdn_verify(&tree, dims, variant, qkv, &gates, state);
    let verified = inputs.iter().map(verify).collect::<Result<Vec<_>>>()?;
    let tapes =
        inputs.iter().zip(&verified).map(|((qkv, _), verified)| GdnTape { verified, qkv, gates: &gates });
    tree_gdn_commit_layers(&states, &paths, dims, variant, &tapes.collect::<Vec<_>>())?;
    for (layer, ((qkv, state), verified)) in inputs.iter().zip(&verified).enumerate() {
        let alone = state.copy()?;
        tree_gdn_commit(&alone, &paths, dims, variant, verified, qkv, &gates)?;
        assert_eq!(bits(&states.get(layer)?), bits(&alone), "layer {layer}");
    }
    Ok(())
}

#[test]
fn every_layout_gives_the_same_bits() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths, variant) = (on_cpu(batch()), paths(&batch()), Variant::Walk);
    let expected = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &state)?;
    let committed = state.copy()?;
    tree_gdn_commit(&committed, &paths, dims, variant, &expected, &qkv, &gates)?;
    for (how, qkv) in layouts(&qkv)? {
        for (how_gates, gates) in layouts(&gates)? {
            let pool = inside_nan(&state, 0)?;
            let out = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &pool)?;
            assert_eq!(bits(&out.o), bits(&expected.o), "qkv {how}, gates {how_gates}");
            assert_eq!(bits(&out.u), bits(&expected.u), "qkv {how}, gates {how_gates}");
            assert_eq!(bits(&out.g_cum), bits(&expected.g_cum), "qkv {how}, gates {how_gates}");
            tree_gdn_commit(&pool, &paths, dims, variant, &out, &qkv, &gates)?;
            assert_eq!(bits(&pool), bits(&committed), "qkv {how}, gates {how_gates}");
        }
    }
    Ok(())
}

#[test]
fn rounded_rows_act_as_their_f32_values() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths) = (on_cpu(batch()), paths(&batch()));
    for dtype in [DType::BF16, DType::F16] {
        let rounded = qkv.to_dtype(dtype)?;
        let wide = rounded.to_dtype(DType::F32)?;
        let run = |qkv: &Tensor| {
            let pool = state.copy()?;
            let out = tree_gdn_verify(&tree, dims, Variant::Walk, qkv, &gates, &pool)?;
            tree_gdn_commit(&pool, &paths, dims, Variant::Walk, &out, qkv, &gates)?;
            Ok::<_, candle_core::Error>((bits(&out.o), bits(&pool)))
        };
        assert_eq!(run(&rounded)?, run(&wide)?);
        let (_, view) = layouts(&rounded)?.swap_remove(3);
        assert_eq!(run(&view)?, run(&wide)?);
    }
    Ok(())
}

#[test]
fn verifying_into_prepared_outputs_gives_the_same_bits() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let tree = on_cpu(batch());
    let expected = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
    let out = TreeGdnOutput::zeros(tree.host().rows(), dims, state.device())?;
    for round in 0..2 {
        tree_gdn_verify_into(&out, &tree, dims, Variant::Walk, &qkv, &gates, &state)?;
        assert_eq!(bits(&out.o), bits(&expected.o), "call {round}");
        assert_eq!(bits(&out.u), bits(&expected.u), "call {round}");
        assert_eq!(bits(&out.g_cum), bits(&expected.g_cum), "call {round}");
    }
    Ok(())
}

#[test]
fn the_planes_are_views_of_one_allocation_at_multiples_of_32() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let out = tree_gdn_verify(&on_cpu(batch()), dims, Variant::Walk, &qkv, &gates, &state)?;
    let packed = f32s(out.packed());
    for plane in [&out.o, &out.u, &out.g_cum] {
        assert!(plane.is_contiguous());
        let start = plane.layout().start_offset();
        assert_eq!(start % 32, 0);
        assert_eq!(packed[start..start + plane.elem_count()], f32s(plane)[..]);
    }
    Ok(())
}

#[test]
fn outputs_in_another_dtype_are_the_f32_ones_rounded_and_leave_the_same_tape() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths) = (on_cpu(batch()), paths(&batch()));
    for (variant, dtype) in
        VARIANTS.into_iter().flat_map(|v| [DType::BF16, DType::F16].map(|dtype| (v, dtype)))
    {
        let wide = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &state)?;
        let out = tree_gdn_verify_to(&tree, dims, variant, &qkv, &gates, &state, dtype)?;
        assert_eq!((out.o.dtype(), out.o.dims()), (dtype, wide.o.dims()));
        assert_eq!(bits(&out.o), bits(&wide.o.to_dtype(dtype)?));
        assert_eq!((bits(&out.u), bits(&out.g_cum)), (bits(&wide.u), bits(&wide.g_cum)));
        let (rounded, expected) = (state.copy()?, state.copy()?);
        tree_gdn_commit(&rounded, &paths, dims, variant, &out, &qkv, &gates)?;
        tree_gdn_commit(&expected, &paths, dims, variant, &wide, &qkv, &gates)?;
        assert_eq!(bits(&rounded), bits(&expected));
    }
    Ok(())
}

/// Both rounds in every layout, with a path that is empty and a slot that is padding.
#[test]
fn commit_and_verify_in_one_have_the_bits_of_both() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (last, mut rng) = (on_cpu(batch()), Rng(7));
    let trees = vec![DraftTree::chain(1), DraftTree::new(vec![-1, 0]), DraftTree::new(vec![-1, 0, 0, 2])];
    let trees = trees.into_iter().collect::<std::result::Result<_, _>>().expect("three trees");
    let tree = on_cpu(TreeBatch::new(trees, batch().slots().to_vec()).expect("three slots"));
    let next = (rng.tensor(&[7, dims.qkv_width()]), rng.gates(7, 4));
    for (variant, accepted) in
        [(VARIANTS[0], vec![0, 1, 4, 6]), (VARIANTS[1], vec![0, 2]), (VARIANTS[1], vec![])]
    {
        let paths = AcceptedPaths::new(&batch(), &[accepted, vec![0], vec![0, 1]]).expect("three paths");
        let paths = DevicePaths::new(paths, state.device())?;
        let verified = tree_gdn_verify(&last, dims, variant, &qkv, &gates, &state)?;
        for dtype in [DType::F32, DType::BF16] {
            let expected = state.copy()?;
            tree_gdn_commit(&expected, &paths, dims, variant, &verified, &qkv, &gates)?;
            let want = tree_gdn_verify_to(&tree, dims, variant, &next.0, &next.1, &expected, dtype)?;
            for ((how, last_qkv), (_, qkv)) in layouts(&qkv)?.into_iter().zip(layouts(&next.0)?) {
                let pool = inside_nan(&state, 0)?;
                let tape = GdnTape { verified: &verified, qkv: &last_qkv, gates: &gates };
                let pending = GdnPending { paths: &paths, tape };
                let got =
                    tree_gdn_commit_verify(&pool, pending, &tree, dims, variant, [&qkv, &next.1], dtype)?;
                assert_eq!(bits(&pool), bits(&expected), "{variant:?}, {how}");
                assert_eq!(got.o.dtype(), dtype);
                for (got, want) in [(&got.o, &want.o), (&got.u, &want.u), (&got.g_cum, &want.g_cum)] {
                    assert_eq!(bits(got), bits(want), "{variant:?}, {how}");
                }
            }
        }
    }
    Ok(())
}
