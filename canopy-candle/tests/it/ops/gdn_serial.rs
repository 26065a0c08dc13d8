//! tree_gdn_serial: the bits of the walk, the oracle's state in every snapshot.

use candle_core::{DType, Result};
use canopy_candle::{
    GdnDims, Variant, tree_gdn_commit, tree_gdn_serial_commit, tree_gdn_serial_verify, tree_gdn_verify,
};
use canopy_kernels::tree_gdn::oracle::{self, OracleInput};

use super::gdn::{Scene, scene};
use crate::support::{Rng, batch, bits, f32s, f64s, inside_nan, layouts, max_abs, on_cpu, paths};

#[test]
fn outputs_and_committed_states_have_the_bits_of_the_walk() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths) = (on_cpu(batch()), paths(&batch()));
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let qkv = qkv.to_dtype(dtype)?;
        let (walked, kept) = (state.copy()?, state.copy()?);
        let walk = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &walked)?;
        let serial = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &kept)?;
        assert_eq!(bits(&serial.o), bits(&walk.o), "{dtype:?}");
        assert_eq!(bits(&kept), bits(&state), "verify leaves the pool alone");
        tree_gdn_commit(&walked, &paths, dims, Variant::Walk, &walk, &qkv, &gates)?;
        tree_gdn_serial_commit(&kept, &paths, dims, &serial)?;
        assert!(bits(&kept) != bits(&state));
        assert_eq!(bits(&kept), bits(&walked), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn every_snapshot_is_the_oracle_state_of_its_node_and_padding_is_zero() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let tree = on_cpu(batch());
    let out = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &state)?;
    assert_eq!(out.o.dims(), [tree.host().rows(), 4, 6]);
    assert_eq!(out.snapshots.dims(), [tree.host().rows(), 4, 6, 8]);
    for (first, tree, slot) in tree.host().iter() {
        let Some(slot) = slot else {
            for plane in [&out.o, &out.snapshots] {
                assert!(f32s(&plane.narrow(0, first, tree.len())?).iter().all(|&x| x == 0.0));
            }
            continue;
        };
        let (qkv, gates) = (qkv.narrow(0, first, tree.len())?, gates.narrow(0, first, tree.len())?);
        let input = OracleInput { qkv: &f64s(&qkv), gates: &f64s(&gates), state: &f64s(&state.get(slot)?) };
        for node in 0..tree.len() {
            let expected = oracle::commit(dims, tree, node, input);
            assert!(max_abs(&f32s(&out.snapshots.get(first + node)?), &expected) < 2e-6, "node {node}");
        }
    }
    Ok(())
}

#[test]
fn every_layout_gives_the_same_bits() -> Result<()> {
    let Scene { dims, qkv, gates, state } = scene();
    let (tree, paths) = (on_cpu(batch()), paths(&batch()));
    let expected = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &state)?;
    let committed = state.copy()?;
    tree_gdn_serial_commit(&committed, &paths, dims, &expected)?;
    for (how, qkv) in layouts(&qkv)? {
        for (how_gates, gates) in layouts(&gates)? {
            let pool = inside_nan(&state, 0)?;
            let out = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &pool)?;
            assert_eq!(bits(&out.o), bits(&expected.o), "qkv {how}, gates {how_gates}");
            assert_eq!(bits(&out.snapshots), bits(&expected.snapshots), "qkv {how}, gates {how_gates}");
            tree_gdn_serial_commit(&pool, &paths, dims, &out)?;
            assert_eq!(bits(&pool), bits(&committed), "qkv {how}, gates {how_gates}");
        }
    }
    Ok(())
}

#[test]
fn planes_start_at_multiples_of_32() -> Result<()> {
    let mut rng = Rng(40);
    let dims = GdnDims::new(1, 1, 3, 5).expect("dims");
    let tree =
        on_cpu(canopy_candle::TreeBatch::single(canopy_candle::DraftTree::chain(3).expect("a chain"), 0));
    let (qkv, gates) = (rng.tensor(&[3, dims.qkv_width()]), rng.gates(3, 1));
    let out = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &rng.tensor(&[1, 1, 5, 3]))?;
    for plane in [&out.o, &out.snapshots] {
        assert!(plane.is_contiguous());
        assert_eq!(plane.layout().start_offset() % 32, 0);
    }
    Ok(())
}
