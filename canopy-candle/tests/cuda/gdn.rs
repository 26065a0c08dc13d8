use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, GdnPending, GdnTape, Solve, TreeBatch,
    TreeGdnOutput, Variant, tree_gdn_commit, tree_gdn_commit_verify, tree_gdn_verify, tree_gdn_verify_to,
};

use crate::{Check, bits, random};

pub const TESTS: &[(&str, Check)] = &[
    ("gdn::bf16_outputs_are_near_the_f32_ones_and_alone_as_together", half),
    ("gdn::commit_and_verify_in_one_have_the_bits_of_both", in_one),
    ("gdn::refusals_leave_the_pool_as_it_is", refused),
];

const FORWARD: Variant = Variant::Solve(Solve::Forward);

fn dims() -> Result<GdnDims> {
    Ok(GdnDims::new(2, 4, 128, 128)?)
}

/// A batch on the device, and what its verify reads.
struct Round {
    batch: TreeBatch,
    tree: DeviceTree,
    qkv: Tensor,
    gates: Tensor,
}

impl Round {
    fn new(device: &Device, trees: &[DraftTree], slots: &[i32], rows: DType, seed: u64) -> Result<Self> {
        let (batch, dims) = (TreeBatch::new(trees.to_vec(), slots.to_vec())?, dims()?);
        let qkv = random(device, seed, &[batch.rows(), dims.qkv_width()])?.to_dtype(rows)?;
        let g = random(device, seed + 1, &[batch.rows(), 1, dims.v_heads])?.abs()?.affine(-0.1, -1e-3)?;
        let beta = random(device, seed + 2, &[batch.rows(), 1, dims.v_heads])?.tanh()?.affine(0.4, 0.5)?;
        let gates = Tensor::cat(&[g, beta], 1)?;
        Ok(Self { tree: DeviceTree::new(batch.clone(), device)?, batch, qkv, gates })
    }

    fn verify(&self, state: &Tensor, dtype: DType) -> Result<TreeGdnOutput> {
        Ok(tree_gdn_verify_to(&self.tree, dims()?, FORWARD, &self.qkv, &self.gates, state, dtype)?)
    }

    /// Every path to its tree's last node, but the first, which is empty.
    fn paths(&self, device: &Device) -> Result<DevicePaths> {
        let path = |(b, tree): (usize, &DraftTree)| if b == 0 { vec![] } else { tree.path(tree.len() - 1) };
        let paths = self.batch.trees().iter().enumerate().map(path).collect::<Vec<_>>();
        Ok(DevicePaths::new(AcceptedPaths::new(&self.batch, &paths)?, device)?)
    }
}

fn pool(device: &Device, slots: usize) -> Result<Tensor> {
    let dims = dims()?;
    Ok(random(device, 9, &[slots, dims.v_heads, dims.dv, dims.dk])?.affine(0.05, 0.0)?)
}

fn planes(out: &TreeGdnOutput) -> Result<[Vec<u32>; 3]> {
    Ok([bits(&out.o)?, bits(&out.u)?, bits(&out.g_cum)?])
}

/// Shallow trees and chains: dense blocks are faster for some of them, others are solved along their paths.
fn half(device: &Device) -> Result<()> {
    let trees =
        [DraftTree::bole(20, 1)?, DraftTree::chain(120)?, DraftTree::chain(2)?, DraftTree::bole(128, 2)?];
    let (slots, state) = ([0, 1, 2, 3], pool(device, 4)?);
    let round = Round::new(device, &trees, &slots, DType::BF16, 20)?;
    let (wide, out) = (round.verify(&state, DType::F32)?, round.verify(&state, DType::BF16)?);
    ensure!(out.o.dtype() == DType::BF16 && out.u.dtype() == DType::F32);
    for (got, want) in [(&out.o, &wide.o), (&out.u, &wide.u), (&out.g_cum, &wide.g_cum)] {
        let sum = |x: Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
        let (far, size) = (sum((got.to_dtype(DType::F32)? - want)?)?, sum(want.clone())?);
        ensure!(far.is_finite() && (far / size).sqrt() < 1e-2, "{far} of {size}");
    }
    let mut first = 0;
    for (tree, slot) in trees.iter().zip(slots) {
        let batch = TreeBatch::single(tree.clone(), slot as usize);
        let rows = |x: &Tensor| x.narrow(0, first, tree.len())?.contiguous();
        let (qkv, gates) = (rows(&round.qkv)?, rows(&round.gates)?);
        let alone = Round { tree: DeviceTree::new(batch.clone(), device)?, batch, qkv, gates };
        let alone = alone.verify(&state, DType::BF16)?;
        for (alone, together) in [(&alone.o, &out.o), (&alone.u, &out.u), (&alone.g_cum, &out.g_cum)] {
            ensure!(bits(alone)? == bits(&rows(together)?)?, "the tree in slot {slot} has other bits alone");
        }
        first += tree.len();
    }
    Ok(())
}

