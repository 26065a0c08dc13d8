//! Rounds planned ahead on simulated devices: seconds from the 9B's rounds on an H200, acceptance from stated models.

use super::super::{CostCurve, History};
use super::*;
use crate::engine::SyntheticAcceptance;
use crate::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_from};

const VOCAB: usize = 64;
const BLOCK: usize = 16;

/// Milliseconds of a pass of chains by its rows.
const ROWS: [(usize, f64); 10] = [
    (1, 4.5),
    (8, 4.7),
    (16, 4.9),
    (17, 5.15),
    (32, 5.4),
    (33, 5.65),
    (64, 6.2),
    (65, 7.4),
    (128, 8.2),
    (256, 13.6),
];

struct Machine {
    /// Milliseconds that a stream with a tree of 16 nodes takes more than with a chain.
    solved: f64,
    /// Milliseconds that a stream's context takes, which nobody timed at start.
    context: f64,
    /// A stream's model.
    models: Vec<SyntheticAcceptance>,
}

impl Machine {
    fn alike(streams: usize, solved: f64, model: &SyntheticAcceptance) -> Self {
        Self { solved, context: 0.0, models: vec![model.clone(); streams] }
    }

    fn streams(&self) -> usize {
        self.models.len()
    }

    /// Seconds of a round in which `drafting` of `streams` streams draft, without their contexts.
    fn seconds(&self, shape: Option<Shape>, drafting: usize, streams: usize) -> f64 {
        let nodes = shape.map_or(0, |shape| shape.nodes);
        let rows = streams + drafting * nodes;
        let curve = CostCurve::through(&ROWS, 0.1).unwrap();
        let mut ms = curve.predict(rows) + 0.07 * streams as f64;
        if let Some(shape) = shape.filter(|_| drafting > 0) {
            ms += 1.0 + 0.003 * (drafting * shape.block_rows) as f64;
            let solved = self.solved * drafting as f64 * nodes as f64 / 16.0;
            ms += if shape.is_tree { solved } else { 0.0 };
        }
        1e-3 * ms
    }

    fn tuner(&self) -> Tuner {
        let counts = [1, 2, 4, 8, 16];
        let timed = |shape: Option<Shape>| {
            let fits = |&&streams: &&usize| shape.is_none_or(|shape| shape.fits(streams));
            counts.iter().filter(fits).map(|&n| (n, self.seconds(shape, n, n))).collect::<Vec<_>>()
        };
        let drafted = shapes(BLOCK).into_iter().map(|shape| timed(Some(shape))).collect();
        let costs = RoundCosts { plain: timed(None), drafted };
        let flat = CostCurve::through(&[(1, 5e-3), (256, 14e-3)], 0.1).unwrap();
        let mut tuner = Tuner::new(flat.clone(), flat, BLOCK);
        tuner.plan_ahead(Some(Ahead::new(BLOCK, costs)));
        tuner
    }

    fn draft(&self, stream: usize, shape: Shape) -> CandidateTree {
        let logits: Vec<f32> = (0..shape.horizon() * VOCAB).map(|i| (i * 7919 % 997) as f32 * 1e-3).collect();
        let options = BuildOptions { budget: shape.nodes, top_k: if shape.is_tree { VOCAB } else { 1 } };
        let marginals = Marginals::from_logits(&logits, VOCAB, options).unwrap();
        let marginals = self.models[stream].marginals(&marginals);
        match shape.is_tree {
            true => ddtree_from(&marginals, 0, options).unwrap(),
            false => chain_from(&marginals, 0, options).unwrap(),
        }
    }

    fn walk(&self, stream: usize, tree: &CandidateTree, start: usize) -> Vec<usize> {
        let mut path = vec![0];
        while let Some(next) = self.models[stream].next(stream as u64, tree, &path, start + path.len()) {
            path.push(next);
        }
        path
    }

