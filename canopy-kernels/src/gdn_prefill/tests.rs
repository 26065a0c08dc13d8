//! Chains against the float64 oracle within the bound, and against room 1's walk bit for bit. Values are drawn from a seed.

use proptest::prelude::*;

use super::oracle::{self, OracleInput};
use super::{PrefillInput, Sequences, cpu};
use crate::test_support::{assert_close, bits, refusal, values};
use crate::tree::SplitMix64;
use crate::tree_gdn::{self, Tape, Variant, VerifyInput, VerifyOutput};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

const DIMS: GdnDims = GdnDims { k_heads: 2, v_heads: 4, dk: 20, dv: 23 };

struct Case {
    sequences: Sequences,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    fn new(lens: &[usize], slots: Vec<i32>, pool: usize, seed: u64) -> Self {
        let sequences = Sequences::new(lens, slots).expect("good lengths and slots");
        let mut random = SplitMix64::new(seed);
        let mut gates = Vec::new();
        for _ in 0..sequences.rows() {
            gates.extend((0..DIMS.v_heads).map(|_| (0.01f64.ln() * random.unit()) as f32));
            gates.extend((0..DIMS.v_heads).map(|_| random.unit() as f32));
        }
        let qkv = values(seed + 1, sequences.rows() * DIMS.qkv_width(), 1.0);
        Self { sequences, qkv, gates, state: values(seed + 2, pool * DIMS.state_len(), 0.3) }
    }

    fn single(len: usize, seed: u64) -> Self {
        Self::new(&[len], vec![0], 1, seed)
    }

    /// `(o, state)`; o out of a buffer full of NaN.
    fn run(&self) -> (Vec<f32>, Vec<f32>) {
        let mut o = vec![f32::NAN; self.sequences.rows() * DIMS.v_heads * DIMS.dv];
        let mut state = self.state.clone();
        let input = PrefillInput { qkv: &self.qkv, gates: &self.gates };
        cpu::forward(DIMS, &self.sequences, input, &mut state, &mut o).expect("sizes fit");
        (o, state)
    }

    /// Some rows of the one sequence, on a state.
    fn rows(&self, rows: std::ops::Range<usize>, state: Vec<f32>) -> Self {
        let cut = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        Self {
            sequences: Sequences::new(&[rows.len()], vec![0]).unwrap(),
            qkv: cut(&self.qkv, DIMS.qkv_width()),
            gates: cut(&self.gates, 2 * DIMS.v_heads),
            state,
        }
    }

    fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let [qkv, gates, state] = [&self.qkv, &self.gates, &self.state]
            .map(|x| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        oracle::forward(DIMS, self.sequences.rows(), OracleInput { qkv: &qkv, gates: &gates, state: &state })
    }
}

fn check(case: &Case) {
    let ((o, state), (true_o, true_state)) = (case.run(), case.oracle());
    assert_close(&o, &true_o, 1e-5, 1e-5);
    assert_close(&state, &true_state, 1e-5, 1e-5);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn rows_and_states_are_near_the_oracle(len in 1..300usize, seed in any::<u32>()) {
        check(&Case::single(len, u64::from(seed)));
    }

    #[test]
    fn the_bits_of_walk_and_commit(len in 1..=256usize, seed in any::<u32>()) {
        let case = Case::single(len, u64::from(seed));
        let (o, state) = case.run();
        let batch = TreeBatch::single(DraftTree::chain(len).unwrap(), 0);
        let (mut walk_o, mut u) = (vec![0.0; o.len()], vec![0.0; o.len()]);
        let mut g_cum = vec![0.0; len * DIMS.v_heads];
        let input = VerifyInput { qkv: &case.qkv, gates: &case.gates, state: &case.state };
        let output = VerifyOutput { o: &mut walk_o, u: &mut u, g_cum: &mut g_cum };
        tree_gdn::cpu::verify(DIMS, &batch, Variant::Walk, input, output).unwrap();
        let mut walked = case.state.clone();
        let paths = AcceptedPaths::new(&batch, &[(0..len).collect()]).unwrap();
        let tape = Tape { qkv: &case.qkv, gates: &case.gates, u: &u, g_cum: &g_cum };
        tree_gdn::cpu::commit(DIMS, &paths, Variant::Walk, tape, &mut walked).unwrap();
        prop_assert!(bits(&o) == bits(&walk_o));
        prop_assert!(bits(&state) == bits(&walked));
    }

    #[test]
    fn a_cut_prompt_has_the_same_bits(len in 2..200usize, cut in any::<prop::sample::Index>(), seed in any::<u32>()) {
        let case = Case::single(len, u64::from(seed));
        let at = 1 + cut.index(len - 1);
        let (o, state) = case.run();
        let (head, between) = case.rows(0..at, case.state.clone()).run();
        let (tail, end) = case.rows(at..len, between).run();
        prop_assert!(bits(&o) == bits(&[head, tail].concat()));
        prop_assert!(bits(&state) == bits(&end));
    }
}

