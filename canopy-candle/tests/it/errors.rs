//! The text of every refusal: op, argument, what was expected, what came.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::{
    AttnDims, BlockMask, DevicePaths, DeviceSequences, DeviceTree, DraftBlocks, DraftTree, GateInputs,
    GdnDims, GdnPending, GdnTape, NormKind, PackedLinear, QkNormRope, Sequences, TreeBatch, TreeGdnOutput,
    TreeGdnSerialOutput, Variant, add_rms_norm, attn_gate, block_attention, chain_conv_advance,
    chain_conv_gates, gated_rms_norm, gates, kv_append, kv_append_pair, kv_compact, qk_norm_rope, rms_norm,
    swiglu, tree_attention, tree_conv, tree_conv_commit, tree_conv_commit_layers, tree_conv_gates,
    tree_gdn_commit, tree_gdn_commit_layers, tree_gdn_commit_verify, tree_gdn_serial_commit,
    tree_gdn_serial_verify, tree_gdn_verify, tree_gdn_verify_into,
};

use crate::support::on_cpu;

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros")
}

fn of(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).expect("zeros")
}

/// A pool that lies transposed.
fn transposed(shape: [usize; 4]) -> Tensor {
    zeros(&[shape[0], shape[1], shape[3], shape[2]]).transpose(2, 3).expect("four dimensions")
}

fn refused<T>(result: Result<T>, text: &str) {
    match result {
        Ok(_) => panic!("accepted; expected the refusal {text}"),
        Err(error) => assert_eq!(error.to_string().lines().next().unwrap_or_default(), text),
    }
}

/// Three nodes on slot 1, and their accepted path.
fn tree() -> (DeviceTree, DevicePaths) {
    let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).expect("a tree"), 1);
    let paths = canopy_candle::AcceptedPaths::new(&batch, &[vec![0, 2]]).expect("a path");
    (on_cpu(batch), DevicePaths::new(paths, &Device::Cpu).expect("a CPU"))
}

const WALK: Variant = Variant::Walk;

fn dims() -> GdnDims {
    GdnDims::new(1, 2, 4, 4).expect("1 divides 2")
}

