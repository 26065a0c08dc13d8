//! Properties of the CPU forward. Values are held against the float64 oracle; everything that says which rows may
//! influence which is held bit by bit: the same row is computed in another company and must not notice.

use proptest::prelude::*;

use super::cpu::{AttentionInput, verify};
use super::oracle::{self, Cache};
use crate::test_support::{arb_batch, arb_tree, assert_close, bits, values};
use crate::{AttnDims, DraftTree, TreeBatch};

/// Error per unit of the largest value: scores carry the rounding of a 256-wide dot product into the exponent.
const BOUND: f64 = 2e-6;
const SLOTS: usize = 5;

/// One call's inputs.
#[derive(Clone, Debug)]
struct Scene {
    dims: AttnDims,
    batch: TreeBatch,
    prefix_lens: Vec<i32>,
    capacity: usize,
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Scene {
    fn new(dims: AttnDims, batch: TreeBatch, prefix_lens: Vec<i32>, seed: u64) -> Self {
        let needs =
            batch.trees().iter().zip(&prefix_lens).map(|(tree, prefix)| tree.len() + *prefix as usize);
        let capacity = needs.max().unwrap() + 3;
        let pool = SLOTS * capacity * dims.kv_width();
        let q = values(seed, batch.rows() * dims.q_width(), 1.0);
        let (keys, values) = (values(seed + 1, pool, 1.0), values(seed + 2, pool, 1.0));
        Self { dims, batch, prefix_lens, capacity, q, keys, values }
    }

    fn single(dims: AttnDims, tree: DraftTree, prefix: usize, seed: u64) -> Self {
        Self::new(dims, TreeBatch::single(tree, 2), vec![prefix as i32], seed)
    }

    fn run(&self) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        let Self { q, keys, values, capacity, .. } = self;
        let input = AttentionInput { q, k_cache: keys, v_cache: values, capacity: *capacity };
        verify(self.dims, &self.batch, &self.prefix_lens, input, &mut out).unwrap();
        out
    }

    fn oracle(&self) -> Vec<f64> {
        let cache = Cache { keys: &self.keys, values: &self.values, capacity: self.capacity };
        oracle::verify(self.dims, &self.batch, &self.prefix_lens, &self.q, cache)
    }

    /// The key (and value) row of sequence `b` at pool row `row`, as a range of the pools.
    fn pool_row(&self, b: usize, row: usize) -> std::ops::Range<usize> {
        let slot = self.batch.slots()[b] as usize;
        let width = self.dims.kv_width();
        let start = (slot * self.capacity + row) * width;
        start..start + width
    }

    /// Row `row`'s heads in an output or in the queries.
    fn heads(&self, row: usize) -> std::ops::Range<usize> {
        row * self.dims.q_width()..(row + 1) * self.dims.q_width()
    }

    /// What `node` of sequence 0 sees, laid out as one chain after `committed` rows: the node is its last row.
    fn path_as_chain(&self, node: usize, committed: usize) -> Self {
        let prefix = self.prefix_lens[0] as usize;
        let mut seen: Vec<usize> = (0..prefix).collect();
        seen.extend(self.batch.trees()[0].path(node).iter().map(|node| prefix + node));
        let chain = DraftTree::chain(seen.len() - committed).unwrap();
        let mut alone = Self::single(self.dims, chain, committed, 99);
        for (to, from) in seen.iter().enumerate() {
            let (to, from) = (alone.pool_row(0, to), self.pool_row(0, *from));
            alone.keys[to.clone()].copy_from_slice(&self.keys[from.clone()]);
            alone.values[to].copy_from_slice(&self.values[from]);
        }
        let last = alone.heads(seen.len() - committed - 1);
        alone.q[last].copy_from_slice(&self.q[self.heads(node)]);
        alone
    }
}

fn arb_dims() -> impl Strategy<Value = AttnDims> {
    let dims = |(heads, group, dim)| AttnDims::new(heads * group, heads, dim).unwrap();
    (
        1usize..=2,
        prop_oneof![Just(1), Just(2), Just(3), Just(4), Just(7)],
        prop_oneof![Just(4usize), Just(20), Just(64), Just(72), Just(256)],
    )
        .prop_map(dims)
}