#[test]
fn the_oracle_is_room_ones() {
    let case = Case::single(40, 3);
    let tree = DraftTree::chain(40).unwrap();
    let [qkv, gates, state] =
        [&case.qkv, &case.gates, &case.state].map(|x| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    let input = tree_gdn::oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
    let (o, end) = case.oracle();
    let near =
        |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
    assert!(near(&o, &tree_gdn::oracle::verify(DIMS, &tree, input).o));
    assert!(near(&end, &tree_gdn::oracle::commit(DIMS, &tree, 39, input)));
}

#[test]
fn nearly_equal_keys_and_vanishing_decays() {
    let mut case = Case::single(130, 5);
    let key = DIMS.k_heads * DIMS.dk;
    let base = case.qkv[key..2 * key].to_vec();
    for (row, gates) in case.qkv.chunks_mut(DIMS.qkv_width()).zip(case.gates.chunks_mut(2 * DIMS.v_heads)) {
        for (k, base) in row[key..2 * key].iter_mut().zip(&base) {
            *k = base + 0.01 * *k;
        }
        gates[..DIMS.v_heads].fill(0.0);
        gates[DIMS.v_heads..].fill(1.0);
    }
    check(&case);
    for (t, gates) in case.gates.chunks_mut(2 * DIMS.v_heads).enumerate() {
        gates[..DIMS.v_heads].fill(if t % 3 == 0 { f32::NEG_INFINITY } else { -40.0 });
    }
    check(&case);
}

#[test]
fn a_nan_reaches_later_rows_only() {
    let clean = Case::single(150, 6);
    let (before, width) = (clean.run().0, DIMS.v_heads * DIMS.dv);
    for victim in [0, 63, 64, 100] {
        let mut case = Case::single(150, 6);
        case.qkv[victim * DIMS.qkv_width()..][..DIMS.qkv_width()].fill(f32::NAN);
        let (after, _) = case.run();
        assert_eq!(bits(&before[..victim * width]), bits(&after[..victim * width]));
        assert!(after[victim * width..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn a_batch_equals_each_sequence_alone() {
    let case = Case::new(&[70, 1, 130], vec![3, 0, 1], 5, 8);
    let (o, state) = case.run();
    let (width, len) = (DIMS.v_heads * DIMS.dv, DIMS.state_len());
    for (first, rows, slot) in case.sequences.iter() {
        let slot = slot.unwrap();
        let alone = case.rows(first..first + rows, case.state[slot * len..(slot + 1) * len].to_vec());
        let (own_o, own_state) = alone.run();
        assert_eq!(bits(&own_o), bits(&o[first * width..(first + rows) * width]));
        assert_eq!(bits(&own_state), bits(&state[slot * len..(slot + 1) * len]));
    }
}

#[test]
fn padding_is_inert() {
    let case = Case::new(&[9, 30], vec![-1, 2], 4, 9);
    let (o, state) = case.run();
    assert!(o[..9 * DIMS.v_heads * DIMS.dv].iter().all(|&x| x == 0.0));
    let len = DIMS.state_len();
    for slot in [0, 1, 3] {
        let rows = slot * len..(slot + 1) * len;
        assert_eq!(bits(&state[rows.clone()]), bits(&case.state[rows]));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let case = Case::single(5, 1);
    let input = PrefillInput { qkv: &case.qkv, gates: &case.gates };
    let (mut state, mut o) = (case.state.clone(), vec![0.0; 5 * DIMS.v_heads * DIMS.dv]);
    let run = |sequences: &Sequences, state: &mut [f32], o: &mut [f32]| {
        refusal(cpu::forward(DIMS, sequences, input, state, o))
    };
    assert!(run(&case.sequences, &mut state, &mut o[1..]).contains("gdn_prefill: o"));
    assert!(run(&case.sequences, &mut state[1..], &mut o).contains("state"));
    let four = Sequences::new(&[4], vec![0]).unwrap();
    assert!(run(&four, &mut state, &mut o).contains("qkv"));
    let far = Sequences::new(&[5], vec![1]).unwrap();
    assert!(run(&far, &mut state, &mut o).contains("slots"));
    assert!(refusal(Sequences::new(&[3, 4], vec![0])).contains("slots"));
    assert!(refusal(Sequences::new(&[3, 4], vec![0, 0])).contains("slot 0 twice"));
    assert!(refusal(Sequences::new(&[0], vec![0])).contains("rows"));
    assert!(refusal(Sequences::new(&[Sequences::MAX_ROWS + 1], vec![0])).contains("65536"));
}