    /// Tokens per second of all streams with the same shape in every round.
    fn fixed(&self, shape: Option<Shape>, rounds: usize) -> f64 {
        let streams = self.streams();
        let seconds = self.seconds(shape, streams, streams) + 1e-3 * self.context * streams as f64;
        let Some(shape) = shape else { return streams as f64 / seconds };
        let mut tokens = 0;
        for stream in 0..streams {
            let tree = self.draft(stream, shape);
            let mut start = 0;
            (0..rounds).for_each(|_| start += self.walk(stream, &tree, start).len());
            tokens += start;
        }
        tokens as f64 / (rounds as f64 * seconds)
    }
}

/// A machine with a tuner and what the streams have by now.
struct Run<'a> {
    machine: &'a Machine,
    tuner: Tuner,
    tunings: Vec<StreamTuning>,
    histories: Vec<History>,
    starts: Vec<usize>,
    noise: u64,
}

/// What some rounds brought.
#[derive(Default)]
struct Got {
    tokens: f64,
    seconds: f64,
    /// Streams' rounds without a draft.
    plain: usize,
    /// Rounds with a trial, and their seconds beyond those of the rounds before them.
    trials: usize,
    tried: f64,
}

impl<'a> Run<'a> {
    fn new(machine: &'a Machine) -> Self {
        let (tuner, streams) = (machine.tuner(), machine.streams());
        let tunings = vec![tuner.stream(); streams];
        Self {
            machine,
            tuner,
            tunings,
            histories: vec![History::default(); streams],
            starts: vec![0; streams],
            noise: 1,
        }
    }

    fn rounds(&mut self, rounds: usize) -> Got {
        let (mut got, streams) = (Got::default(), self.machine.streams());
        let mut usual = f64::INFINITY;
        for _ in 0..rounds {
            self.tuner.set_streams(streams);
            let candidate =
                |(tuning, history)| Candidate { tuning, history, horizon: BLOCK - 1, depth: 0, budget: 64 };
            let mut candidates: Vec<_> =
                self.tunings.iter().zip(&mut self.histories).map(candidate).collect();
            let planned = self.tuner.choose_ahead(&mut candidates, (streams, 0)).unwrap();
            let drafts = |choice: &Choice| matches!(choice, Choice::Draft | Choice::Trial);
            let drafting = planned.streams.iter().filter(|choice| drafts(choice)).count();
            self.noise = self.noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Up to 2 % of what else a machine does.
            let noise = 1.0 + 0.02 * (self.noise >> 40) as f64 / f64::from(1 << 24);
            let context = 1e-3 * self.machine.context * streams as f64;
            let spent = noise * (self.machine.seconds(planned.shape, drafting, streams) + context);
            for (stream, choice) in planned.streams.iter().enumerate() {
                let tuning = &mut self.tunings[stream];
                let Some(shape) = planned.shape.filter(|_| drafts(choice)) else {
                    Tuner::observe_plain(tuning, spent);
                    (self.starts[stream], got.tokens, got.plain) =
                        (self.starts[stream] + 1, got.tokens + 1.0, got.plain + 1);
                    continue;
                };
                let tree = self.machine.draft(stream, shape);
                let path = self.machine.walk(stream, &tree, self.starts[stream]);
                (self.starts[stream], got.tokens) =
                    (self.starts[stream] + path.len(), got.tokens + path.len() as f64);
                if !shape.is_tree {
                    self.tuner.observe_chain(tuning, shape.nodes, path.len() - 1);
                } else if planned.reads {
                    let (ranks, depths) = (tree.ranks(), tree.tree().depths());
                    let walked = Walked { ranks, depths, path: &path, horizon: shape.horizon() };
                    self.tuner.observe_tree(tuning, walked);
                }
                self.tuner.observe_planned(tuning, planned.bucket, path.len() - 1);
            }
            self.tuner.observe_round(planned.bucket.unwrap(), spent);
            if planned.streams.iter().any(|choice| matches!(choice, Choice::Trial)) {
                got.trials += 1;
                got.tried += if usual.is_finite() { spent - usual } else { 0.0 };
            } else {
                usual = spent;
            }
            got.seconds += spent;
        }
        got
    }
}

