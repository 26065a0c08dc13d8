//! Kinds of failure that other software of this field has shown, as they reach the ops.

use candle_core::{Device, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, AttnDims, BlockMask, DevicePaths, DeviceTree, DraftBlocks, DraftTree, GdnDims, NormKind,
    QkNormRope, Solve, TreeBatch, Variant, block_attention, gates, qk_norm_rope, tree_attention, tree_conv,
    tree_conv_commit, tree_gdn_commit, tree_gdn_verify,
};
use canopy_kernels::tree_gdn::oracle::{self, OracleInput};

use crate::support::{Rng, bits, f32s, f64s, max_abs, on_cpu};

fn single(tree: DraftTree, slot: usize) -> DeviceTree {
    on_cpu(TreeBatch::single(tree, slot))
}

fn whole(tree: &DeviceTree) -> DevicePaths {
    let path = (0..tree.host().rows()).collect();
    let paths = AcceptedPaths::new(tree.host(), &[path]).expect("a chain");
    DevicePaths::new(paths, &Device::Cpu).expect("a CPU")
}

/// The first `len` rows of a buffer whose later rows are NaN.
fn front(rows: &Tensor) -> Result<Tensor> {
    let mut shape = rows.dims().to_vec();
    shape[0] = 40;
    let beyond = Tensor::full(f32::NAN, shape, &Device::Cpu)?;
    Tensor::cat(&[rows, &beyond], 0)?.narrow(0, 0, rows.dim(0)?)
}

#[test]
fn nan_beyond_the_last_row_changes_no_bit() -> Result<()> {
    let mut rng = Rng(30);
    let (dims, attn) = (GdnDims::new(1, 2, 8, 8).expect("dims"), AttnDims::new(2, 1, 8).expect("dims"));
    let (weight, conv_state, state) =
        (rng.tensor(&[32, 4]), rng.tensor(&[1, 3, 32]), rng.tensor(&[1, 2, 8, 8]));
    for rows in 1..=33 {
        let tree = single(DraftTree::random(rows, rows as u64).expect("a tree"), 0);
        let (x, ab) = (rng.tensor(&[rows, 32]), rng.tensor(&[rows, 4]));
        let (gates_in, q) = (rng.gates(rows, 2), rng.tensor(&[rows, 2, 8]));
        let cache = rng.tensor(&[1, rows + 2, 1, 8]);
        let head = rng.tensor(&[2]);
        let run = |view: &dyn Fn(&Tensor) -> Result<Tensor>, cache: &Tensor| {
            let conv = tree_conv(&tree, &view(&x)?, &view(&weight)?, &view(&conv_state)?)?;
            let out =
                tree_gdn_verify(&tree, dims, Variant::Walk, &view(&x)?, &view(&gates_in)?, &view(&state)?)?;
            let pool = state.copy()?;
            tree_gdn_commit(
                &pool,
                &first_node(&tree),
                dims,
                Variant::Walk,
                &out,
                &view(&x)?,
                &view(&gates_in)?,
            )?;
            let gate = gates(&view(&ab)?, &view(&head)?, &view(&head)?)?;
            let rows = tree_attention(&tree, attn, &[2], &view(&q)?, cache, cache)?;
            Ok::<_, candle_core::Error>([conv, out.o, out.u, out.g_cum, pool, gate, rows].map(|t| bits(&t)))
        };
        let exact = run(&|tensor| Ok(tensor.clone()), &cache)?;
        let nan_slot = Tensor::full(f32::NAN, (1, rows + 2, 1, 8), &Device::Cpu)?;
        let beyond = run(&front, &Tensor::cat(&[&cache, &nan_slot], 0)?)?;
        assert!(exact == beyond, "{rows} rows");
    }
    Ok(())
}

fn first_node(tree: &DeviceTree) -> DevicePaths {
    let paths = AcceptedPaths::new(tree.host(), &[vec![0]]).expect("the root");
    DevicePaths::new(paths, &Device::Cpu).expect("a CPU")
}

/// Per row and head, the index of the largest output.
fn argmax(o: &Tensor) -> Result<Vec<u32>> {
    o.argmax(candle_core::D::Minus1)?.flatten_all()?.to_vec1()
}