#[test]
fn gdn_verify() {
    let (tree, _) = tree();
    let (qkv, g, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let run = |qkv: &Tensor, g: &Tensor, s: &Tensor| tree_gdn_verify(&tree, dims(), WALK, qkv, g, s);
    refused(run(&zeros(&[2, 16]), &g, &s), "tree-gdn-verify: qkv, expected: [3, 16], got: [2, 16]");
    refused(
        run(&of(DType::I64, &[3, 16]), &g, &s),
        "tree-gdn-verify: qkv, expected: F32, BF16 or F16, got: I64",
    );
    refused(run(&qkv, &zeros(&[3, 2, 4]), &s), "tree-gdn-verify: gates, expected: [3, 2, 2], got: [3, 2, 4]");
    refused(run(&qkv, &of(DType::BF16, &[3, 2, 2]), &s), "tree-gdn-verify: gates, expected: F32, got: BF16");
    refused(
        run(&qkv, &g, &zeros(&[2, 2, 4, 5])),
        "tree-gdn-verify: state, expected: [_, 2, 4, 4], got: [2, 2, 4, 5]",
    );
    refused(
        run(&qkv, &g, &of(DType::BF16, &[2, 2, 4, 4])),
        "tree-gdn-verify: state, expected: F32, got: BF16",
    );
    refused(
        run(&qkv, &g, &transposed([2, 2, 4, 4])),
        "tree-gdn-verify: state, expected: a contiguous tensor, got: strides [32, 16, 1, 4] for [2, 2, 4, 4]",
    );
    refused(
        run(&qkv, &g, &zeros(&[1, 2, 4, 4])),
        "tree-gdn-verify: slots, expected: below the pool's 1 slots, got: 1",
    );
}

#[test]
fn gdn_verify_into() {
    let (tree, _) = tree();
    let (qkv, g, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let out = TreeGdnOutput::zeros(4, dims(), &Device::Cpu).expect("outputs");
    let run = |qkv: &Tensor| tree_gdn_verify_into(&out, &tree, dims(), WALK, qkv, &g, &s);
    refused(run(&qkv), "tree-gdn-verify: out, expected: [70], got: [72]");
    let shared = out.packed().narrow(0, 0, 48).and_then(|t| t.reshape((3, 16))).expect("48 elements");
    refused(
        run(&shared),
        "tree-gdn-verify: qkv, expected: storage of its own, got: the destination's storage",
    );
}

#[test]
fn gdn_serial() {
    let (tree, paths) = tree();
    let (qkv, g, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let run = |qkv: &Tensor, g: &Tensor, s: &Tensor| tree_gdn_serial_verify(&tree, dims(), qkv, g, s);
    refused(run(&zeros(&[2, 16]), &g, &s), "tree-gdn-serial-verify: qkv, expected: [3, 16], got: [2, 16]");
    refused(
        run(&qkv, &of(DType::BF16, &[3, 2, 2]), &s),
        "tree-gdn-serial-verify: gates, expected: F32, got: BF16",
    );
    refused(
        run(&qkv, &g, &zeros(&[1, 2, 4, 4])),
        "tree-gdn-serial-verify: slots, expected: below the pool's 1 slots, got: 1",
    );
    let out = run(&qkv, &g, &s).expect("fitting arguments");
    let commit = |s: &Tensor, out: &TreeGdnSerialOutput| tree_gdn_serial_commit(s, &paths, dims(), out);
    refused(
        commit(&zeros(&[1, 2, 4, 4]), &out),
        "tree-gdn-serial-commit: slots, expected: below the pool's 1 slots, got: 1",
    );
    refused(
        commit(&transposed([2, 2, 4, 4]), &out),
        "tree-gdn-serial-commit: state, expected: a contiguous tensor, got: strides [32, 16, 1, 4] for [2, 2, 4, 4]",
    );
    let with = |snapshots: Tensor| TreeGdnSerialOutput { o: out.o.clone(), snapshots };
    refused(
        commit(&s, &with(zeros(&[4, 2, 4, 4]))),
        "tree-gdn-serial-commit: snapshots, expected: [3, 2, 4, 4], got: [4, 2, 4, 4]",
    );
    refused(
        commit(&s, &with(of(DType::BF16, &[3, 2, 4, 4]))),
        "tree-gdn-serial-commit: snapshots, expected: F32, got: BF16",
    );
    refused(
        commit(&s, &with(s.clone())),
        "tree-gdn-serial-commit: snapshots, expected: storage of its own, got: the destination's storage",
    );
    commit(&s, &out).expect("fitting arguments");
}

#[test]
fn gdn_commit() {
    let (tree, paths) = tree();
    let (qkv, g, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let out = tree_gdn_verify(&tree, dims(), WALK, &qkv, &g, &s).expect("fitting arguments");
    let run = |s: &Tensor, out: &TreeGdnOutput, qkv: &Tensor, g: &Tensor| {
        tree_gdn_commit(s, &paths, dims(), WALK, out, qkv, g)
    };
    refused(
        run(&zeros(&[2, 4, 4]), &out, &qkv, &g),
        "tree-gdn-commit: state, expected: [_, 2, 4, 4], got: [2, 4, 4]",
    );
    refused(
        run(&zeros(&[1, 2, 4, 4]), &out, &qkv, &g),
        "tree-gdn-commit: slots, expected: below the pool's 1 slots, got: 1",
    );
    refused(
        run(&transposed([2, 2, 4, 4]), &out, &qkv, &g),
        "tree-gdn-commit: state, expected: a contiguous tensor, got: strides [32, 16, 1, 4] for [2, 2, 4, 4]",
    );
    let other = TreeGdnOutput::zeros(4, dims(), &Device::Cpu).expect("outputs");
    refused(run(&s, &other, &qkv, &g), "tree-gdn-commit: verified.u, expected: [3, 2, 4], got: [4, 2, 4]");
    refused(run(&s, &out, &zeros(&[3, 15]), &g), "tree-gdn-commit: qkv, expected: [3, 16], got: [3, 15]");
    refused(
        run(&s, &out, &qkv, &zeros(&[2, 2, 2])),
        "tree-gdn-commit: gates, expected: [3, 2, 2], got: [2, 2, 2]",
    );
    let shared =
        s.flatten_all().and_then(|t| t.narrow(0, 0, 12)).and_then(|t| t.reshape((3, 2, 2))).expect("12");
    refused(
        run(&s, &out, &qkv, &shared),
        "tree-gdn-commit: gates, expected: storage of its own, got: the destination's storage",
    );
}

#[test]
fn gdn_commit_and_verify() {
    let (tree, paths) = tree();
    let (qkv, g, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let verified = &tree_gdn_verify(&tree, dims(), WALK, &qkv, &g, &s).expect("fitting arguments");
    let tape = GdnTape { verified, qkv: &qkv, gates: &g };
    let run = |state: &Tensor, tape: GdnTape<'_>, [qkv, gates]: [&Tensor; 2], dtype: DType| {
        let pending = GdnPending { paths: &paths, tape };
        tree_gdn_commit_verify(state, pending, &tree, dims(), WALK, [qkv, gates], dtype)
    };
    let op = "tree-gdn-commit-verify: ";
    let both = [&qkv, &g];
    refused(
        run(&zeros(&[1, 2, 4, 4]), tape, both, DType::F32),
        &format!("{op}slots, expected: below the pool's 1 slots, got: 1"),
    );
    refused(run(&s, tape, both, DType::U32), &format!("{op}out, expected: F32, BF16 or F16, got: U32"));
    refused(
        run(&s, tape, [&zeros(&[4, 16]), &g], DType::F32),
        &format!("{op}qkv, expected: [3, 16], got: [4, 16]"),
    );
    let other = GdnTape { gates: &zeros(&[4, 2, 2]), ..tape };
    refused(run(&s, other, both, DType::F32), &format!("{op}gates, expected: [3, 2, 2], got: [4, 2, 2]"));
    let within = s.flatten_all().and_then(|t| t.narrow(0, 0, 12)).and_then(|t| t.reshape((3, 2, 2)));
    refused(
        run(&s, tape, [&qkv, &within.expect("12")], DType::F32),
        &format!("{op}gates, expected: storage of its own, got: the destination's storage"),
    );
    let batch = TreeBatch::single(DraftTree::chain(3).expect("a chain"), 0);
    let run = |tree: DeviceTree| {
        let pending = GdnPending { paths: &paths, tape };
        tree_gdn_commit_verify(&s, pending, &tree, dims(), WALK, both, DType::F32)
    };
    refused(run(on_cpu(batch)), &format!("{op}paths, expected: the batch's slots [0], got: slots [1]"));
    run(tree.clone()).expect("fitting arguments");
}

#[test]
fn commits_of_several_layers() {
    let (tree, paths) = tree();
    let (qkv, gates, s) = (zeros(&[3, 16]), zeros(&[3, 2, 2]), zeros(&[2, 2, 4, 4]));
    let verified = &tree_gdn_verify(&tree, dims(), WALK, &qkv, &gates, &s).expect("fitting arguments");
    let tape = GdnTape { verified, qkv: &qkv, gates: &gates };
    let states = zeros(&[2, 2, 2, 4, 4]);
    let run =
        |states: &Tensor, tapes: &[GdnTape<'_>]| tree_gdn_commit_layers(states, &paths, dims(), WALK, tapes);
    refused(run(&states, &[tape]), "tree-gdn-commit: tapes, expected: 2 entries, got: 1");
    refused(run(&s, &[tape, tape]), "tree-gdn-commit: state, expected: [2, 2, 2, 4, 4], got: [2, 2, 4, 4]");
    run(&states, &[tape, tape]).expect("fitting arguments");
    let (x, states) = (zeros(&[3, 5]), zeros(&[2, 2, 3, 5]));
    refused(
        tree_conv_commit_layers(&states, &paths, &[&x]),
        "tree-conv-commit: xs, expected: 2 entries, got: 1",
    );
    refused(
        tree_conv_commit_layers(&zeros(&[2, 3, 5]), &paths, &[&x, &x]),
        "tree-conv-commit: conv_state, expected: [layers, slots, 3, C], got: [2, 3, 5]",
    );
    tree_conv_commit_layers(&states, &paths, &[&x, &x]).expect("fitting arguments");
}

#[test]
fn conv() {
    let (tree, paths) = tree();
    let (x, w, s) = (zeros(&[3, 5]), zeros(&[5, 4]), zeros(&[2, 3, 5]));
    refused(tree_conv(&tree, &zeros(&[4, 5]), &w, &s), "tree-conv-verify: x, expected: [3, 5], got: [4, 5]");
    refused(
        tree_conv(&tree, &x, &zeros(&[5, 3]), &s),
        "tree-conv-verify: weight, expected: [5, 4], got: [5, 3]",
    );
    refused(
        tree_conv(&tree, &x, &w, &zeros(&[2, 5, 3])),
        "tree-conv-verify: conv_state, expected: [_, 3, 5], got: [2, 5, 3]",
    );
    refused(
        tree_conv(&tree, &x, &w, &zeros(&[1, 3, 5])),
        "tree-conv-verify: slots, expected: below the pool's 1 slots, got: 1",
    );
    refused(
        tree_conv_commit(&s, &paths, &of(DType::U8, &[3, 5])),
        "tree-conv-commit: x, expected: F32, BF16 or F16, got: U8",
    );
    refused(
        tree_conv_commit(&zeros(&[2, 5, 3]).transpose(1, 2).expect("three dimensions"), &paths, &x),
        "tree-conv-commit: conv_state, expected: a contiguous tensor, got: strides [15, 1, 3] for [2, 3, 5]",
    );
    let rows = s.reshape((6, 5)).and_then(|t| t.narrow(0, 0, 3)).expect("rows of the pool");
    refused(
        tree_conv_commit(&s, &paths, &rows),
        "tree-conv-commit: x, expected: storage of its own, got: the destination's storage",
    );
}

#[test]
fn conv_of_chains() {
    let (x, s) = (zeros(&[3, 5]), zeros(&[2, 3, 5]));
    let chains = DeviceSequences::new(Sequences::new(&[3], vec![1]).expect("a chain"), &Device::Cpu);
    let chains = chains.expect("a CPU");
    let op = "chain-conv-advance: ";
    refused(
        chain_conv_advance(&zeros(&[1, 3, 5]), &chains, &x),
        &format!("{op}slots, expected: below the pool's 1 slots, got: 1"),
    );
    refused(
        chain_conv_advance(&s, &chains, &zeros(&[2, 5])),
        &format!("{op}x, expected: [3, 5], got: [2, 5]"),
    );
    refused(
        chain_conv_advance(&zeros(&[2, 2, 5]), &chains, &x),
        &format!("{op}conv_state, expected: [_, 3, 5], got: [2, 2, 5]"),
    );
    chain_conv_advance(&s, &chains, &x).expect("fitting arguments");
}

#[test]
fn gate_projections() {
    let (ab, h) = (zeros(&[3, 4]), zeros(&[2]));
    refused(gates(&zeros(&[3, 5]), &h, &h), "gates: ab, expected: [_, 4], got: [3, 5]");
    refused(gates(&ab, &zeros(&[2, 1]), &h), "gates: a_log, expected: [2], got: [2, 1]");
    refused(gates(&ab, &h, &zeros(&[3])), "gates: dt_bias, expected: [2], got: [3]");
    refused(gates(&ab, &of(DType::F64, &[2]), &h), "gates: a_log, expected: F32, BF16 or F16, got: F64");
    let ((tree, _), x, w, s) = (tree(), zeros(&[3, 5]), zeros(&[5, 4]), zeros(&[2, 3, 5]));
    let run = |ab: &Tensor, a_log: &Tensor, dt_bias: &Tensor| {
        tree_conv_gates(&tree, &x, &w, &s, GateInputs { ab, a_log, dt_bias }, DType::F32)
    };
    refused(run(&zeros(&[4, 4]), &h, &h), "tree-conv-verify: ab, expected: [3, 4], got: [4, 4]");
    refused(run(&zeros(&[2, 2, 2]), &h, &h), "tree-conv-verify: ab, expected: [3, 2, 2], got: [2, 2, 2]");
    refused(run(&ab, &h, &zeros(&[3])), "tree-conv-verify: dt_bias, expected: [2], got: [3]");
    refused(
        run(&ab, &of(DType::F64, &[2]), &h),
        "tree-conv-verify: a_log, expected: F32, BF16 or F16, got: F64",
    );
    let chains = Sequences::new(&[3], vec![1]).expect("a chain");
    let chains = DeviceSequences::new(chains, &Device::Cpu).expect("a CPU");
    let gates = GateInputs { ab: &zeros(&[2, 4]), a_log: &h, dt_bias: &h };
    refused(
        chain_conv_gates(&chains, &x, &w, &s, gates, DType::F32),
        "chain-conv: ab, expected: [3, 4], got: [2, 4]",
    );
}

#[test]
fn attention() {
    let (tree, _) = tree();
    let dims = AttnDims::new(2, 1, 4).expect("1 divides 2");
    let (q, c) = (zeros(&[3, 2, 4]), zeros(&[2, 6, 1, 4]));
    let run = |lens: &[i32], q: &Tensor, k: &Tensor, v: &Tensor| tree_attention(&tree, dims, lens, q, k, v);
    refused(run(&[0], &zeros(&[3, 8]), &c, &c), "tree-attention: q, expected: [3, 2, 4], got: [3, 8]");
    refused(
        run(&[0], &q, &zeros(&[2, 6, 2, 4]), &c),
        "tree-attention: k_cache, expected: [slots, capacity, 1, 4], got: [2, 6, 2, 4]",
    );
    refused(
        run(&[0], &q, &c, &zeros(&[2, 5, 1, 4])),
        "tree-attention: v_cache, expected: [2, 6, 1, 4], got: [2, 5, 1, 4]",
    );
    refused(
        run(&[0], &q, &c, &of(DType::F16, &[2, 6, 1, 4])),
        "tree-attention: v_cache, expected: F32, got: F16",
    );
    refused(run(&[0, 0], &q, &c, &c), "tree-attention: prefix_lens, expected: 1 entries, got: 2");
    refused(
        run(&[4], &q, &c, &c),
        "tree-attention: prefix_lens, expected: 4 + 3 rows of sequence 0 within the capacity of 6, got: 7",
    );
    refused(
        run(&[0], &q, &zeros(&[1, 6, 1, 4]), &zeros(&[1, 6, 1, 4])),
        "tree-attention: slots, expected: below the pool's 1 slots, got: 1",
    );
    let mask = BlockMask { window: None, causal: false };
    let block = |slots: Vec<i32>, context_lens: Vec<i32>, q: &Tensor| {
        block_attention(&DraftBlocks { block_size: 3, slots, context_lens }, mask, dims, q, &c, &c)
    };
    refused(
        block(vec![0], vec![0], &zeros(&[4, 2, 4])),
        "block-attention: q, expected: [3, 2, 4], got: [4, 2, 4]",
    );
    refused(
        block(vec![-2], vec![0], &q),
        "block-attention: slots, expected: below the pool's 2 slots, got: -2",
    );
    refused(block(vec![0], vec![], &q), "block-attention: context_lens, expected: 1 entries, got: 0");
    refused(
        block(vec![0], vec![-1], &q),
        "block-attention: context_lens, expected: 0 or more rows of sequence 0, got: -1",
    );
}

#[test]
fn caches() {
    let (_, paths) = tree();
    let (cache, rows) = (zeros(&[2, 6, 1, 4]), zeros(&[3, 1, 4]));
    let run =
        |rows: &Tensor, cu: &[i32], slots: &[i32], starts: &[i32]| kv_append(&cache, rows, cu, slots, starts);
    refused(run(&zeros(&[3, 4]), &[0, 3], &[0], &[0]), "kv-append: rows, expected: [_, 1, 4], got: [3, 4]");
    refused(
        run(&of(DType::U32, &[3, 1, 4]), &[0, 3], &[0], &[0]),
        "kv-append: rows, expected: F32, BF16 or F16, got: U32",
    );
    refused(run(&rows, &[0, 3], &[0, 1], &[0, 0]), "kv-append: cu_rows, expected: 3 entries, got: 2");
    refused(run(&rows, &[0, 3], &[0], &[]), "kv-append: starts, expected: 1 entries, got: 0");
    refused(
        run(&rows, &[0, 2], &[0], &[0]),
        "kv-append: cu_rows, expected: ascending from 0 to 3, got: [0, 2]",
    );
    refused(run(&rows, &[0, 3], &[2], &[0]), "kv-append: slots, expected: below the pool's 2 slots, got: 2");
    refused(
        run(&rows, &[0, 3], &[0], &[4]),
        "kv-append: starts, expected: 3 rows of sequence 0 within the capacity of 6, got: start 4",
    );
    refused(
        kv_append(&zeros(&[6, 1, 4]), &rows, &[0, 3], &[0], &[0]),
        "kv-append: cache, expected: [slots, capacity, Hkv, D], got: [6, 1, 4]",
    );
    let pair = |values: &Tensor, v: &Tensor| {
        kv_append_pair((&cache, values), (&rows, v), &[0, 3], &[0], &[0]).inspect_err(|_| {
            let written = cache.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            assert_eq!(written, 0.0);
        })
    };
    let values = zeros(&[2, 6, 1, 4]);
    refused(pair(&values, &zeros(&[3, 4])), "kv-append: v, expected: [_, 1, 4], got: [3, 4]");
    refused(
        pair(&zeros(&[2, 5, 1, 4]), &rows),
        "kv-append: values, expected: [2, 6, 1, 4], got: [2, 5, 1, 4]",
    );
    refused(pair(&of(DType::BF16, &[2, 6, 1, 4]), &rows), "kv-append: values, expected: F32, got: BF16");
    refused(
        pair(&cache, &rows),
        "kv-append: values, expected: storage of its own, got: the destination's storage",
    );
    refused(
        pair(&values, &values.get(0).unwrap().narrow(0, 0, 3).unwrap()),
        "kv-append: v, expected: storage of its own, got: the destination's storage",
    );
    refused(kv_compact(&cache, &paths, &[]), "kv-compact: prefix_lens, expected: 1 entries, got: 0");
    refused(
        kv_compact(&of(DType::U32, &[2, 6, 1, 4]), &paths, &[0]),
        "kv-compact: cache, expected: F32, BF16 or F16, got: U32",
    );
}

#[test]
fn linear() {
    let dev = &Device::Cpu;
    let w = zeros(&[5, 4]);
    let linear = PackedLinear::new(&[&w, &w], dev).expect("two matrices");
    refused(PackedLinear::new(&[], dev), "packed-linear: weights, expected: at least one matrix, got: none");
    refused(PackedLinear::new(&[&zeros(&[4])], dev), "packed-linear: weights, expected: [out, in], got: [4]");
    refused(
        PackedLinear::new(&[&w, &zeros(&[5, 3])], dev),
        "packed-linear: weights, expected: [_, 4], got: [5, 3]",
    );
    refused(
        PackedLinear::new(&[&w, &of(DType::BF16, &[5, 4])], dev),
        "packed-linear: weights, expected: F32, got: BF16",
    );
    refused(linear.forward(&zeros(&[2, 5])), "packed-linear: x, expected: [_, 4], got: [2, 5]");
    refused(
        linear.forward_one(&zeros(&[2, 4])),
        "packed-linear: weights, expected: one for forward_one, got: 2",
    );
    refused(linear.lookup(&[3, 10]), "packed-linear: ids, expected: below 10, got: 10");
}

#[test]
fn glue() {
    let (x, w) = (zeros(&[3, 8]), zeros(&[8]));
    let plain = NormKind::Plain;
    refused(rms_norm(&x, &zeros(&[4]), 0., plain), "rms-norm: weight, expected: [8], got: [4]");
    refused(
        rms_norm(&of(DType::U8, &[3, 8]), &w, 0., plain),
        "rms-norm: x, expected: F32, BF16 or F16, got: U8",
    );
    refused(
        add_rms_norm(&x, &zeros(&[2, 8]), &w, 0., plain),
        "add-rms-norm: residual, expected: [3, 8], got: [2, 8]",
    );
    refused(gated_rms_norm(&x, &x, &w, 0.), "gated-rms-norm: o, expected: [N, Hv, Dv], got: [3, 8]");
    refused(
        gated_rms_norm(&zeros(&[3, 2, 4]), &zeros(&[3, 4]), &w, 0.),
        "gated-rms-norm: z, expected: [3, 8], got: [3, 4]",
    );
    refused(swiglu(&x, &zeros(&[8, 3])), "swiglu: up, expected: [3, 8], got: [8, 3]");
    let dims = AttnDims::new(2, 1, 4).expect("1 divides 2");
    refused(attn_gate(dims, &zeros(&[3, 2, 4]), &x), "attn-gate: q_proj, expected: [3, 16], got: [3, 8]");
    let (norm, inv_freq) = (zeros(&[4]), zeros(&[2]));
    let op =
        QkNormRope { dims, gated: false, q_norm: norm.clone(), k_norm: norm, eps: 0., kind: plain, inv_freq };
    let run = |op: &QkNormRope, k: &Tensor, positions: &[i32]| qk_norm_rope(op, &x, k, positions);
    let k = zeros(&[3, 4]);
    refused(run(&op, &k, &[0, 1]), "qk-norm-rope: q_proj, expected: [2, 8], got: [3, 8]");
    refused(run(&op, &x, &[0, 1, 1]), "qk-norm-rope: k_proj, expected: [3, 4], got: [3, 8]");
    let gated = QkNormRope { gated: true, ..op.clone() };
    refused(run(&gated, &k, &[0, 1, 1]), "qk-norm-rope: q_proj, expected: [3, 16], got: [3, 8]");
    let long = QkNormRope { inv_freq: zeros(&[3]), ..op };
    refused(run(&long, &k, &[0, 1, 1]), "qk-norm-rope: inv_freq, expected: [at most 2], got: [3]");
}
