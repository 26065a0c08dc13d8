//! Trees against all prefixes sorted, over random candidates, ties, forbidden tokens and broken rows; lists and plans against those of the
//! tree as a [`DraftTree`]; who may change whom; refusals.

use super::cpu::{Built, forward, tree};
use super::{Draft, Input, MASK_WORDS, MOST_DEPTH, Output, oracle};
use crate::DraftTree;
use crate::accept_walk::stated_node;
use crate::test_support::refusal;
use crate::top_tokens::{self, row_words};
use crate::tree::SplitMix64;
use crate::tree_gdn::{Plan, Schedule};

/// Rows of candidates, and trees of so many nodes that have a draft or none.
#[derive(Clone)]
struct Case {
    k: usize,
    best: Vec<u32>,
    drafts: Vec<Option<Draft>>,
    stated: Option<Vec<f64>>,
    cu_nodes: Vec<i32>,
    lens: Vec<i32>,
}

/// Everything that a forward writes.
#[derive(Clone, Debug, PartialEq)]
struct Lists {
    tokens: Vec<u32>,
    nodes: Vec<u32>,
    positions: Vec<i32>,
    parents: Vec<i32>,
    mask: Vec<u32>,
    plans: Vec<u32>,
    plan_at: Vec<i32>,
}

const ROOT: u32 = 9000;

impl Case {
    /// `kind` 0: any logits; 1: few different ones; 2: some tokens are forbidden; 3: some rows are broken.
    fn new(trees: usize, kind: usize, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let (vocab, most) = (2 + random.below(6), 1 + random.below(4));
        let k = 1 + random.below(vocab).max(random.below(vocab));
        let mut case = Self {
            k,
            best: Vec::new(),
            drafts: Vec::new(),
            stated: None,
            cu_nodes: vec![0],
            lens: Vec::new(),
        };
        let mut rows = 0;
        for _ in 0..trees {
            let depths = 1 + random.below(most);
            case.drafts.push((random.below(6) > 0).then_some(Draft { first: rows, depths }));
            rows += depths;
            let most_nodes = 5 + random.below(55);
            case.cu_nodes.push(case.cu_nodes[case.cu_nodes.len() - 1] + 1 + random.below(most_nodes) as i32);
            case.lens.push(random.below(1000) as i32);
        }
        let mut logit = || match (kind, random.below(8)) {
            (1, _) => random.below(3) as f32,
            (2, 0..4) => f32::NEG_INFINITY,
            (3, 0) => f32::NAN,
            _ => (random.unit() * 8.0) as f32,
        };
        let logits: Vec<f32> = (0..rows * vocab).map(|_| logit()).collect();
        case.best = vec![0; rows * row_words(k)];
        top_tokens::cpu::forward(vocab, k, &logits, &mut case.best).unwrap();
        if seed.is_multiple_of(3) {
            let ln = |index: usize| -((index / k) as f64) / 64.0 - ((index % k) as f64) / 8.0;
            case.stated = Some((0..most * k).map(ln).collect());
        }
        case
    }

    fn input(&self) -> Input<'_> {
        let Self { k, best, drafts, stated, cu_nodes, lens } = self;
        Input { k: *k, best, drafts, stated: stated.as_deref(), cu_nodes, lens }
    }

    fn nodes(&self, b: usize) -> usize {
        (self.cu_nodes[b + 1] - self.cu_nodes[b]) as usize
    }

    /// Lists with room for the longest plans, and with the roots' tokens.
    fn lists(&self) -> Lists {
        let rows = self.cu_nodes[self.cu_nodes.len() - 1] as usize;
        let mut plan_at = vec![0];
        for (b, draft) in self.drafts.iter().enumerate() {
            let broom = draft.map(|draft| DraftTree::broom(self.nodes(b), draft.depths).unwrap());
            let words = broom.map_or(8, |broom| Plan::new(&broom, Schedule::Levels).words().len());
            plan_at.push(plan_at[b] + words as i32);
        }
        let mut tokens = vec![7; rows];
        self.cu_nodes[..self.lens.len()]
            .iter()
            .for_each(|&first| tokens[first as usize] = ROOT + first as u32);
        Lists {
            tokens,
            nodes: vec![7; rows],
            positions: vec![7; rows],
            parents: vec![7; rows],
            mask: vec![7; rows * MASK_WORDS],
            plans: vec![7; plan_at[plan_at.len() - 1] as usize],
            plan_at,
        }
    }

    fn run(&self) -> Lists {
        let mut lists = self.lists();
        forward(self.input(), lists.output()).unwrap();
        lists
    }

    fn built(&self, b: usize) -> Option<Built> {
        let draft = self.drafts[b]?;
        Some(tree((self.k, &self.best), draft, self.stated.as_deref(), self.nodes(b) - 1).unwrap())
    }
}

