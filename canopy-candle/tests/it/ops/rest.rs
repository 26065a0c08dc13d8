//! tree_conv, gates, kv_append and kv_compact.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DeviceSequences, DraftTree, GateInputs, Sequences, TreeBatch, chain_conv,
    chain_conv_advance, chain_conv_gates, gates, kv_append, kv_append_pair, kv_compact, kv_compact_layers,
    tree_conv, tree_conv_commit, tree_conv_commit_layers, tree_conv_gates, tree_conv_to,
};
use canopy_kernels::{ConvDims, gates as gates_room, kv_compact as compact_room, tree_conv as conv_room};

use crate::support::{Rng, batch, bits, f32s, inside_nan, layouts, max_abs, on_cpu, paths};

const CHANNELS: usize = 10;

fn conv_scene() -> (Tensor, Tensor, Tensor) {
    let mut rng = Rng(2);
    let rows = batch().rows();
    (rng.tensor(&[rows, CHANNELS]), rng.tensor(&[CHANNELS, 4]), rng.tensor(&[3, 3, CHANNELS]))
}

#[test]
fn conv_equals_the_oracle_in_every_layout() -> Result<()> {
    let ((x, weight, state), tree) = (conv_scene(), on_cpu(batch()));
    let dims = ConvDims::new(CHANNELS).expect("channels");
    let expected = conv_room::oracle::verify(dims, tree.host(), &f32s(&x), &f32s(&weight), &f32s(&state));
    let plain = tree_conv(&tree, &x, &weight, &state)?;
    assert_eq!(plain.dims(), x.dims());
    assert!(max_abs(&f32s(&plain), &expected) < 2e-6);
    for (how, x) in layouts(&x)? {
        for (how_weight, weight) in layouts(&weight)? {
            let out = tree_conv(&tree, &x, &weight, &inside_nan(&state, 0)?)?;
            assert_eq!(bits(&out), bits(&plain), "x {how}, weight {how_weight}");
        }
    }
    Ok(())
}

#[test]
fn conv_to_another_dtype_is_the_conv_rounded() -> Result<()> {
    let ((x, weight, state), tree) = (conv_scene(), on_cpu(batch()));
    let expected = tree_conv(&tree, &x, &weight, &state)?.to_dtype(DType::BF16)?;
    let out = tree_conv_to(&tree, &x, &weight, &state, DType::BF16)?;
    assert_eq!(out.dtype(), DType::BF16);
    assert_eq!(bits(&out), bits(&expected));
    let refused = tree_conv_to(&tree, &x, &weight, &state, DType::U32).unwrap_err().to_string();
    assert!(refused.contains("out"), "{refused}");
    Ok(())
}

#[test]
fn conv_commit_equals_the_oracle_in_every_layout_and_dtype() -> Result<()> {
    let ((x, _, state), paths) = (conv_scene(), paths(&batch()));
    let dims = ConvDims::new(CHANNELS).expect("channels");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (x, state) = (x.to_dtype(dtype)?, state.to_dtype(dtype)?);
        let expected = conv_room::oracle::commit(dims, paths.host(), &f32s(&x), &f32s(&state));
        for (how, x) in layouts(&x)? {
            let pool = inside_nan(&state, 0)?;
            tree_conv_commit(&pool, &paths, &x)?;
            assert_eq!(f32s(&pool), expected, "{dtype:?}, x {how}");
        }
    }
    Ok(())
}

#[test]
fn chains_leave_the_conv_state_of_trees_in_every_layout_and_dtype() -> Result<()> {
    let (x, _, state) = conv_scene();
    let rows = x.dim(0)?;
    let (lens, slots) = ([rows - 3, 1, 2], vec![2, -1, 0]);
    let chains = DeviceSequences::new(Sequences::new(&lens, slots.clone()).expect("chains"), &Device::Cpu)?;
    let trees = lens.map(|len| DraftTree::chain(len).expect("a chain")).to_vec();
    let batch = TreeBatch::new(trees, slots).expect("three slots");
    let whole =
        AcceptedPaths::new(&batch, &lens.map(|len| (0..len).collect::<Vec<_>>())).expect("whole chains");
    let paths = DevicePaths::new(whole, &Device::Cpu)?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (x, state) = (x.to_dtype(dtype)?, state.to_dtype(dtype)?);
        let expected = state.copy()?;
        tree_conv_commit(&expected, &paths, &x)?;
        for (how, x) in layouts(&x)? {
            let pool = inside_nan(&state, 0)?;
            chain_conv_advance(&pool, &chains, &x)?;
            assert_eq!(bits(&pool), bits(&expected), "{dtype:?}, x {how}");
        }
    }
    Ok(())
}

