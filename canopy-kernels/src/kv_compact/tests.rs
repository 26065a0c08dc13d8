//! A compaction moves rows: every result is compared element by element with a gather from an untouched copy.

use proptest::prelude::*;
use proptest::sample::Index;

use super::cpu::compact;
use super::oracle;
use crate::test_support::{arb_batch, bits, pick_path, refusal, values};
use crate::tree_attention::cpu::{AttentionInput, verify};
use crate::{AcceptedPaths, AttnDims, DraftTree, TreeBatch};

const SLOTS: usize = 5;

/// A cache whose every element says where it was.
fn numbered(capacity: usize, width: usize) -> Vec<u32> {
    (0..(SLOTS * capacity * width) as u32).collect()
}

proptest! {
    #[test]
    fn rows_move_as_if_gathered_from_a_copy(
        batch in arb_batch(60, SLOTS),
        picks: [Option<Index>; 4],
        prefix in 0i32..20,
        width in 1usize..9,
    ) {
        let path = |(tree, pick): (&DraftTree, &Option<Index>)| pick.map_or(vec![], |pick| pick_path(tree, pick));
        let paths: Vec<_> = batch.trees().iter().zip(&picks).map(path).collect();
        let paths = AcceptedPaths::new(&batch, &paths).unwrap();
        let prefix_lens: Vec<i32> = (0..batch.sequences() as i32).map(|b| prefix + b).collect();
        let cache = numbered(90, width);
        let mut moved = cache.clone();
        compact(&paths, &prefix_lens, width, 90, &mut moved).unwrap();
        prop_assert_eq!(moved, oracle::compact(&paths, &prefix_lens, width, 90, &cache));
    }
}

/// Sources and destinations overlap wherever a path stays close to the front.
#[test]
fn overlapping_moves_lose_no_row() {
    let tree = DraftTree::new(vec![-1, 0, 0, 2, 3, 3, 5, 6]).unwrap();
    let batch = TreeBatch::single(tree, 1);
    for (path, want) in [
        (vec![0, 2, 3, 5, 6, 7], [0, 2, 3, 5, 6, 7, 6, 7]),
        (vec![0, 2, 3, 4], [0, 2, 3, 4, 4, 5, 6, 7]),
        (vec![0, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        (vec![0], [0, 1, 2, 3, 4, 5, 6, 7]),
        (vec![], [0, 1, 2, 3, 4, 5, 6, 7]),
    ] {
        let paths = AcceptedPaths::new(&batch, &[path]).unwrap();
        let cache: Vec<[u16; 3]> = (0..SLOTS as u16 * 10).map(|row| [row, row + 100, row + 200]).collect();
        let mut moved = cache.clone();
        compact(&paths, &[2], 1, 10, &mut moved).unwrap();
        for (offset, from) in want.into_iter().enumerate() {
            assert_eq!(moved[10 + 2 + offset], cache[10 + 2 + from]);
        }
        assert_eq!((&moved[..12], &moved[20..]), (&cache[..12], &cache[20..]));
    }
}

/// What compaction is for: a row after the accepted path sees the very keys that serial decoding would have left.
#[test]
fn attention_after_a_compaction_equals_serial_decoding() {
    let (dims, prefix, capacity) = (AttnDims::new(4, 2, 16).unwrap(), 5, 40);
    let tree = DraftTree::random(30, 2).unwrap();
    let path = tree.path(29);
    let pool = capacity * dims.kv_width();
    let (keys, vals) = (values(1, pool, 1.0), values(2, pool, 1.0));
    let paths = AcceptedPaths::new(&TreeBatch::single(tree, 0), std::slice::from_ref(&path)).unwrap();
    let compacted = |pool: &[f32]| {
        let mut pool = pool.to_vec();
        compact(&paths, &[prefix], dims.kv_width(), capacity, &mut pool).unwrap();
        pool
    };
    let serial = |pool: &[f32]| {
        let mut seen: Vec<usize> = (0..prefix as usize).collect();
        seen.extend(path.iter().map(|node| prefix as usize + node));
        let row = |row: usize| pool[row * dims.kv_width()..(row + 1) * dims.kv_width()].to_vec();
        let mut rows: Vec<f32> = seen.into_iter().flat_map(row).collect();
        rows.resize(pool.len(), f32::NAN);
        rows
    };
    // The next round's root is the last accepted row again: its key lies in both caches.
    let (q, root) = (values(3, dims.q_width(), 1.0), prefix + path.len() as i32 - 1);
    let attend = |k_cache: &[f32], v_cache: &[f32]| {
        let mut out = vec![0.0; q.len()];
        let input = AttentionInput { q: &q, k_cache, v_cache, capacity };
        let batch = TreeBatch::single(DraftTree::chain(1).unwrap(), 0);
        verify(dims, &batch, &[root], input, &mut out).unwrap();
        bits(&out)
    };
    assert_eq!(attend(&compacted(&keys), &compacted(&vals)), attend(&serial(&keys), &serial(&vals)));
}

#[test]
fn padding_moves_nothing() {
    let batch = TreeBatch::new(vec![DraftTree::new(vec![-1, 0, 0]).unwrap()], vec![-1]).unwrap();
    let paths = AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap();
    let mut cache = numbered(4, 2);
    compact(&paths, &[-9], 2, 4, &mut cache).unwrap();
    assert_eq!(cache, numbered(4, 2));
}

#[test]
fn refusals_name_the_argument_and_move_nothing() {
    let batch = TreeBatch::new(
        vec![DraftTree::new(vec![-1, 0, 0]).unwrap(), DraftTree::chain(2).unwrap()],
        vec![0, 4],
    )
    .unwrap();
    let paths = AcceptedPaths::new(&batch, &[vec![0, 2], vec![0]]).unwrap();
    let mut cache = numbered(5, 2);
    let mut check = |prefix_lens: &[i32], width, capacity, len: usize| {
        let text = refusal(compact(&paths, prefix_lens, width, capacity, &mut cache[..len]));
        assert_eq!(cache, numbered(5, 2));
        text
    };
    let op = "kv_compact: ";
    assert_eq!(check(&[0, 0], 0, 5, 50), format!("{op}width, expected: at least 1, got: 0"));
    assert_eq!(check(&[0, 0], 2, 0, 50), format!("{op}capacity, expected: at least 1, got: 0"));
    assert_eq!(
        check(&[0, 0], 2, 5, 49),
        format!("{op}cache, expected: whole slots of 10 elements, got: 49 elements")
    );
    assert_eq!(check(&[0, 0], 2, 5, 40), format!("{op}slots, expected: below the pool's 4 slots, got: 4"));
    assert_eq!(check(&[0], 2, 5, 50), format!("{op}prefix_lens, expected: [2], got: [1]"));
    for (prefix_lens, nodes, got) in
        [([3, 0], 3, 3), ([0, 4], 2, 4), ([0, -1], 2, -1), ([i32::MAX, 0], 3, i32::MAX)]
    {
        let want = format!("{op}prefix_lens, expected: 0 to capacity 5 - {nodes} nodes, got: {got}");
        assert_eq!(check(&prefix_lens, 2, 5, 50), want);
    }
}