impl Lists {
    fn output(&mut self) -> Output<'_> {
        let Self { tokens, nodes, positions, parents, mask, plans, plan_at } = self;
        Output { tokens, nodes, positions, parents, mask, plans, plan_at }
    }

    /// The part of tree b.
    fn of(&self, case: &Case, b: usize) -> Self {
        let rows = case.cu_nodes[b] as usize..case.cu_nodes[b + 1] as usize;
        let plan = self.plan_at[b] as usize..self.plan_at[b + 1] as usize;
        Self {
            tokens: self.tokens[rows.clone()].to_vec(),
            nodes: self.nodes[rows.clone()].to_vec(),
            positions: self.positions[rows.clone()].to_vec(),
            parents: self.parents[rows.clone()].to_vec(),
            mask: self.mask[rows.start * MASK_WORDS..rows.end * MASK_WORDS].to_vec(),
            plan_at: vec![0, plan.len() as i32],
            plans: self.plans[plan].to_vec(),
        }
    }
}

fn cases() -> impl Iterator<Item = Case> {
    (0..2000).map(|seed| Case::new(1 + seed as usize % 4, seed as usize % 4, seed))
}

#[test]
fn trees_are_the_sorted_prefixes() {
    let (mut full, mut short) = (0, 0);
    for (number, case) in cases().enumerate() {
        for (b, draft) in case.drafts.iter().enumerate() {
            let (Some(built), Some(draft)) = (case.built(b), *draft) else { continue };
            let budget = case.nodes(b) - 1;
            let want = oracle::prefixes(case.k, &case.best, draft, case.stated.as_deref(), budget);
            let path = |node: usize| {
                let (mut ranks, mut tokens, mut at) = (Vec::new(), Vec::new(), node);
                while at > 0 {
                    ranks.insert(0, built.ranks[at]);
                    tokens.insert(0, built.tokens[at - 1]);
                    at = built.parents[at] as usize;
                }
                (ranks, tokens)
            };
            let got: Vec<_> = (1..built.parents.len()).map(path).collect();
            let want: Vec<_> = want.into_iter().map(|prefix| (prefix.ranks, prefix.tokens)).collect();
            assert_eq!(got, want, "case {number}, tree {b}");
            *if got.len() == budget { &mut full } else { &mut short } += 1;
        }
    }
    assert!(full > 1000 && short > 1000, "{full} full, {short} short: the cases show little");
}

#[test]
fn lists_are_those_of_the_tree() {
    for (number, case) in cases().enumerate() {
        let (before, got) = (case.lists(), case.run());
        for b in 0..case.drafts.len() {
            let got = got.of(&case, b);
            let Some(built) = case.built(b) else {
                assert_eq!(got, before.of(&case, b), "case {number}: tree {b} has no draft");
                continue;
            };
            let shape = DraftTree::new(built.parents.clone()).unwrap();
            let taken = shape.len();
            assert_eq!(got.parents[..taken], built.parents);
            assert_eq!(got.tokens[1..taken], built.tokens);
            assert_eq!(got.tokens[0], ROOT + case.cu_nodes[b] as u32);
            let mask = shape.ancestor_mask();
            for node in 0..taken {
                let depth = shape.depths()[node];
                assert_eq!(got.nodes[node], stated_node(built.ranks[node], depth));
                assert_eq!(got.positions[node], case.lens[b] + depth as i32);
                for other in 0..taken {
                    let bit = got.mask[node * MASK_WORDS + other / 32] >> (other % 32) & 1 == 1;
                    assert_eq!(bit, mask.contains(node, other), "case {number}: {node} sees {other}");
                }
            }
            if taken == case.nodes(b) {
                let plan = Plan::new(&shape, Schedule::Levels);
                let (of_plan, behind) = got.plans.split_at(plan.words().len());
                assert_eq!(of_plan, plan.words(), "case {number}, tree {b}");
                assert!(behind.iter().all(|&word| word == 0));
            }
        }
    }
}

#[test]
fn trees_alone_equal_trees_together() {
    for seed in 0..200 {
        let case = Case::new(5, seed as usize % 4, seed);
        let together = case.run();
        for b in 0..5 {
            let alone = Case {
                drafts: vec![case.drafts[b]],
                cu_nodes: vec![0, case.nodes(b) as i32],
                lens: vec![case.lens[b]],
                ..case.clone()
            };
            let mut lists = alone.lists();
            lists.tokens[0] = ROOT + case.cu_nodes[b] as u32;
            forward(alone.input(), lists.output()).unwrap();
            assert_eq!(lists, together.of(&case, b), "seed {seed}, tree {b}");
        }
    }
}

