//! A compaction moves rows: every result is compared element by element with a gather from an untouched copy.

use proptest::prelude::*;
use proptest::sample::Index;

use super::cpu::compact;
use super::oracle;
use crate::test_support::{arb_batch, pick_path, refusal};
use crate::{AcceptedPaths, DraftTree, TreeBatch};

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