#[test]
fn conv_layers_together_are_committed_as_each_alone() -> Result<()> {
    let ((x, _, state), paths) = (conv_scene(), paths(&batch()));
    for dtype in [DType::F32, DType::BF16] {
        let xs = [x.to_dtype(dtype)?, x.affine(2.0, 0.5)?.to_dtype(dtype)?];
        let alone = [state.to_dtype(dtype)?, state.affine(-1.0, 0.0)?.to_dtype(dtype)?];
        let states = Tensor::stack(&alone, 0)?;
        tree_conv_commit_layers(&states, &paths, &[&xs[0], &xs[1]])?;
        for (layer, (x, state)) in xs.iter().zip(&alone).enumerate() {
            tree_conv_commit(state, &paths, x)?;
            assert_eq!(bits(&states.get(layer)?), bits(state), "{dtype:?}, layer {layer}");
        }
    }
    Ok(())
}

#[test]
fn conv_of_rounded_rows_is_the_rounded_conv_of_their_f32_values() -> Result<()> {
    let ((x, weight, state), tree) = (conv_scene(), on_cpu(batch()));
    for dtype in [DType::BF16, DType::F16] {
        let [x, weight, state] = [x.to_dtype(dtype)?, weight.to_dtype(dtype)?, state.to_dtype(dtype)?];
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32);
        let expected = tree_conv(&tree, &wide(&x)?, &wide(&weight)?, &wide(&state)?)?.to_dtype(dtype)?;
        let out = tree_conv(&tree, &x, &weight, &state)?;
        assert_eq!(out.dtype(), dtype);
        assert_eq!(bits(&out), bits(&expected));
    }
    Ok(())
}

#[test]
fn gates_equal_the_oracle_in_every_layout_and_dtype() -> Result<()> {
    let (mut rng, heads) = (Rng(3), 3);
    let (ab, a_log, dt_bias) = (rng.tensor(&[7, 6]), rng.tensor(&[heads]), rng.tensor(&[heads]));
    let expected = gates_room::oracle::forward(heads, &f32s(&ab), &f32s(&a_log), &f32s(&dt_bias));
    let plain = gates(&ab, &a_log, &dt_bias)?;
    assert_eq!(plain.dims(), [7, 2, heads]);
    assert!(max_abs(&f32s(&plain), &expected) < 1e-6);
    for (how, ab) in layouts(&ab)? {
        for (how_head, a_log) in layouts(&a_log)? {
            let out = gates(&ab, &a_log, &inside_nan(&dt_bias, 0)?)?;
            assert_eq!(bits(&out), bits(&plain), "ab {how}, a_log {how_head}");
        }
    }
    assert_eq!(bits(&gates(&ab.reshape((7, 2, heads))?, &a_log, &dt_bias)?), bits(&plain));
    let rounded = ab.to_dtype(DType::BF16)?;
    let expected = gates(&rounded.to_dtype(DType::F32)?, &a_log, &dt_bias)?;
    let out = gates(&rounded, &a_log, &dt_bias)?;
    assert_eq!(out.dtype(), DType::F32);
    assert_eq!(bits(&out), bits(&expected));
    Ok(())
}

