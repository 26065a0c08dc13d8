//! The policy on simulated machines: seconds from a formula, acceptance from a seeded generator.

use super::*;
use crate::tree::{BuildOptions, Marginals, ddtree_from};

const VOCAB: usize = 8;
const BLOCK: usize = 16;

/// A machine: seconds of a pass and of a draft, and how often the drafter's best token is right.
#[derive(Clone, Copy)]
struct Machine {
    per_row: f64,
    draft: f64,
    right: f64,
}

impl Machine {
    fn verify(&self, rows: usize) -> f64 {
        1.0 + self.per_row * (rows - 1) as f64
    }

    fn tuner(&self) -> Tuner {
        let points: Vec<_> = [1, 2, 4, 8, 16, 32, 64].iter().map(|&rows| (rows, self.verify(rows))).collect();
        let verify = CostCurve::through(&points, 0.1).unwrap();
        let draft = CostCurve::through(&[(4, self.draft), (2 * BLOCK, self.draft)], 0.1).unwrap();
        Tuner::new(verify, draft, BLOCK)
    }

    /// A drafter that claims 0.7 for its best and 0.2 for its second token at every depth.
    fn marginals(&self, horizon: usize, budget: usize) -> (Marginals, BuildOptions) {
        let row: Vec<f32> =
            (0..VOCAB).map(|id| [0.7f32, 0.2].get(id).map_or(0.1 / 6.0, |p| *p).ln()).collect();
        let logits: Vec<f32> = (0..horizon).flat_map(|_| row.clone()).collect();
        let options = BuildOptions { budget, ..BuildOptions::default() };
        (Marginals::from_logits(&logits, VOCAB, options).unwrap(), options)
    }

    fn tree(&self, horizon: usize, budget: usize) -> CandidateTree {
        let (marginals, options) = self.marginals(horizon, budget);
        ddtree_from(&marginals, 0, options).unwrap()
    }
}

/// A seeded generator of numbers in [0, 1).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The target's walk: the best token with probability `right`, the second with a quarter of the rest, else none
    /// that a tree has.
    fn walk(&mut self, tree: &CandidateTree, right: f64) -> Vec<usize> {
        let mut path = vec![0];
        loop {
            let roll = self.roll();
            let second = right + (1.0 - right) / 4.0;
            let token = if roll < right {
                0
            } else if roll < second {
                1
            } else {
                VOCAB as u32
            };
            match tree.child(path[path.len() - 1], token) {
                Some(node) => path.push(node),
                None => return path,
            }
        }
    }
}

fn candidate<'a>(tuning: &'a StreamTuning, history: &'a mut History, horizon: usize) -> Candidate<'a> {
    Candidate { tuning, history, horizon, depth: 64, budget: 64 }
}

struct Run {
    rate: f64,
    drafted: usize,
    rounds: usize,
    mean_budget: f64,
}

/// One auto stream for so many rounds.
fn auto(machine: Machine, tuner: &mut Tuner, rounds: usize) -> Run {
    let (mut tuning, mut dice, mut history) = (tuner.stream(), Dice(9), History::default());
    let (mut tokens, mut seconds, mut drafted, mut nodes) = (0usize, 0.0, 0, 0);
    for _ in 0..rounds {
        let fixed = Fixed { rows: 1, tokens: 1.0, draft_load: 0 };
        let choices = tuner.choose(&mut [candidate(&tuning, &mut history, BLOCK - 1)], fixed);
        let horizon = choices.block_rows - 1;
        if !matches!(choices.streams[0], Choice::Draft | Choice::Trial) {
            Tuner::observe_plain(&mut tuning, machine.verify(1));
            (tokens, seconds) = (tokens + 1, seconds + machine.verify(1));
            continue;
        }
        let (marginals, options) = machine.marginals(horizon, 64);
        let (mut tree, worth) = tuner.build(&tuning, &marginals, (0, false), options).unwrap();
        assert!(worth.windows(2).all(|pair| pair[1] <= pair[0]), "{worth:?}");
        let budget = tuner.spend(&[worth], &[], 1).budgets[0];
        tree.truncate(budget).unwrap();
        let path = dice.walk(&tree, machine.right);
        tuner.observe_draft(&mut tuning, (choices.block_rows, horizon), &tree, &path);
        drafted += 1;
        nodes += budget;
        tokens += path.len();
        seconds += machine.draft + machine.verify(budget + 1);
    }
    let mean_budget = nodes as f64 / drafted.max(1) as f64;
    Run { rate: tokens as f64 / seconds, drafted, rounds, mean_budget }
}

/// Tokens per second with the same budget in every round.
fn fixed(machine: Machine, budget: usize, rounds: usize) -> f64 {
    let (mut dice, tree) = (Dice(9), machine.tree(BLOCK - 1, budget));
    let tokens: usize = (0..rounds).map(|_| dice.walk(&tree, machine.right).len()).sum();
    tokens as f64 / (rounds as f64 * (machine.draft + machine.verify(budget + 1)))
}

