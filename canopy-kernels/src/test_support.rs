//! What the rooms' property tests draw from and compare with.

use std::ops::RangeInclusive;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::tree::SplitMix64;
use crate::{DraftTree, TreeBatch};

/// A tree of any shape; shrinks towards a chain and towards fewer nodes.
pub(crate) fn arb_tree(nodes: RangeInclusive<usize>) -> impl Strategy<Value = DraftTree> {
    let offspring = nodes.start() - 1..=nodes.end() - 1;
    proptest::collection::vec(any::<Index>(), offspring).prop_map(|back| {
        let links = back.iter().enumerate().map(|(i, back)| (i - back.index(i + 1)) as i32);
        DraftTree::new(std::iter::once(-1).chain(links).collect()).expect("a good parent array")
    })
}

/// One to four trees of up to `nodes` nodes on distinct slots below `slots` (at least 4), some of them padding.
pub(crate) fn arb_batch(nodes: usize, slots: usize) -> impl Strategy<Value = TreeBatch> {
    let tree = (arb_tree(1..=nodes), proptest::bool::weighted(0.2));
    (proptest::collection::vec(tree, 1..=4), 0..slots).prop_map(move |(trees, first)| {
        let slot =
            |(b, (_, padding)): (usize, &(_, bool))| if *padding { -1 } else { ((first + b) % slots) as i32 };
        let slot_of = trees.iter().enumerate().map(slot).collect();
        TreeBatch::new(trees.into_iter().map(|(tree, _)| tree).collect(), slot_of).expect("distinct slots")
    })
}

/// Repeatable values, nearly normal, mean 0 and deviation `scale`.
pub(crate) fn values(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    let mut normal = || (0..6).map(|_| random.unit() - 0.5).sum::<f64>() * 2f64.sqrt();
    (0..len).map(|_| normal() as f32 * scale).collect()
}

/// Bits of every element; all NaNs count as one.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

/// Fails unless every element is within `absolute + relative * |want|`, a NaN or infinity exactly where `want` has
/// it.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f64], absolute: f64, relative: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let beyond_f32 = want as f32;
        let close = if want.is_nan() || beyond_f32.is_infinite() {
            bits(&[got]) == bits(&[beyond_f32])
        } else {
            (got as f64 - want).abs() <= absolute + relative * want.abs()
        };
        assert!(close, "element {i}: got {got:e}, expected {want:e}");
    }
}

/// The sequence's node at `pick` and its path from the root.
pub(crate) fn pick_path(tree: &DraftTree, pick: Index) -> Vec<usize> {
    tree.path(pick.index(tree.len()))
}

/// Text of an error.
#[track_caller]
pub(crate) fn refusal<T: std::fmt::Debug>(result: crate::Result<T>) -> String {
    result.unwrap_err().to_string()
}