fn arb_scene() -> impl Strategy<Value = Scene> {
    let lens = proptest::collection::vec(prop_oneof![Just(0), 1..9i32, 30..70i32], 4);
    (arb_dims(), arb_batch(24, SLOTS), lens, any::<u32>()).prop_map(|(dims, batch, mut lens, seed)| {
        lens.truncate(batch.sequences());
        Scene::new(dims, batch, lens, seed.into())
    })
}

fn arb_single() -> impl Strategy<Value = Scene> {
    (arb_dims(), arb_tree(1..=40), 0usize..40, any::<u32>())
        .prop_map(|(dims, tree, prefix, seed)| Scene::single(dims, tree, prefix, seed.into()))
}

/// The embedded model's heads.
fn embedded() -> AttnDims {
    AttnDims::new(4, 2, 256).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn forward_matches_the_oracle(scene in arb_scene()) {
        assert_close(&scene.run(), &scene.oracle(), BOUND, 0.0);
    }

    #[test]
    fn any_split_into_committed_and_drafted_has_the_same_bits(scene in arb_single(), node: prop::sample::Index) {
        let node = node.index(scene.batch.rows());
        let want = bits(&scene.run()[scene.heads(node)]);
        let seen = scene.prefix_lens[0] as usize + scene.batch.trees()[0].path(node).len();
        for committed in 0..seen {
            let alone = scene.path_as_chain(node, committed);
            let last = alone.heads(seen - committed - 1);
            prop_assert_eq!(&bits(&alone.run()[last]), &want, "{} committed of {}", committed, seen);
        }
    }

    #[test]
    fn each_tree_alone_has_the_same_bits(scene in arb_scene()) {
        let together = scene.run();
        for (b, (first, tree, slot)) in scene.batch.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let rows = scene.heads(first).start..scene.heads(first + tree.len() - 1).end;
            let mut alone = scene.clone();
            alone.batch = TreeBatch::single(tree.clone(), slot);
            alone.prefix_lens = vec![scene.prefix_lens[b]];
            alone.q = scene.q[rows.clone()].to_vec();
            prop_assert_eq!(bits(&alone.run()), bits(&together[rows]));
        }
    }

    #[test]
    fn a_prefix_of_the_tree_gives_the_same_rows(scene in arb_single(), nodes: prop::sample::Index) {
        let parents = scene.batch.trees()[0].parents();
        let nodes = 1 + nodes.index(parents.len());
        let mut cut = scene.clone();
        cut.batch = TreeBatch::single(DraftTree::new(parents[..nodes].to_vec()).unwrap(), 2);
        cut.q.truncate(scene.heads(nodes).start);
        prop_assert_eq!(bits(&cut.run()), bits(&scene.run()[..cut.q.len()]));
    }

    #[test]
    fn what_a_row_cannot_see_never_reaches_it(
        scene in arb_single(),
        node: prop::sample::Index,
        poison in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(3e38)],
        in_values: bool,
    ) {
        let tree = &scene.batch.trees()[0];
        let (node, clean) = (node.index(tree.len()), scene.run());
        let mut dirty = scene.clone();
        let pool = if in_values { &mut dirty.values } else { &mut dirty.keys };
        let seen = scene.prefix_lens[0] as usize;
        let hurt = scene.pool_row(0, seen + node);
        let all = 0..scene.capacity;
        pool[hurt].fill(poison);
        // Every pool row behind the tree, and every other slot.
        let behind = scene.pool_row(0, seen + tree.len()).start..scene.pool_row(0, all.end - 1).end;
        let mine = scene.pool_row(0, 0).start;
        for (i, value) in pool.iter_mut().enumerate() {
            if i < mine || i >= behind.start {
                *value = poison;
            }
        }
        let out = dirty.run();
        for row in (0..tree.len()).filter(|&row| !tree.path(row).contains(&node)) {
            prop_assert_eq!(bits(&out[scene.heads(row)]), bits(&clean[scene.heads(row)]));
        }
    }

    #[test]
    fn a_visible_nonfinite_number_does_what_float64_says(
        scene in arb_scene(),
        at: prop::sample::Index,
        poison in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(-3e38), Just(3e38)],
        place in 0..3,
    ) {
        let mut scene = scene;
        let pool = [&mut scene.q, &mut scene.keys, &mut scene.values].into_iter().nth(place as usize).unwrap();
        let at = at.index(pool.len());
        pool[at] = poison;
        assert_close(&scene.run(), &scene.oracle(), BOUND, 1e-5);
    }
}