#[test]
fn auto_is_as_good_as_the_best_fixed_budget() {
    for (per_row, draft, right) in [
        (0.02, 0.5, 0.8),
        (0.1, 0.5, 0.8),
        (0.1, 1.5, 0.9),
        (0.3, 0.5, 0.8),
        (0.05, 1.0, 0.6),
        (0.02, 0.1, 0.5),
    ] {
        let machine = Machine { per_row, draft, right };
        let got = auto(machine, &mut machine.tuner(), 600);
        let best = [2, 4, 7, 11, 15, 23, 31, 47, 63].map(|budget| fixed(machine, budget, 600));
        let best = best.into_iter().fold(1.0, f64::max);
        assert!(got.rate > 0.95 * best, "{per_row} {draft} {right}: {} of {best}", got.rate);
    }
}

#[test]
fn auto_falls_to_plain_decoding_where_drafting_does_not_pay() {
    for (per_row, draft, right) in [(0.8, 2.0, 0.7), (0.1, 2.0, 0.05), (1.0, 0.5, 0.3)] {
        let machine = Machine { per_row, draft, right };
        let mut tuner = machine.tuner();
        auto(machine, &mut tuner, 200);
        // What the first stream learned, the second starts from.
        let second = auto(machine, &mut tuner, 1000);
        assert!(second.rate > 0.96, "{per_row} {draft} {right}: {}", second.rate);
        assert!(second.drafted > 0 && second.drafted < second.rounds / 4, "{} drafted", second.drafted);
    }
}

#[test]
fn auto_takes_drafting_up_again_when_it_pays_again() {
    let bad = Machine { per_row: 0.05, draft: 1.0, right: 0.02 };
    let mut tuner = bad.tuner();
    auto(bad, &mut tuner, 300);
    let good = Machine { right: 0.9, ..bad };
    let again = auto(good, &mut tuner, 1500);
    assert!(again.rate > 2.0, "{} tokens per second, {} nodes", again.rate, again.mean_budget);
}

#[test]
fn dearer_rows_get_fewer_nodes() {
    let budget = |per_row| {
        let machine = Machine { per_row, draft: 0.5, right: 0.8 };
        auto(machine, &mut machine.tuner(), 300).mean_budget
    };
    let budgets = [budget(0.01), budget(0.05), budget(0.2)];
    assert!(budgets.windows(2).all(|pair| pair[1] < pair[0]), "{budgets:?}");
}

#[test]
fn of_several_streams_the_promising_ones_draft() {
    let machine = Machine { per_row: 0.3, draft: 0.2, right: 0.8 };
    let mut tuner = machine.tuner();
    let (mut good, mut bad) = (tuner.stream(), tuner.stream());
    good.blocks.set(5.0, 8.0);
    bad.blocks.set(0.2, 8.0);
    let mut histories = [(); 3].map(|()| History::default());
    let [first, second, third] = &mut histories;
    let mut candidates =
        [candidate(&bad, first, 15), candidate(&good, second, 15), candidate(&good, third, 0)];
    let fixed = Fixed { rows: 3, tokens: 3.0, draft_load: 0 };
    let choices = tuner.choose(&mut candidates, fixed).streams;
    assert!(matches!(choices[..], [Choice::Plain, Choice::Draft, Choice::Plain]), "{choices:?}");
}

#[test]
fn a_text_that_repeats_itself_is_looked_up() {
    let machine = Machine { per_row: 0.1, draft: 2.0, right: 0.1 };
    let mut tuner = machine.tuner();
    let mut tuning = tuner.stream();
    tuning.blocks.set(0.2, 4.0);
    let mut history = History::new(&[5, 1, 2, 3, 4, 5, 1, 2, 3]);
    let fixed = Fixed { rows: 1, tokens: 1.0, draft_load: 0 };
    let mut choose = |tuning: &StreamTuning, tuner: &mut Tuner| match tuner
        .choose(&mut [candidate(tuning, &mut history, 15)], fixed)
        .streams
        .remove(0)
    {
        Choice::Lookup(lookup) => lookup.tokens.len(),
        Choice::Plain => 0,
        Choice::Draft | Choice::Trial => panic!("the drafter is not worth its time here"),
    };
    let first = choose(&tuning, &mut tuner);
    assert!(first > 1, "{first} tokens");
    // What is never accepted is no longer proposed, what always is gets longer.
    let (mut wrong, mut unlucky) = (tuning.clone(), tuner.clone());
    (0..60).for_each(|_| unlucky.observe_lookup(&mut wrong, 4, 8, 0));
    assert_eq!(choose(&wrong, &mut unlucky), 0);
    (0..60).for_each(|_| tuner.observe_lookup(&mut tuning, 4, 8, 8));
    assert!(choose(&tuning, &mut tuner) > first);
}

#[test]
fn nodes_go_to_the_stream_that_makes_more_of_them() {
    let machine = Machine { per_row: 0.1, draft: 0.5, right: 0.8 };
    let mut tuner = machine.tuner();
    let (sure, mut unsure) = (tuner.stream(), tuner.stream());
    let tree = machine.tree(15, 32);
    for _ in 0..50 {
        unsure.acceptance.observe(&tree, &[0], &Ratios::default(), false);
    }
    tuner.rate = 2.0;
    let (marginals, options) = machine.marginals(15, 32);
    let worth =
        [&unsure, &sure].map(|tuning| tuner.build(tuning, &marginals, (0, false), options).unwrap().1);
    let budgets = tuner.spend(&worth, &[], 2).budgets;
    assert!(budgets[1] > budgets[0] + 2, "{budgets:?}");
}
