//! Properties of the CPU forward. The float64 oracle tests every key against the mask; the CPU forward never visits a
//! hidden key, which is held by planting non-finite numbers just outside the mask.

use proptest::prelude::*;
use proptest::sample::Index;

use super::cpu::{BlockMask, DraftBlocks, forward};
use super::oracle::{self, Block};
use crate::test_support::{assert_close, bits, refusal, values};
use crate::tree_attention::cpu::{AttentionInput, verify};
use crate::{AttnDims, DraftTree, TreeBatch};

/// Error per unit of the largest value, as in tree_attention.
const BOUND: f64 = 2e-6;
const SLOTS: usize = 4;

#[derive(Clone, Debug)]
struct Scene {
    dims: AttnDims,
    blocks: DraftBlocks,
    mask: BlockMask,
    capacity: usize,
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Scene {
    fn new(dims: AttnDims, blocks: DraftBlocks, mask: BlockMask, seed: u64) -> Self {
        let longest = blocks.context_lens.iter().copied().max().unwrap_or(0);
        let capacity = longest as usize + blocks.block_size + 2;
        let q = values(seed, blocks.slots.len() * blocks.block_size * dims.q_width(), 1.0);
        let pool = SLOTS * capacity * dims.kv_width();
        let (keys, values) = (values(seed + 1, pool, 1.0), values(seed + 2, pool, 1.0));
        Self { dims, blocks, mask, capacity, q, keys, values }
    }

    fn single(dims: AttnDims, block_size: usize, context: usize, mask: BlockMask, seed: u64) -> Self {
        let blocks = DraftBlocks { block_size, slots: vec![1], context_lens: vec![context as i32] };
        Self::new(dims, blocks, mask, seed)
    }

    fn input(&self) -> AttentionInput<'_> {
        let Self { q, keys, values, capacity, .. } = self;
        AttentionInput { q, k_cache: keys, v_cache: values, capacity: *capacity }
    }

    fn run(&self) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        forward(self.dims, &self.blocks, self.mask, self.input(), &mut out).unwrap();
        out
    }

    fn oracle(&self) -> Vec<f64> {
        let Self { keys, values, capacity, mask: BlockMask { window, causal }, .. } = self;
        let (window, causal) = (*window, *causal);
        let blocks: Vec<Block> = (self.blocks.slots.iter().zip(&self.blocks.context_lens))
            .map(|(&slot, &context)| Block { slot: slot.try_into().ok(), context: context as usize })
            .collect();
        let scene = oracle::Scene { keys, values, capacity: *capacity, window, causal };
        oracle::forward(self.dims, &blocks, self.blocks.block_size, &self.q, scene)
    }

    fn pool_row(&self, b: usize, row: usize) -> std::ops::Range<usize> {
        let width = self.dims.kv_width();
        let start = (self.blocks.slots[b] as usize * self.capacity + row) * width;
        start..start + width
    }

    fn heads(&self, row: usize) -> std::ops::Range<usize> {
        row * self.dims.q_width()..(row + 1) * self.dims.q_width()
    }

    fn sees(&self, position: usize, key: usize) -> bool {
        let near = self.mask.window.is_none_or(|window| key.abs_diff(position) < window);
        near && (!self.mask.causal || key <= position)
    }
}

fn arb_mask() -> impl Strategy<Value = BlockMask> {
    let window = prop_oneof![Just(None), (1usize..40).prop_map(Some), Just(Some(usize::MAX))];
    (window, any::<bool>()).prop_map(|(window, causal)| BlockMask { window, causal })
}

fn arb_scene() -> impl Strategy<Value = Scene> {
    let dims = (1usize..=2, 1usize..=4, prop_oneof![Just(4usize), Just(20), Just(128)])
        .prop_map(|(heads, group, dim)| AttnDims::new(heads * group, heads, dim).unwrap());
    let sequence = (proptest::bool::weighted(0.2), prop_oneof![Just(0), 1..40i32, 60..90i32]);
    let sequences = proptest::collection::vec(sequence, 1..=SLOTS);
    (dims, sequences, 1usize..=20, arb_mask(), any::<u32>()).prop_map(
        |(dims, sequences, block_size, mask, seed)| {
            let slots = sequences
                .iter()
                .enumerate()
                .map(|(b, (padding, _))| if *padding { -1 } else { b as i32 })
                .collect();
            let context_lens = sequences.iter().map(|(_, context)| *context).collect();
            Scene::new(dims, DraftBlocks { block_size, slots, context_lens }, mask, seed.into())
        },
    )
}

