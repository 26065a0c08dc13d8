//! The baseline against room 1: its oracle within the bound, its walk bit for bit.

use proptest::prelude::*;

use super::{SerialInput, SerialOutput, cpu};
use crate::tree::SplitMix64;
use crate::tree::tests::arb_tree;
use crate::tree_gdn::oracle::{self, OracleInput};
use crate::tree_gdn::{self, Tape, Variant, VerifyInput, VerifyOutput};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

const DIMS: GdnDims = GdnDims { k_heads: 2, v_heads: 4, dk: 20, dv: 19 };

struct Case {
    batch: TreeBatch,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    fn new(trees: Vec<DraftTree>, slots: Vec<i32>, seed: u64) -> Self {
        let batch = TreeBatch::new(trees, slots).expect("distinct slots");
        let mut random = SplitMix64::new(seed);
        let mut draw = |count: usize, low: f64, high: f64| -> Vec<f32> {
            (0..count).map(|_| (low + (high - low) * random.unit()) as f32).collect()
        };
        let n = batch.rows();
        let qkv = draw(n * DIMS.qkv_width(), -1.0, 1.0);
        let mut gates = Vec::new();
        for _ in 0..n {
            gates.extend(draw(DIMS.v_heads, 0.01f64.ln(), 0.0));
            gates.extend(draw(DIMS.v_heads, 0.0, 1.0));
        }
        let state = draw(batch.sequences() * DIMS.state_len(), -0.5, 0.5);
        Self { batch, qkv, gates, state }
    }

    fn single(tree: DraftTree, seed: u64) -> Self {
        Self::new(vec![tree], vec![0], seed)
    }