/// A weight below f32 but not below float64 times infinity is infinite; one below float64 too gives NaN.
#[test]
fn a_vanishing_weight_times_infinity_is_float64s() {
    let dims = AttnDims::new(1, 1, 4).unwrap();
    for (score, want) in
        [(-20.0f32, f32::INFINITY), (-150.0, f32::INFINITY), (-700.0, f32::INFINITY), (-800.0, f32::NAN)]
    {
        let mut scene = Scene::single(dims, DraftTree::chain(1).unwrap(), 1, 0);
        scene.q = vec![2.0, 0.0, 0.0, 0.0];
        let (far, near) = (scene.pool_row(0, 0), scene.pool_row(0, 1));
        scene.keys[far.clone()].copy_from_slice(&[score, 0.0, 0.0, 0.0]);
        scene.keys[near.clone()].fill(0.0);
        scene.values[far].copy_from_slice(&[f32::INFINITY, 1.0, 2.0, 3.0]);
        scene.values[near].copy_from_slice(&[4.0, 5.0, 6.0, 7.0]);
        let out = scene.run();
        assert_eq!(bits(&out[..1]), bits(&[want]), "score {score}");
        assert_close(&out, &scene.oracle(), BOUND, 1e-6);
    }
}

#[test]
fn plain_decoding_equals_verifying_the_chain() {
    for prefix in [0, 1, 7, 8, 100] {
        let chain = Scene::single(embedded(), DraftTree::chain(40).unwrap(), prefix, 5);
        let together = chain.run();
        for node in 0..40 {
            let mut single = chain.clone();
            single.batch = TreeBatch::single(DraftTree::chain(1).unwrap(), 2);
            single.prefix_lens = vec![(prefix + node) as i32];
            single.q = chain.q[chain.heads(node)].to_vec();
            assert_eq!(
                bits(&single.run()),
                bits(&together[chain.heads(node)]),
                "prefix {prefix}, node {node}"
            );
        }
    }
}

/// known-failures 14.
#[test]
fn a_batch_of_7_21_1_and_64_nodes_equals_each_tree_alone() {
    let trees: Vec<_> = [7, 21, 1, 64].map(|nodes| DraftTree::random(nodes, nodes as u64).unwrap()).into();
    let scene =
        Scene::new(embedded(), TreeBatch::new(trees, vec![3, 0, 4, 1]).unwrap(), vec![9, 300, 0, 65], 7);
    let together = scene.run();
    assert_close(&together, &scene.oracle(), BOUND, 0.0);
    for (b, (first, tree, slot)) in scene.batch.iter().enumerate() {
        let rows = scene.heads(first).start..scene.heads(first + tree.len() - 1).end;
        let mut alone = scene.clone();
        alone.batch = TreeBatch::single(tree.clone(), slot.unwrap());
        alone.prefix_lens = vec![scene.prefix_lens[b]];
        alone.q = scene.q[rows.clone()].to_vec();
        assert_eq!(bits(&alone.run()), bits(&together[rows]), "tree {b}");
    }
}

/// known-failures 13: runs of nodes of one branch, so that whole tiles under the diagonal belong to the other.
#[test]
fn interleaved_branches_equal_the_softmax_over_the_path() {
    for run in [1, 16, 32, 64] {
        let mut parents = vec![-1i32];
        let mut tips = [0i32; 2];
        while parents.len() + run <= 193 {
            let branch = (parents.len() - 1) / run % 2;
            for _ in 0..run {
                parents.push(tips[branch]);
                tips[branch] = parents.len() as i32 - 1;
            }
        }
        let scene = Scene::single(embedded(), DraftTree::new(parents).unwrap(), 21, run as u64);
        assert_close(&scene.run(), &scene.oracle(), BOUND, 0.0);
    }
}

#[test]
fn every_tile_edge_matches_the_oracle() {
    for nodes in [1, 2, 3, 4, 5, 12, 13, 31, 32, 33, 64, 65, 128, 256] {
        for prefix in [0, 1, 15, 16, 17] {
            let tree = DraftTree::random(nodes, nodes as u64).unwrap();
            let scene = Scene::single(embedded(), tree, prefix, prefix as u64);
            assert_close(&scene.run(), &scene.oracle(), BOUND, 0.0);
        }
    }
}