fn spine(length: f64) -> SyntheticAcceptance {
    SyntheticAcceptance::from_length(length, BLOCK - 1).unwrap()
}

/// Behind siblings as sure as on the spine: trees gain most there.
fn wide(length: f64) -> SyntheticAcceptance {
    spine(length).with_siblings(vec![0.45, 0.2, 0.1, 0.05], 1.0).unwrap()
}

const CHAIN: Shape = Shape { block_rows: BLOCK, nodes: BLOCK - 1, is_tree: false };
const TREE: Shape = Shape { block_rows: BLOCK, nodes: BLOCK, is_tree: true };

/// After as many rounds as a measured run has before its window, `auto` is at most 2 % behind the best of plain rounds, whole chains and trees of
/// 16 nodes.
#[test]
fn auto_keeps_up_with_the_better_of_chains_and_trees() {
    let mixed: Vec<_> = [6.5, 2.0].into_iter().cycle().take(8).map(spine).collect();
    for (name, machine) in [
        ("the 9B's", Machine::alike(1, 0.2, &spine(6.5))),
        ("two streams", Machine::alike(2, 0.2, &spine(6.5))),
        ("four streams", Machine::alike(4, 0.3, &spine(6.5))),
        ("four streams of long contexts", Machine { context: 0.3, ..Machine::alike(4, 0.3, &spine(6.5)) }),
        ("eight streams", Machine::alike(8, 0.4, &spine(6.5))),
        ("sixteen streams", Machine::alike(16, 0.5, &spine(6.5))),
        (
            "sixteen streams of long contexts",
            Machine { context: 0.1, ..Machine::alike(16, 0.5, &spine(6.5)) },
        ),
        ("a poor drafter", Machine::alike(1, 0.06, &spine(2.5))),
        ("a poor drafter, four streams", Machine::alike(4, 0.3, &spine(2.5))),
        ("sure siblings", Machine::alike(1, 0.06, &wide(4.0))),
        ("sure siblings, four streams", Machine::alike(4, 0.1, &wide(3.0))),
        ("sure siblings, dear trees", Machine::alike(1, 3.0, &wide(4.0))),
        ("unlike streams", Machine { solved: 0.4, context: 0.0, models: mixed }),
    ] {
        let rounds = 16_000 / machine.streams();
        let [plain, chain, tree] = [None, Some(CHAIN), Some(TREE)].map(|shape| machine.fixed(shape, rounds));
        let mut run = Run::new(&machine);
        run.rounds(32);
        let got = run.rounds(rounds);
        let auto = got.tokens / got.seconds;
        // The machine's noise is 1 % on average, which the fixed shapes do without.
        let best = plain.max(chain).max(tree) / 1.01;
        eprintln!(
            "{name}: auto {auto:.0}, plain {plain:.0}, chain {chain:.0}, tree {tree:.0}, {} trials",
            got.trials
        );
        assert!(auto > 0.98 * best, "{name}: {auto}, plain {plain}, chain {chain}, tree {tree}");
    }
}

#[test]
fn trials_cost_a_bounded_share_and_end_where_the_outcome_is_settled() {
    for streams in [1, 4, 16] {
        let machine = Machine::alike(streams, 0.5, &spine(6.5));
        let mut run = Run::new(&machine);
        run.rounds(64);
        let early = run.rounds(3000);
        assert!(
            early.tried < 0.01 * early.seconds,
            "{streams} streams: {} of {} s",
            early.tried,
            early.seconds
        );
        let late = run.rounds(2000);
        assert!(late.tried < 0.002 * late.seconds, "{streams} streams: {} trials late", late.trials);
    }
}