    /// `(o, snapshots)`, out of buffers full of NaN.
    fn verify(&self) -> (Vec<f32>, Vec<f32>) {
        let n = self.batch.rows();
        let (mut o, mut snapshots) =
            (vec![f32::NAN; n * DIMS.v_heads * DIMS.dv], vec![f32::NAN; n * DIMS.state_len()]);
        let input = SerialInput { qkv: &self.qkv, gates: &self.gates, state: &self.state };
        let output = SerialOutput { o: &mut o, snapshots: &mut snapshots };
        cpu::verify(DIMS, &self.batch, input, output).expect("sizes fit");
        (o, snapshots)
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn max_abs(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_node_is_near_the_oracle(tree in arb_tree(1..=48), seed in any::<u64>()) {
        let case = Case::single(tree.clone(), seed);
        let (o, snapshots) = case.verify();
        let [qkv, gates, state] = [&case.qkv, &case.gates, &case.state].map(|x| widen(x));
        let input = OracleInput { qkv: &qkv, gates: &gates, state: &state };
        prop_assert!(max_abs(&o, &oracle::verify(DIMS, &tree, input).o) < 1e-5);
        for node in 0..tree.len() {
            let snapshot = &snapshots[node * DIMS.state_len()..][..DIMS.state_len()];
            prop_assert!(max_abs(snapshot, &oracle::commit(DIMS, &tree, node, input)) < 1e-5, "node {}", node);
        }
    }

    #[test]
    fn serial_has_the_bits_of_walk(tree in arb_tree(1..=48), seed in any::<u64>()) {
        let case = Case::single(tree.clone(), seed);
        let (o, snapshots) = case.verify();
        let mut walk = [vec![0.0; o.len()], vec![0.0; o.len()], vec![0.0; tree.len() * DIMS.v_heads]];
        let [walk_o, u, g_cum] = &mut walk;
        let input = VerifyInput { qkv: &case.qkv, gates: &case.gates, state: &case.state };
        let output = VerifyOutput { o: walk_o, u, g_cum };
        tree_gdn::cpu::verify(DIMS, &case.batch, Variant::Walk, input, output).unwrap();
        prop_assert!(bits(&o) == bits(walk_o));
        for node in tree.leaves() {
            let paths = AcceptedPaths::new(&case.batch, &[tree.path(node)]).unwrap();
            let (mut serial, mut walked) = (case.state.clone(), case.state.clone());
            let tape = Tape { qkv: &case.qkv, gates: &case.gates, u, g_cum };
            tree_gdn::cpu::commit(DIMS, &paths, Variant::Walk, tape, &mut walked).unwrap();
            cpu::commit(DIMS, &paths, &snapshots, &mut serial).unwrap();
            prop_assert!(bits(&serial) == bits(&walked), "state of node {}", node);
        }
    }
}

#[test]
fn nan_stays_in_its_branch() {
    let tree = DraftTree::bole(30, 1).unwrap();
    let clean = Case::single(tree.clone(), 5);
    let width = DIMS.v_heads * DIMS.dv;
    let (o, _) = clean.verify();
    for victim in 0..tree.len() {
        let mut case = Case::single(tree.clone(), 5);
        case.qkv[victim * DIMS.qkv_width()..][..DIMS.qkv_width()].fill(f32::NAN);
        let (poisoned, _) = case.verify();
        for node in 0..tree.len() {
            let (a, b) = (&o[node * width..][..width], &poisoned[node * width..][..width]);
            if tree.path(node).contains(&victim) {
                assert!(b.iter().all(|x| x.is_nan()), "node {node} below {victim}");
            } else {
                assert_eq!(bits(a), bits(b), "node {node} beside {victim}");
            }
        }
    }
}

#[test]
fn padding_is_inert() {
    let trees: Vec<DraftTree> = [4, 6, 3].map(|n| DraftTree::random(n, 2).unwrap()).into();
    let full = Case::new(trees.clone(), vec![2, 0, 1], 6);
    let mut padded = Case::new(trees, vec![2, -1, 1], 6);
    padded.qkv[4 * DIMS.qkv_width()..10 * DIMS.qkv_width()].fill(f32::NAN);
    let (a, b) = (full.verify(), padded.verify());
    for (a, b, width) in [(&a.0, &b.0, DIMS.v_heads * DIMS.dv), (&a.1, &b.1, DIMS.state_len())] {
        assert_eq!(bits(&a[..4 * width]), bits(&b[..4 * width]));
        assert_eq!(bits(&a[10 * width..]), bits(&b[10 * width..]));
        assert!(b[4 * width..10 * width].iter().all(|x| x.to_bits() == 0));
    }
}

#[test]
fn commit_copies_one_snapshot() {
    let trees: Vec<DraftTree> = [5, 7].map(|n| DraftTree::random(n, 2).unwrap()).into();
    let case = Case::new(trees.clone(), vec![1, 0], 7);
    let (_, snapshots) = case.verify();
    let paths = AcceptedPaths::new(&case.batch, &[trees[0].path(3), vec![]]).unwrap();
    let mut state = case.state.clone();
    cpu::commit(DIMS, &paths, &snapshots, &mut state).unwrap();
    let len = DIMS.state_len();
    assert_eq!(bits(&state[len..]), bits(&snapshots[3 * len..4 * len]));
    assert_eq!(bits(&state[..len]), bits(&case.state[..len]));
}

#[test]
fn every_argument_is_checked() {
    let case = Case::single(DraftTree::chain(2).unwrap(), 1);
    let (mut o, mut snapshots) = (vec![0.0; 2 * 76], vec![0.0; 2 * DIMS.state_len()]);
    let input = SerialInput { qkv: &case.qkv, gates: &case.gates, state: &case.state };
    let mut text = |input: SerialInput<'_>, o_len: usize, snapshots_len: usize| {
        let output = SerialOutput { o: &mut o[..o_len], snapshots: &mut snapshots[..snapshots_len] };
        cpu::verify(DIMS, &case.batch, input, output).unwrap_err().to_string()
    };
    let (all, len) = (2 * 76, 2 * DIMS.state_len());
    let cases = [
        (text(SerialInput { qkv: &[], ..input }, all, len), "qkv, expected: [2, 156], got: [0]"),
        (text(SerialInput { gates: &[0.0], ..input }, all, len), "gates, expected: [2, 2, 4], got: [1]"),
        (text(SerialInput { state: &[0.0], ..input }, all, len), "state, expected: [0, 4, 19, 20], got: [1]"),
        (
            text(SerialInput { state: &[], ..input }, all, len),
            "slots, expected: below the pool's 0 slots, got: 0",
        ),
        (text(input, 3, len), "o, expected: [2, 4, 19], got: [3]"),
        (text(input, all, 4), "snapshots, expected: [2, 4, 19, 20], got: [4]"),
    ];
    for (got, expected) in cases {
        assert_eq!(got, format!("tree_gdn_serial verify: {expected}"));
    }
    let paths = AcceptedPaths::new(&case.batch, &[vec![0]]).unwrap();
    let error = cpu::commit(DIMS, &paths, &[0.0], &mut case.state.clone()).unwrap_err().to_string();
    assert_eq!(error, "tree_gdn_serial commit: snapshots, expected: [2, 4, 19, 20], got: [1]");
}