#[test]
fn reordering_siblings_permutes_the_rows() {
    let scene = Scene::single(embedded(), DraftTree::new(vec![-1, 0, 0, 1, 2, 1]).unwrap(), 33, 11);
    let order = [0, 2, 1, 4, 5, 3];
    let mut turned = scene.clone();
    turned.batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0, 1, 2, 2]).unwrap(), 2);
    for (to, from) in order.into_iter().enumerate() {
        let (at, old) = (scene.pool_row(0, 33 + to), scene.pool_row(0, 33 + from));
        turned.keys[at.clone()].copy_from_slice(&scene.keys[old.clone()]);
        turned.values[at].copy_from_slice(&scene.values[old]);
        turned.q[scene.heads(to)].copy_from_slice(&scene.q[scene.heads(from)]);
    }
    let (out, turned) = (scene.run(), turned.run());
    for (to, from) in order.into_iter().enumerate() {
        assert_eq!(bits(&turned[scene.heads(to)]), bits(&out[scene.heads(from)]));
    }
}

#[test]
fn threads_do_not_change_bits() {
    let scene = Scene::single(embedded(), DraftTree::random(65, 1).unwrap(), 700, 3);
    let want = bits(&scene.run());
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| bits(&scene.run())), want, "{threads} threads");
    }
}

#[test]
fn padding_is_zero_and_reads_nothing() {
    let trees = vec![DraftTree::chain(3).unwrap(), DraftTree::random(9, 4).unwrap()];
    let mut scene = Scene::new(embedded(), TreeBatch::new(trees, vec![-1, 1]).unwrap(), vec![4, 6], 8);
    let rows = scene.heads(0).start..scene.heads(2).end;
    let clean = scene.run();
    scene.q[rows.clone()].fill(f32::NAN);
    scene.prefix_lens[0] = -7;
    let out = scene.run();
    assert!(out[rows].iter().all(|value| value.to_bits() == 0));
    assert_eq!(bits(&out), bits(&clean));
}

#[test]
fn refusals_name_the_argument() {
    let scene = Scene::single(AttnDims::new(4, 2, 8).unwrap(), DraftTree::chain(3).unwrap(), 4, 0);
    let refuse = |change: &dyn Fn(&mut Scene), out: usize| {
        let mut scene = scene.clone();
        change(&mut scene);
        let Scene { q, keys, values, capacity, .. } = &scene;
        let input = AttentionInput { q, k_cache: keys, v_cache: values, capacity: *capacity };
        verify(scene.dims, &scene.batch, &scene.prefix_lens, input, &mut vec![0.0; out])
            .unwrap_err()
            .to_string()
    };
    let op = "tree_attention verify: ";
    assert_eq!(refuse(&|s| s.q.truncate(95), 96), format!("{op}q, expected: [3, 4, 8], got: [95]"));
    assert_eq!(refuse(&|_| (), 97), format!("{op}out, expected: [3, 4, 8], got: [97]"));
    assert_eq!(
        refuse(&|s| s.keys.truncate(1), 96),
        format!("{op}k_cache, expected: whole slots of 160 elements, got: 1 elements")
    );
    assert_eq!(
        refuse(&|s| s.values.truncate(160), 96),
        format!("{op}v_cache, expected: [5, 10, 2, 8], got: [160]")
    );
    assert_eq!(
        refuse(&|s| s.prefix_lens[0] = 8, 96),
        format!("{op}prefix_lens, expected: 0 to capacity 10 - 3 nodes, got: 8")
    );
    assert_eq!(
        refuse(&|s| s.prefix_lens[0] = -1, 96),
        format!("{op}prefix_lens, expected: 0 to capacity 10 - 3 nodes, got: -1")
    );
    assert_eq!(refuse(&|s| s.prefix_lens.push(0), 96), format!("{op}prefix_lens, expected: [1], got: [2]"));
    assert_eq!(refuse(&|s| s.capacity = 0, 96), format!("{op}capacity, expected: at least 1, got: 0"));
    assert_eq!(
        refuse(&|s| s.batch = TreeBatch::single(DraftTree::chain(3).unwrap(), 5), 96),
        format!("{op}slots, expected: below the pool's 5 slots, got: 5")
    );
}