#[test]
fn two_hundred_committed_chains_equal_serial_decoding() -> Result<()> {
    const CHAIN: usize = 6;
    const ROUNDS: usize = 200;
    let dims = GdnDims::new(1, 2, 16, 16).expect("1 divides 2");
    let channels = dims.qkv_width();
    let mut rng = Rng(31);
    let (x, gates) = (rng.tensor(&[CHAIN * ROUNDS, channels]), rng.gates(CHAIN * ROUNDS, 2));
    // Gates near 0 keep a long memory, so an error made early would still show at the end.
    let gates =
        (gates * Tensor::new(&[[0.02f32], [1.0]], &Device::Cpu)?.broadcast_as((CHAIN * ROUNDS, 2, 2))?)?;
    let weight = rng.tensor(&[channels, 4]);

    let decode = |chain: usize, variant: Variant| {
        let tree = single(DraftTree::chain(chain).expect("a chain"), 0);
        let paths = whole(&tree);
        let state = Tensor::zeros((1, 2, 16, 16), candle_core::DType::F32, &Device::Cpu)?;
        let conv_state = Tensor::zeros((1, 3, channels), candle_core::DType::F32, &Device::Cpu)?;
        let (mut outs, mut convs) = (Vec::new(), Vec::new());
        for start in (0..CHAIN * ROUNDS).step_by(chain) {
            let (x, gates) = (x.narrow(0, start, chain)?, gates.narrow(0, start, chain)?);
            let qkv = tree_conv(&tree, &x, &weight, &conv_state)?;
            let out = tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &state)?;
            tree_gdn_commit(&state, &paths, dims, variant, &out, &qkv, &gates)?;
            tree_conv_commit(&conv_state, &paths, &x)?;
            outs.push(out.o);
            convs.push(qkv);
        }
        Ok::<_, candle_core::Error>((Tensor::cat(&outs, 0)?, Tensor::cat(&convs, 0)?, state, conv_state))
    };

    let (o, qkv, state, conv_state) = decode(1, Variant::Walk)?;
    let walked = decode(CHAIN, Variant::Walk)?;
    assert_eq!(bits(&walked.0), bits(&o));
    assert_eq!(bits(&walked.2), bits(&state));
    assert_eq!(bits(&walked.3), bits(&conv_state));

    let solved = decode(CHAIN, Variant::Solve(Solve::Forward))?;
    let difference = max_abs(&f32s(&solved.2), &f64s(&state));
    let largest = f32s(&state).iter().fold(0f32, |a, x| a.max(x.abs()));
    assert!(difference < 1e-5 * f64::from(largest), "{difference} of {largest}");
    assert_eq!(argmax(&solved.0)?, argmax(&o)?);

    let mut truth = vec![0.0; dims.state_len()];
    for start in (0..CHAIN * ROUNDS).step_by(CHAIN) {
        let (qkv, gates) = (f64s(&qkv.narrow(0, start, CHAIN)?), f64s(&gates.narrow(0, start, CHAIN)?));
        let input = OracleInput { qkv: &qkv, gates: &gates, state: &truth };
        truth = oracle::commit(dims, &DraftTree::chain(CHAIN).expect("a chain"), CHAIN - 1, input);
    }
    assert!(max_abs(&f32s(&state), &truth) < 1e-5 * f64::from(largest));
    Ok(())
}

#[test]
fn verification_leaves_every_pool_as_it_is() -> Result<()> {
    let mut rng = Rng(32);
    let (dims, attn) = (GdnDims::new(1, 2, 8, 8).expect("dims"), AttnDims::new(2, 1, 8).expect("dims"));
    let pools = [
        rng.tensor(&[2, 2, 8, 8]),
        rng.tensor(&[2, 3, 32]),
        rng.tensor(&[2, 12, 1, 8]),
        rng.tensor(&[2, 12, 1, 8]),
    ];
    let weight = rng.tensor(&[32, 4]);
    let before = pools.each_ref().map(bits);
    let trees = [9, 7].map(|nodes| single(DraftTree::random(nodes, 5).expect("a tree"), 1));
    let inputs = [9, 7].map(|rows| (rng.tensor(&[rows, 32]), rng.gates(rows, 2), rng.tensor(&[rows, 2, 8])));
    let run = |which: usize, pools: &[Tensor; 4]| {
        let (tree, (x, gates, q)) = (&trees[which], &inputs[which]);
        let qkv = tree_conv(tree, x, &weight, &pools[1])?;
        let out = tree_gdn_verify(tree, dims, Variant::Walk, &qkv, gates, &pools[0])?;
        let rows = tree_attention(tree, attn, &[3], q, &pools[2], &pools[3])?;
        Ok::<_, candle_core::Error>([qkv, out.o, out.u, out.g_cum, rows].map(|t| bits(&t)))
    };
    run(0, &pools)?;
    assert!(pools.each_ref().map(bits) == before, "a pool changed");
    let fresh = [pools[0].copy()?, pools[1].copy()?, pools[2].copy()?, pools[3].copy()?];
    assert!(run(1, &pools)? == run(1, &fresh)?, "the second tree saw the first");
    Ok(())
}