#[test]
fn auto_falls_to_plain_rounds_where_the_drafter_is_wrong_and_comes_back() {
    let bad = SyntheticAcceptance::from_curve(vec![0.02]).unwrap().with_siblings(vec![0.01], 1.0).unwrap();
    for streams in [1, 16] {
        let machine = Machine::alike(streams, 0.3, &bad);
        let mut run = Run::new(&machine);
        run.rounds(200);
        let got = run.rounds(1000);
        let plain = machine.fixed(None, 1) / 1.01;
        assert!(got.plain > 900 * streams, "{streams} streams: {} plain", got.plain);
        assert!(got.tokens / got.seconds > 0.98 * plain, "{streams} streams: {}", got.tokens / got.seconds);
        let better = Machine::alike(streams, 0.3, &spine(6.5));
        run.machine = &better;
        run.rounds(2000);
        let got = run.rounds(500);
        let chain = better.fixed(Some(CHAIN), 500) / 1.01;
        assert!(got.tokens / got.seconds > 0.95 * chain, "{streams} streams: {}", got.tokens / got.seconds);
    }
}

#[test]
fn rounds_that_record_their_launches_say_nothing_of_a_machine() {
    let machine = Machine::alike(1, 0.2, &spine(6.5));
    let mut tuner = machine.tuner();
    let bucket = Bucket { shape: Some(3), drafting: 1, streams: 1 };
    let usual = machine.seconds(Some(CHAIN), 1, 1);
    (0..UNTIMED).for_each(|_| tuner.observe_round(bucket, 9.0 * usual));
    assert_eq!(tuner.ahead.as_ref().unwrap().slower, 1.0);
    (0..200).for_each(|_| tuner.observe_round(bucket, 1.5 * usual));
    assert!((tuner.ahead.as_ref().unwrap().slower - 1.5).abs() < 0.01);
}

/// What a large tree says of smaller ones is what these bring.
#[test]
fn a_tree_tells_what_smaller_ones_would_have_brought() {
    let mut told = 0;
    for (model, seed) in [(wide(3.0), 1), (spine(5.0), 2), (wide(2.0), 3)] {
        let machine = Machine::alike(1, 0.0, &model.with_seed(seed));
        let large = Shape { block_rows: BLOCK, nodes: 63, is_tree: true };
        let tree = machine.draft(0, large);
        for start in (0..600).step_by(3) {
            let path = machine.walk(0, &tree, start);
            let (ranks, depths) = (tree.ranks(), tree.tree().depths());
            let walked = Walked { ranks, depths, path: &path, horizon: large.horizon() };
            for shape in shapes(BLOCK).into_iter().filter(|shape| shape.is_tree) {
                let Some(gain) = walked.smaller(shape.nodes, shape.horizon()) else { continue };
                let want = machine.walk(0, &machine.draft(0, shape), start).len() - 1;
                assert_eq!(gain, want, "{shape:?} at {start}");
                told += 1;
            }
            let (right, ended) = walked.spine();
            let chain = machine.walk(0, &machine.draft(0, CHAIN), start).len() - 1;
            assert!(right == chain || (!ended && right < chain), "{right} of {chain} at {start}");
        }
    }
    assert!(told > 2000, "{told} trees compared");
}

#[test]
fn a_request_s_budget_and_other_modes_limit_what_is_drafted() {
    let machine = Machine::alike(2, 0.0, &wide(4.0));
    let mut tuner = machine.tuner();
    let (tuning, mut histories) = (tuner.stream(), [History::default(), History::default()]);
    for (budgets, drafting) in [([64, 5], 0), ([64, 64], 1)] {
        let candidates = histories.iter_mut().zip(budgets).map(|(history, budget)| Candidate {
            tuning: &tuning,
            history,
            horizon: 15.min(budget),
            depth: 0,
            budget,
        });
        let mut candidates: Vec<_> = candidates.collect();
        let planned = tuner.choose_ahead(&mut candidates, (2 + drafting, drafting)).unwrap();
        let shape = planned.shape.unwrap();
        assert!(!shape.is_tree || shape.nodes <= budgets[1], "{shape:?}");
        assert!(drafting == 0 || shape.block_rows == BLOCK, "{shape:?}");
        assert_eq!(planned.bucket.is_some(), drafting == 0);
    }
}
