//! gdn_prefill: the bits of the walk and its commit, one row after another, and its refusals.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DeviceSequences, DraftTree, GdnDims, Sequences, TreeBatch, Variant,
    gdn_prefill, tree_gdn_commit, tree_gdn_verify,
};
use canopy_kernels::gdn_prefill::oracle::{self, OracleInput};

use crate::support::{Rng, bits, f32s, f64s, inside_nan, layouts, max_abs, on_cpu};

struct Scene {
    dims: GdnDims,
    sequences: DeviceSequences,
    qkv: Tensor,
    gates: Tensor,
    state: Tensor,
}

/// 70 rows on slot 2, a padding sequence of 3 and 9 rows on slot 0.
fn scene() -> Scene {
    let dims = GdnDims::new(2, 4, 8, 6).expect("2 divides 4");
    let mut rng = Rng(50);
    let sequences = Sequences::new(&[70, 3, 9], vec![2, -1, 0]).expect("three slots");
    Scene {
        dims,
        sequences: DeviceSequences::new(sequences, &Device::Cpu).expect("a CPU"),
        qkv: rng.tensor(&[82, dims.qkv_width()]),
        gates: rng.gates(82, 4),
        state: rng.tensor(&[3, 4, 6, 8]),
    }
}

#[test]
fn outputs_and_states_equal_the_oracle_and_padding_is_zero() -> Result<()> {
    let Scene { dims, sequences, qkv, gates, state } = scene();
    let pool = state.copy()?;
    let o = gdn_prefill(&sequences, dims, &qkv, &gates, &pool)?;
    assert_eq!(o.dims(), [82, 4, 6]);
    assert_eq!(bits(&pool.get(1)?), bits(&state.get(1)?), "a slot that no sequence names");
    for (first, rows, slot) in sequences.host().iter() {
        let own = |tensor: &Tensor| tensor.narrow(0, first, rows);
        let Some(slot) = slot else {
            assert!(f32s(&own(&o)?).iter().all(|&x| x == 0.0));
            continue;
        };
        let (qkv, gates, before) = (f64s(&own(&qkv)?), f64s(&own(&gates)?), f64s(&state.get(slot)?));
        let input = OracleInput { qkv: &qkv, gates: &gates, state: &before };
        let (true_o, true_state) = oracle::forward(dims, rows, input);
        assert!(max_abs(&f32s(&own(&o)?), &true_o) < 2e-6);
        assert!(max_abs(&f32s(&pool.get(slot)?), &true_state) < 2e-6);
    }
    Ok(())
}

#[test]
fn a_prompt_has_the_bits_of_verify_and_commit() -> Result<()> {
    let Scene { dims, sequences, qkv, gates, state } = scene();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let qkv = qkv.to_dtype(dtype)?;
        let (pool, walked) = (state.copy()?, state.copy()?);
        let o = gdn_prefill(&sequences, dims, &qkv, &gates, &pool)?;
        let chain = |rows| DraftTree::chain(rows).expect("a chain");
        let batch = TreeBatch::new(vec![chain(70), chain(3), chain(9)], vec![2, -1, 0]).expect("three slots");
        let paths =
            AcceptedPaths::new(&batch, &[(0..70).collect(), vec![], (0..9).collect()]).expect("paths");
        let paths = DevicePaths::new(paths, &Device::Cpu)?;
        let walk = tree_gdn_verify(&on_cpu(batch), dims, Variant::Walk, &qkv, &gates, &walked)?;
        tree_gdn_commit(&walked, &paths, dims, Variant::Walk, &walk, &qkv, &gates)?;
        assert_eq!(bits(&o), bits(&walk.o), "{dtype:?}");
        assert_eq!(bits(&pool), bits(&walked), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn every_layout_gives_the_same_bits() -> Result<()> {
    let Scene { dims, sequences, qkv, gates, state } = scene();
    let advanced = state.copy()?;
    let expected = gdn_prefill(&sequences, dims, &qkv, &gates, &advanced)?;
    for (how, qkv) in layouts(&qkv)? {
        for (how_gates, gates) in layouts(&gates)? {
            let pool = inside_nan(&state, 0)?;
            let o = gdn_prefill(&sequences, dims, &qkv, &gates, &pool)?;
            assert_eq!(bits(&o), bits(&expected), "qkv {how}, gates {how_gates}");
            assert_eq!(bits(&pool), bits(&advanced), "qkv {how}, gates {how_gates}");
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() -> Result<()> {
    let Scene { dims, sequences, qkv, gates, state } = scene();
    let before = bits(&state);
    let refusal = |qkv: &Tensor, gates: &Tensor, state: &Tensor| {
        gdn_prefill(&sequences, dims, qkv, gates, state).unwrap_err().to_string()
    };
    assert!(refusal(&qkv.narrow(0, 0, 80)?, &gates, &state).contains("gdn-prefill: qkv"));
    assert!(refusal(&qkv, &gates.to_dtype(DType::BF16)?, &state).contains("gdn-prefill: gates"));
    assert!(refusal(&qkv, &gates, &state.narrow(0, 0, 2)?).contains("slots"));
    assert!(refusal(&qkv, &gates, &state.narrow(1, 0, 2)?).contains("state"));
    let shared = Tensor::zeros((3, 4, 6, 8), DType::F32, &Device::Cpu)?;
    let rows = shared.flatten_all()?.narrow(0, 0, 82 * 6)?.reshape((82, 6))?;
    assert!(refusal(&rows, &gates, &shared).contains("storage of its own"));
    assert_eq!(bits(&state), before);
    Ok(())
}