#[test]
fn sizes_of_one_work_whatever_their_strides() -> Result<()> {
    let mut rng = Rng(33);
    let dims = GdnDims::new(1, 1, 1, 1).expect("ones");
    let tree = single(DraftTree::chain(1).expect("the root"), 0);
    let qkv = rng.tensor(&[1, 3]);
    let gates = rng.gates(1, 1);
    let state = rng.tensor(&[1, 1, 1, 1]);
    let expected = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
    // One row of three that lies as a column: shape [1, 3], strides [1, 1].
    let column = qkv.reshape((3, 1))?.t()?;
    assert_eq!(column.stride(), [1, 1]);
    let out = tree_gdn_verify(
        &tree,
        dims,
        Variant::Walk,
        &column,
        &gates.transpose(0, 1)?.transpose(0, 1)?,
        &state,
    )?;
    assert_eq!(bits(&out.o), bits(&expected.o));
    // A single row taken out of wide ones keeps the wide stride.
    let wide = rng.tensor(&[4, 3, 5]);
    let row = wide.narrow(0, 2, 1)?.narrow(2, 1, 1)?.reshape((1, 3))?;
    let strided = wide.narrow(0, 2, 1)?.narrow(2, 1, 1)?.squeeze(2)?;
    assert!(!strided.is_contiguous());
    let out = tree_gdn_verify(&tree, dims, Variant::Walk, &strided, &gates, &state)?;
    let expected = tree_gdn_verify(&tree, dims, Variant::Walk, &row.contiguous()?, &gates, &state)?;
    assert_eq!(bits(&out.o), bits(&expected.o));
    Ok(())
}

#[test]
fn no_rows_give_no_rows() -> Result<()> {
    let mut rng = Rng(34);
    let (dims, attn) = (GdnDims::new(1, 2, 8, 8).expect("dims"), AttnDims::new(2, 1, 8).expect("dims"));
    let none = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu);
    let tree = on_cpu(TreeBatch::new(Vec::new(), Vec::new()).expect("no trees"));
    let (state, cache) = (rng.tensor(&[1, 2, 8, 8]), rng.tensor(&[1, 4, 1, 8]));
    let x = none(&[0, 32])?;
    let qkv = tree_conv(&tree, &x, &rng.tensor(&[32, 4]), &rng.tensor(&[1, 3, 32]))?;
    assert_eq!(qkv.dims(), [0, 32]);
    let out = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &none(&[0, 2, 2])?, &state)?;
    assert_eq!((out.o.dims(), out.g_cum.dims()), (&[0, 2, 8][..], &[0, 2][..]));
    assert_eq!(gates(&none(&[0, 4])?, &rng.tensor(&[2]), &rng.tensor(&[2]))?.dims(), [0, 2, 2]);
    let q = none(&[0, 2, 8])?;
    assert_eq!(tree_attention(&tree, attn, &[], &q, &cache, &cache)?.dims(), [0, 2, 8]);
    let blocks = DraftBlocks { block_size: 4, slots: Vec::new(), context_lens: Vec::new() };
    let mask = BlockMask { window: None, causal: true };
    assert_eq!(block_attention(&blocks, mask, attn, &q, &cache, &cache)?.dims(), [0, 2, 8]);
    Ok(())
}

#[test]
fn siblings_share_a_position() -> Result<()> {
    let mut rng = Rng(35);
    let tree = DraftTree::new(vec![-1, 0, 0, 1, 2]).expect("a tree");
    let committed = 9;
    let positions = tree.depths().iter().map(|&depth| committed + depth as i32).collect::<Vec<_>>();
    let op = QkNormRope {
        dims: AttnDims::new(1, 1, 8).expect("one head"),
        gated: false,
        q_norm: rng.tensor(&[8]),
        k_norm: rng.tensor(&[8]),
        eps: 1e-6,
        kind: NormKind::UnitOffset,
        inv_freq: Tensor::new(&[1f32, 0.3, 0.1, 0.01], &Device::Cpu)?,
    };
    // One raw row for every node: what differs afterwards is the position alone.
    let rows = rng.tensor(&[1, 8]).broadcast_as((5, 8))?;
    let (q, k) = qk_norm_rope(&op, &rows, &rows, &positions)?;
    for rotated in [&q, &k] {
        let rows = (0..5).map(|node| Ok(bits(&rotated.get(node)?))).collect::<Result<Vec<_>>>()?;
        assert_eq!(rows[1], rows[2]);
        assert_eq!(rows[3], rows[4]);
        assert!(rows[0] != rows[1] && rows[1] != rows[3]);
    }
    // The same node alone, at start + depth.
    let (alone, _) = qk_norm_rope(&op, &rows.narrow(0, 0, 1)?, &rows.narrow(0, 0, 1)?, &[committed + 2])?;
    assert_eq!(bits(&alone), bits(&q.narrow(0, 4, 1)?));
    Ok(())
}