fn arb_single() -> impl Strategy<Value = Scene> {
    (1usize..=20, 0usize..60, arb_mask(), any::<u32>()).prop_map(|(block_size, context, mask, seed)| {
        Scene::single(AttnDims::new(4, 2, 20).unwrap(), block_size, context, mask, seed.into())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn forward_matches_the_oracle(scene in arb_scene()) {
        assert_close(&scene.run(), &scene.oracle(), BOUND, 0.0);
    }

    #[test]
    fn each_block_alone_has_the_same_bits(scene in arb_scene()) {
        let together = scene.run();
        let size = scene.blocks.block_size;
        for (b, &slot) in scene.blocks.slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let rows = scene.heads(b * size).start..scene.heads((b + 1) * size).start;
            let mut alone = scene.clone();
            let context_lens = vec![scene.blocks.context_lens[b]];
            alone.blocks = DraftBlocks { block_size: size, slots: vec![slot], context_lens };
            alone.q = scene.q[rows.clone()].to_vec();
            prop_assert_eq!(bits(&alone.run()), bits(&together[rows]));
        }
    }

    #[test]
    fn hidden_keys_never_reach_a_row(scene in arb_single(), row: Index, poison in prop_oneof![
        Just(f32::NAN),
        Just(f32::INFINITY),
        Just(f32::NEG_INFINITY),
    ]) {
        let (row, clean) = (row.index(scene.blocks.block_size), scene.run());
        let position = scene.blocks.context_lens[0] as usize + row;
        let mut dirty = scene.clone();
        for key in (0..scene.capacity).filter(|&key| {
            let in_pool = key < scene.blocks.context_lens[0] as usize + scene.blocks.block_size;
            !in_pool || !scene.sees(position, key)
        }) {
            dirty.keys[scene.pool_row(0, key)].fill(poison);
            dirty.values[scene.pool_row(0, key)].fill(poison);
        }
        prop_assert_eq!(bits(&dirty.run()[scene.heads(row)]), bits(&clean[scene.heads(row)]));
    }

    #[test]
    fn a_visible_nonfinite_number_does_what_float64_says(
        scene in arb_scene(),
        at: Index,
        poison in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
        place in 0..3,
    ) {
        let mut scene = scene;
        let pool = [&mut scene.q, &mut scene.keys, &mut scene.values].into_iter().nth(place as usize).unwrap();
        let at = at.index(pool.len());
        pool[at] = poison;
        assert_close(&scene.run(), &scene.oracle(), BOUND, 1e-5);
    }

    #[test]
    fn a_causal_block_equals_the_chain_of_tree_attention(scene in arb_single()) {
        let mut scene = scene;
        scene.mask = BlockMask { window: None, causal: true };
        let batch = TreeBatch::single(DraftTree::chain(scene.blocks.block_size).unwrap(), 1);
        let mut chain = scene.q.clone();
        verify(scene.dims, &batch, &scene.blocks.context_lens, scene.input(), &mut chain).unwrap();
        prop_assert_eq!(bits(&scene.run()), bits(&chain));
    }

    #[test]
    fn a_causal_block_may_start_anywhere(scene in arb_single(), split: Index) {
        let mut scene = scene;
        scene.mask.causal = true;
        let split = split.index(scene.blocks.block_size);
        let mut rest = scene.clone();
        rest.blocks.block_size -= split;
        rest.blocks.context_lens[0] += split as i32;
        rest.q.drain(..scene.heads(split).start);
        prop_assert_eq!(bits(&rest.run()), bits(&scene.run()[scene.heads(split).start..]));
    }
}

/// The window counts the row itself: distance `window - 1` is seen, distance `window` is not, on both sides.
#[test]
fn the_window_ends_where_it_says() {
    let dims = AttnDims::new(1, 1, 8).unwrap();
    for causal in [false, true] {
        for window in [1, 2, 3, 8, 9, 16, 17] {
            let scene = Scene::single(dims, 16, 20, BlockMask { window: Some(window), causal }, 1);
            let clean = scene.run();
            for key in 0..36 {
                let mut dirty = scene.clone();
                let row = scene.pool_row(0, key);
                dirty.values[row].fill(1000.0);
                let out = dirty.run();
                for row in 0..16 {
                    let changed = bits(&out[scene.heads(row)]) != bits(&clean[scene.heads(row)]);
                    let distance = key as i64 - (20 + row) as i64;
                    let seen = distance.unsigned_abs() < window as u64 && !(causal && distance > 0);
                    assert_eq!(changed, seen, "causal {causal}, window {window}, key {key}, row {row}");
                }
            }
        }
    }
}

#[test]
fn a_window_over_everything_is_no_window() {
    let dims = AttnDims::new(4, 2, 128).unwrap();
    for causal in [false, true] {
        let scene = Scene::single(dims, 16, 500, BlockMask { window: None, causal }, 2);
        assert_close(&scene.run(), &scene.oracle(), BOUND, 0.0);
        for window in [516, 4096, usize::MAX] {
            let mut wide = scene.clone();
            wide.mask.window = Some(window);
            assert_eq!(bits(&wide.run()), bits(&scene.run()));
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let dims = AttnDims::new(4, 2, 128).unwrap();
    let scene = Scene::single(dims, 16, 900, BlockMask { window: Some(300), causal: false }, 3);
    let want = bits(&scene.run());
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| bits(&scene.run())), want, "{threads} threads");
    }
}