#[test]
fn what_is_left_over_are_roots() {
    let (k, depths, nodes) = (4, 3, 40);
    let mut logits: Vec<f32> = (0..depths * k).map(|at| -(at as f32)).collect();
    let run = |logits: &[f32]| {
        let mut case = Case::new(1, 0, 1);
        case.best = vec![0; depths * row_words(k)];
        top_tokens::cpu::forward(k, k, logits, &mut case.best).unwrap();
        (case.k, case.stated, case.lens) = (k, None, vec![50]);
        (case.drafts, case.cu_nodes) = (vec![Some(Draft { first: 0, depths })], vec![0, nodes]);
        case.run()
    };
    assert!(run(&logits).parents[1..].iter().all(|&parent| parent >= 0), "84 prefixes are enough");
    logits[k] = f32::NAN;
    let got = run(&logits);
    assert_eq!(got.parents[..6], [-1, 0, 0, 0, 0, -1]);
    for node in 5..nodes as usize {
        assert_eq!((got.parents[node], got.nodes[node], got.positions[node]), (-1, 0, 50));
        assert_eq!(got.tokens[node], ROOT);
        let seen = &got.mask[node * MASK_WORDS..][..MASK_WORDS];
        assert!((0..256).all(|other| (seen[other / 32] >> (other % 32) & 1 == 1) == (other == node)));
    }
    assert_eq!(got.plans[..4], [2, nodes as u32, 4 * nodes as u32, 1], "steps, items, entries, depth");
}

#[test]
fn no_plan_is_longer_than_a_brooms() {
    let mut random = SplitMix64::new(3);
    for nodes in [1, 2, 3, 17, 33, 64, 65, 128, 256] {
        for depth in 1..=MOST_DEPTH {
            let room = Plan::new(&DraftTree::broom(nodes, depth).unwrap(), Schedule::Levels);
            for _ in 0..20 {
                let mut depths = vec![0];
                let mut parents = vec![-1];
                for node in 1..nodes {
                    let (deep, any) = (random.below(4) > 0, random.below(node));
                    let parent = if deep && depths[node - 1] < depth { node - 1 } else { any };
                    let parent = if depths[parent] < depth { parent as i32 } else { -1 };
                    depths.push(if parent < 0 { 0 } else { depths[parent as usize] + 1 });
                    parents.push(parent);
                }
                let plan = Plan::levels(&parents);
                assert!(plan.words().len() <= room.words().len() && plan.entries() <= room.entries());
            }
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let mut case = Case::new(2, 0, 4);
    case.drafts = vec![Some(Draft { first: 0, depths: 1 }), None];
    let said = |change: fn(&mut Case), cut: fn(&mut Lists)| {
        let (mut case, mut lists) = (case.clone(), case.lists());
        change(&mut case);
        cut(&mut lists);
        refusal(forward(case.input(), lists.output()))
    };
    let none: fn(&mut Lists) = |_| ();
    assert_eq!(said(|case| case.k = 0, none), "tree-build: k, expected: 1 to 64, got: 0");
    assert_eq!(
        said(|case| case.cu_nodes = vec![0, 5, 5], none),
        "tree-build: cu_nodes, expected: rising from 0 by 1 to 256 nodes a tree, got: [0, 5, 5]"
    );
    let rows = case.best.len() / row_words(case.k);
    let outside = said(|case| case.drafts[0] = Some(Draft { first: 900, depths: 2 }), none);
    assert_eq!(outside, format!("tree-build: drafts, expected: 1 to 15 of {rows} rows, got: 2 from 900"));
    assert!(
        said(|case| case.drafts[0] = Some(Draft { first: 0, depths: 0 }), none).ends_with("got: 0 from 0")
    );
    let none_changed: fn(&mut Case) = |_| ();
    for (name, text) in [
        ("drafts", said(|case| case.drafts.truncate(1), none)),
        ("best", said(|case| case.best.push(0), none)),
        ("stated", said(|case| case.stated = Some(Vec::new()), none)),
        ("lens", said(|case| case.lens.truncate(1), none)),
        ("tokens", said(none_changed, |lists| lists.tokens.truncate(1))),
        ("nodes", said(none_changed, |lists| lists.nodes.truncate(1))),
        ("positions", said(none_changed, |lists| lists.positions.truncate(1))),
        ("parents", said(none_changed, |lists| lists.parents.truncate(1))),
        ("mask", said(none_changed, |lists| lists.mask.truncate(1))),
        ("plan_at", said(none_changed, |lists| lists.plan_at.truncate(2))),
    ] {
        assert!(text.starts_with(&format!("tree-build: {name}, expected: [")), "{text}");
    }
    let room = said(none_changed, |lists| lists.plan_at[1] = 8);
    assert!(room.starts_with("tree-build: plans, expected: room for "), "{room}");
}