/// Both convolutions, in every layout and dtype of what the gates read.
#[test]
fn conv_with_gates_has_the_bits_of_both() -> Result<()> {
    let ((x, weight, state), tree, mut rng) = (conv_scene(), on_cpu(batch()), Rng(5));
    let rows = tree.host().rows();
    let chains = Sequences::new(&[rows - 3, 3], vec![2, 1]).expect("two chains");
    let chains = DeviceSequences::new(chains, &Device::Cpu)?;
    let (ab, head) = (rng.tensor(&[rows, 6]), [rng.tensor(&[3]), rng.tensor(&[3])]);
    for dtype in [DType::F32, DType::BF16] {
        let want = [
            tree_conv_to(&tree, &x, &weight, &state, dtype)?,
            chain_conv(&chains, &x, &weight, &state, dtype)?,
        ];
        let ab = ab.to_dtype(dtype)?;
        for (how, ab) in layouts(&ab)?.into_iter().chain(layouts(&ab.reshape((rows, 2, 3))?)?) {
            let want_gates = gates(&ab, &head[0], &head[1])?;
            let inputs = GateInputs { ab: &ab, a_log: &inside_nan(&head[0], 0)?, dt_bias: &head[1] };
            let over_tree = tree_conv_gates(&tree, &x, &weight, &state, inputs, dtype)?;
            let over_chains = chain_conv_gates(&chains, &x, &weight, &state, inputs, dtype)?;
            for ((out, got), want) in [over_tree, over_chains].iter().zip(&want) {
                assert_eq!(out.dtype(), dtype);
                assert_eq!(bits(out), bits(want), "ab {how}");
                assert_eq!(got.dims(), [rows, 2, 3]);
                assert_eq!(bits(got), bits(&want_gates), "ab {how}");
            }
        }
    }
    Ok(())
}

#[test]
fn append_puts_every_row_where_its_sequence_continues() -> Result<()> {
    let (mut rng, dev) = (Rng(4), &Device::Cpu);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let rows = rng.tensor(&[5, 2, 3]).to_dtype(dtype)?;
        for (how, rows) in layouts(&rows)? {
            let cache = inside_nan(&Tensor::zeros((3, 6, 2, 3), dtype, dev)?, 0)?;
            kv_append(&cache, &rows, &[0, 2, 3, 3, 5], &[2, -1, 1, 0], &[4, 99, 0, 1])?;
            let mut expected = vec![0f32; 3 * 6 * 6];
            let values = f32s(&rows);
            for (row, (slot, at)) in [(0, (2, 4)), (1, (2, 5)), (3, (0, 1)), (4, (0, 2))] {
                expected[(slot * 6 + at) * 6..][..6].copy_from_slice(&values[row * 6..row * 6 + 6]);
            }
            assert_eq!(f32s(&cache), expected, "{dtype:?}, {how}");
            // A pair of other rows in f32, rounded to the pools' dtype.
            let pools = [Tensor::zeros((3, 6, 2, 3), dtype, dev)?, Tensor::zeros((3, 6, 2, 3), dtype, dev)?];
            let (wide, others) = (rows.to_dtype(DType::F32)?, rng.tensor(&[5, 2, 3]));
            let (cu_rows, slots, starts) = ([0, 2, 3, 3, 5], [2, -1, 1, 0], [4, 99, 0, 1]);
            kv_append_pair((&pools[0], &pools[1]), (&wide, &others), &cu_rows, &slots, &starts)?;
            assert_eq!(f32s(&pools[0]), expected, "{dtype:?}, {how}");
            let alone = Tensor::zeros((3, 6, 2, 3), dtype, dev)?;
            kv_append(&alone, &others.to_dtype(dtype)?, &cu_rows, &slots, &starts)?;
            assert_eq!(f32s(&pools[1]), f32s(&alone), "{dtype:?}, {how}");
        }
    }
    Ok(())
}

#[test]
fn compact_equals_the_oracle_in_every_dtype() -> Result<()> {
    let (mut rng, paths) = (Rng(5), paths(&batch()));
    let (prefix_lens, width, capacity) = ([2, 0, 3], 6, 9);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let before = rng.tensor(&[3, capacity, 2, 3]).to_dtype(dtype)?;
        let cache = inside_nan(&before, 0)?;
        kv_compact(&cache, &paths, &prefix_lens)?;
        let expected =
            compact_room::oracle::compact(paths.host(), &prefix_lens, width, capacity, &f32s(&before));
        assert_eq!(f32s(&cache), expected, "{dtype:?}");
        let layers = Tensor::stack(&[&before, &before.affine(-1.0, 0.0)?], 0)?;
        kv_compact_layers(&layers, &paths, &prefix_lens)?;
        assert_eq!(f32s(&layers.get(0)?), expected, "{dtype:?}");
        assert_eq!(f32s(&layers.get(1)?.affine(-1.0, 0.0)?), expected, "{dtype:?}");
    }
    Ok(())
}