#[test]
fn padding_is_zero_and_reads_nothing() {
    let dims = AttnDims::new(2, 1, 16).unwrap();
    let blocks = DraftBlocks { block_size: 3, slots: vec![-1, 2], context_lens: vec![5, 4] };
    let mut scene = Scene::new(dims, blocks, BlockMask { window: None, causal: false }, 4);
    let (clean, rows) = (scene.run(), 0..scene.heads(3).start);
    scene.q[rows.clone()].fill(f32::NAN);
    scene.blocks.context_lens[0] = -3;
    let out = scene.run();
    assert!(out[rows].iter().all(|value| value.to_bits() == 0));
    assert_eq!(bits(&out), bits(&clean));
}

#[test]
fn refusals_name_the_argument() {
    let dims = AttnDims::new(4, 2, 8).unwrap();
    let scene = Scene::single(dims, 3, 4, BlockMask { window: None, causal: false }, 0);
    let refuse = |change: &dyn Fn(&mut Scene)| {
        let mut scene = scene.clone();
        change(&mut scene);
        let mut out = vec![0.0; 3 * 32];
        refusal(forward(scene.dims, &scene.blocks, scene.mask, scene.input(), &mut out))
    };
    let op = "block_attention: ";
    assert_eq!(refuse(&|s| s.blocks.block_size = 0), format!("{op}block_size, expected: at least 1, got: 0"));
    assert_eq!(refuse(&|s| s.mask.window = Some(0)), format!("{op}window, expected: at least 1, got: 0"));
    assert_eq!(
        refuse(&|s| s.blocks.context_lens.clear()),
        format!("{op}context_lens, expected: [1], got: [0]")
    );
    assert_eq!(refuse(&|s| s.q.truncate(7)), format!("{op}q, expected: [3, 4, 8], got: [7]"));
    assert_eq!(refuse(&|s| s.blocks.block_size = 2), format!("{op}q, expected: [2, 4, 8], got: [96]"));
    assert_eq!(
        refuse(&|s| s.keys.truncate(1)),
        format!("{op}k_cache, expected: whole slots of 144 elements, got: 1 elements")
    );
    assert_eq!(
        refuse(&|s| s.values.truncate(144)),
        format!("{op}v_cache, expected: [4, 9, 2, 8], got: [144]")
    );
    assert_eq!(
        refuse(&|s| s.blocks.slots = vec![4]),
        format!("{op}slots, expected: below the pool's 4 slots, got: 4")
    );
    for context in [7, -1] {
        assert_eq!(
            refuse(&|s| s.blocks.context_lens[0] = context),
            format!("{op}context_lens, expected: 0 to capacity 9 - block_size 3, got: {context}")
        );
    }
    assert!(refuse(&|s| s.blocks.block_size = usize::MAX).starts_with(&format!("{op}q, ")));
    assert!(refuse(&|s| s.blocks.slots = vec![-2]).starts_with(&format!("{op}slots, ")));
    assert!(
        refuse(&|s| {
            s.blocks.slots = vec![1, 1];
            s.blocks.context_lens = vec![4, 4];
        })
        .starts_with(&format!("{op}q, "))
    );
}
