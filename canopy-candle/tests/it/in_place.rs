//! In-place ops write the slots they name and nothing else. Pools hold a NaN with a payload in every other element:
//! an arithmetic pass over it, or a copy of the wrong slot, changes its bits.

use candle_core::{Device, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DraftTree, GdnDims, TreeBatch, Variant, kv_append, kv_compact,
    tree_conv_commit, tree_gdn_commit, tree_gdn_serial_commit, tree_gdn_serial_verify, tree_gdn_verify,
};

use crate::support::{Rng, bits, on_cpu};

const NAMED: usize = 2;
const SLOTS: usize = 4;

/// A pool whose slots are marked but for the named one.
fn marked(named: &Tensor) -> Result<Tensor> {
    let mark = Tensor::full(f32::from_bits(0x7fc1_2345), named.shape(), &Device::Cpu)?;
    let slots = (0..SLOTS).map(|slot| if slot == NAMED { named } else { &mark }).collect::<Vec<_>>();
    Tensor::stack(&slots, 0)
}

/// Runs `op` on a marked pool; the named slot must change, the others must not.
fn only_the_named_slot_changes(named: &Tensor, op: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
    let pool = marked(named)?;
    let before = bits(&pool);
    op(&pool)?;
    let (after, len) = (bits(&pool), named.elem_count());
    for slot in 0..SLOTS {
        let range = slot * len..(slot + 1) * len;
        assert_eq!(after[range.clone()] == before[range], slot != NAMED, "slot {slot}");
    }
    Ok(())
}

/// One live tree on the named slot and a padding sequence.
fn batch() -> (TreeBatch, DevicePaths) {
    let trees = vec![DraftTree::new(vec![-1, 0, 0]).expect("a tree"), DraftTree::chain(2).expect("a chain")];
    let batch = TreeBatch::new(trees, vec![NAMED as i32, -1]).expect("two slots");
    let paths = AcceptedPaths::new(&batch, &[vec![0, 2], vec![0, 1]]).expect("two paths");
    let paths = DevicePaths::new(paths, &Device::Cpu).expect("a CPU");
    (batch, paths)
}

#[test]
fn gdn_commit() -> Result<()> {
    let (mut rng, (batch, paths)) = (Rng(20), batch());
    let dims = GdnDims::new(1, 2, 4, 4).expect("1 divides 2");
    let (qkv, gates) = (rng.tensor(&[5, dims.qkv_width()]), rng.gates(5, 2));
    only_the_named_slot_changes(&rng.tensor(&[2, 4, 4]), |pool| {
        let verified = tree_gdn_verify(&on_cpu(batch.clone()), dims, Variant::Walk, &qkv, &gates, pool)?;
        tree_gdn_commit(pool, &paths, dims, Variant::Walk, &verified, &qkv, &gates)
    })
}

#[test]
fn gdn_serial_commit() -> Result<()> {
    let (mut rng, (batch, paths)) = (Rng(20), batch());
    let dims = GdnDims::new(1, 2, 4, 4).expect("1 divides 2");
    let (qkv, gates) = (rng.tensor(&[5, dims.qkv_width()]), rng.gates(5, 2));
    only_the_named_slot_changes(&rng.tensor(&[2, 4, 4]), |pool| {
        let verified = tree_gdn_serial_verify(&on_cpu(batch.clone()), dims, &qkv, &gates, pool)?;
        tree_gdn_serial_commit(pool, &paths, dims, &verified)
    })
}

#[test]
fn conv_commit() -> Result<()> {
    let (mut rng, (_, paths)) = (Rng(21), batch());
    let x = rng.tensor(&[5, 6]);
    only_the_named_slot_changes(&rng.tensor(&[3, 6]), |pool| tree_conv_commit(pool, &paths, &x))
}

#[test]
fn append() -> Result<()> {
    let mut rng = Rng(22);
    let rows = rng.tensor(&[5, 1, 4]);
    only_the_named_slot_changes(&rng.tensor(&[6, 1, 4]), |pool| {
        kv_append(pool, &rows, &[0, 3, 5], &[NAMED as i32, -1], &[1, 0])
    })
}

#[test]
fn compact() -> Result<()> {
    let (mut rng, (_, paths)) = (Rng(23), batch());
    only_the_named_slot_changes(&rng.tensor(&[6, 1, 4]), |pool| kv_compact(pool, &paths, &[2, 0]))
}

#[test]
fn a_refused_call_leaves_the_pool_alone() -> Result<()> {
    let (mut rng, (_, paths)) = (Rng(24), batch());
    let pool = marked(&rng.tensor(&[6, 1, 4]))?;
    let before = bits(&pool);
    kv_compact(&pool, &paths, &[4, 0]).expect_err("4 + 3 rows in 6");
    kv_append(&pool, &rng.tensor(&[5, 1, 4]), &[0, 3, 5], &[NAMED as i32, 9], &[1, 0])
        .expect_err("slot 9 of 4");
    assert_eq!(bits(&pool), before);
    Ok(())
}