/// Batches that one launch takes, and others, which two take: chains that are walked, f32 rows, dense blocks.
fn in_one(device: &Device) -> Result<()> {
    let bole = |nodes, seed| DraftTree::bole(nodes, seed);
    let batches = [
        vec![bole(17, 1)?, bole(64, 2)?, bole(5, 3)?],
        vec![bole(100, 1)?, bole(128, 2)?, bole(30, 3)?],
        vec![DraftTree::chain(16)?, bole(20, 2)?, DraftTree::chain(200)?],
        vec![DraftTree::random(200, 4)?, DraftTree::chain(1)?, bole(9, 1)?],
    ];
    let last = [bole(30, 7)?, DraftTree::chain(9)?, bole(64, 8)?];
    for (at, trees) in batches.iter().enumerate() {
        for (rows, dtype) in [(DType::BF16, DType::F32), (DType::BF16, DType::BF16), (DType::F32, DType::F32)]
        {
            let slots = [[2, 0, 1], [1, -1, 0]][at % 2];
            let (last, now) =
                (Round::new(device, &last, &slots, rows, 30)?, Round::new(device, trees, &slots, rows, 40)?);
            let (start, paths) = (pool(device, 3)?, last.paths(device)?);
            let verified = last.verify(&start, dtype)?;
            let apart = start.copy()?;
            tree_gdn_commit(&apart, &paths, dims()?, FORWARD, &verified, &last.qkv, &last.gates)?;
            let want = planes(&now.verify(&apart, dtype)?)?;
            let together = start.copy()?;
            let tape = GdnTape { verified: &verified, qkv: &last.qkv, gates: &last.gates };
            let pending = GdnPending { paths: &paths, tape };
            let inputs = [&now.qkv, &now.gates];
            let got = tree_gdn_commit_verify(&together, pending, &now.tree, dims()?, FORWARD, inputs, dtype)?;
            let what = format!("batch {at}, {rows:?} rows, {dtype:?} outputs");
            ensure!(got.o.dtype() == dtype && planes(&got)? == want, "{what}: outputs");
            ensure!(bits(&together)? == bits(&apart)?, "{what}: states");
            ensure!(bits(&together)? != bits(&start)?, "{what}: nothing was committed");
        }
    }
    Ok(())
}

fn refused(device: &Device) -> Result<()> {
    let trees = [DraftTree::bole(6, 1)?];
    let (round, state) = (Round::new(device, &trees, &[0], DType::F32, 50)?, pool(device, 1)?);
    let (paths, start) = (round.paths(device)?, bits(&state)?);
    let verified = tree_gdn_verify(&round.tree, dims()?, FORWARD, &round.qkv, &round.gates, &state)?;
    let tape = GdnTape { verified: &verified, qkv: &round.qkv, gates: &round.gates };
    let cases = [
        (FORWARD, DType::BF16, "tree-gdn-commit-verify: qkv, expected: BF16, got: F32"),
        (Variant::Walk, DType::F32, "tree-gdn-commit-verify: variant, expected: forward, dense, blocked32"),
        (FORWARD, DType::F16, "tree-gdn-commit-verify: out, expected: F32 or BF16 on CUDA, got: F16"),
    ];
    for (variant, dtype, text) in cases {
        let pending = GdnPending { paths: &paths, tape };
        let inputs = [&round.qkv, &round.gates];
        let got = tree_gdn_commit_verify(&state, pending, &round.tree, dims()?, variant, inputs, dtype);
        let Err(error) = got else { anyhow::bail!("accepted; expected {text}") };
        ensure!(error.to_string().starts_with(text), "said {error}, expected {text}");
    }
    ensure!(bits(&state)? == start, "the pool changed");
    Ok(())
}
