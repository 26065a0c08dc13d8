//! The tree builder against brute force: every prefix of tokens is listed, sorted by its summed log-prob and its
//! tuple of ranks, and cut at the budget. Ties, degenerate rows and budgets have their own cases.

use canopy_e2e::Error;
use canopy_e2e::tree::{
    BuildOptions, CandidateTree, Marginals, build_chain, build_ddtree, ddtree_above, ddtree_from,
    expected_tokens,
};
use proptest::prelude::*;

fn options(budget: usize) -> BuildOptions {
    BuildOptions { budget, ..Default::default() }
}

/// Every row's tokens with their log-probs, sorted as the contract says, over the whole vocabulary.
fn sorted_rows(logits: &[f32], vocab: usize) -> Vec<Vec<(u32, f64)>> {
    let all = BuildOptions { budget: 255, top_k: vocab };
    let marginals = Marginals::from_logits(logits, vocab, all).expect("valid logits");
    (1..=marginals.horizon()).map(|depth| marginals.depth(depth).to_vec()).collect()
}

/// (joint, rank tuple, token path) of the `budget` best prefixes.
fn brute_force(rows: &[Vec<(u32, f64)>], budget: usize) -> Vec<(f64, Vec<u32>, Vec<u32>)> {
    let mut all: Vec<(f64, Vec<u32>, Vec<u32>)> = Vec::new();
    let mut layer = vec![(0.0, Vec::new(), Vec::new())];
    for row in rows {
        let mut next = Vec::new();
        for (joint, ranks, tokens) in &layer {
            for (rank, &(token, log_prob)) in row.iter().enumerate() {
                let extend = |path: &Vec<u32>, last: u32| [path.as_slice(), &[last]].concat();
                next.push((joint + log_prob, extend(ranks, rank as u32), extend(tokens, token)));
            }
        }
        all.extend(next.iter().cloned());
        layer = next;
    }
    all.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("no NaN").then_with(|| a.1.cmp(&b.1)));
    all.truncate(budget);
    all
}

fn token_path(tree: &CandidateTree, node: usize) -> Vec<u32> {
    tree.tree().path(node).into_iter().skip(1).map(|n| tree.tokens()[n]).collect()
}

/// What every tree promises, whatever the logits.
fn check_promises(tree: &CandidateTree, root: u32, budget: usize) {
    assert_eq!(tree.tokens()[0], root);
    assert!(tree.budget() <= budget);
    assert!(tree.joint_log_probs().windows(2).all(|pair| pair[1] <= pair[0]), "joint log-probs rise");
    for children in tree.tree().children() {
        let mut tokens: Vec<u32> = children.iter().map(|&node| tree.tokens()[node]).collect();
        let count = tokens.len();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), count, "two equal tokens under one parent");
    }
    for node in 1..=tree.budget() {
        let parent = tree.tree().parent(node).expect("not the root");
        let sum = tree.joint_log_probs()[parent] + tree.log_probs()[node];
        assert_eq!(sum.to_bits(), tree.joint_log_probs()[node].to_bits());
        assert_eq!(tree.child(parent, tree.tokens()[node]), Some(node));
    }
}

fn check_brute_force(logits: &[f32], vocab: usize, budget: usize) {
    let tree = build_ddtree(logits, vocab, 99, options(budget)).expect("a tree");
    check_promises(&tree, 99, budget);
    let want = brute_force(&sorted_rows(logits, vocab), budget);
    assert_eq!(tree.budget(), want.len());
    for (node, (joint, ranks, tokens)) in (1..).zip(&want) {
        assert_eq!(tree.joint_log_probs()[node].to_bits(), joint.to_bits(), "joint log-prob of node {node}");
        let path: Vec<u32> = tree.tree().path(node).into_iter().skip(1).map(|n| tree.ranks()[n]).collect();
        assert_eq!(&path, ranks, "rank path of node {node}");
        assert_eq!(&token_path(&tree, node), tokens, "token path of node {node}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tree_is_the_budget_best_set(
        vocab in 1usize..7,
        horizon in 1usize..5,
        budget in 0usize..40,
        seed in proptest::collection::vec(-4.0f32..4.0, 30),
    ) {
        check_brute_force(&seed[..(vocab * horizon).min(28) / vocab * vocab], vocab, budget);
    }

    // Few distinct logits: nearly every comparison is a tie.
    #[test]
    fn ties_go_by_rank_tuple_then_token(
        vocab in 1usize..6,
        horizon in 1usize..5,
        budget in 0usize..40,
        seed in proptest::collection::vec(0u8..3, 30),
    ) {
        let logits: Vec<f32> = seed.iter().map(|&x| f32::from(x)).collect();
        check_brute_force(&logits[..vocab * horizon], vocab, budget);
    }

    // Anything a broken drafter may emit.
    #[test]
    fn no_logits_break_a_promise(
        vocab in 1usize..6,
        horizon in 1usize..5,
        budget in 0usize..255,
        top_k in 0usize..9,
        seed in proptest::collection::vec(prop_oneof![
            4 => -3.0f32..3.0,
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NAN),
            1 => Just(f32::MAX),
            1 => Just(f32::MIN),
        ], 30),
    ) {
        let options = BuildOptions { budget, top_k };
        let tree = build_ddtree(&seed[..vocab * horizon], vocab, 1, options).expect("a tree");
        check_promises(&tree, 1, budget);
        check_promises(&build_chain(&seed[..vocab * horizon], vocab, 1, budget).expect("a chain"), 1, budget);
    }

    #[test]
    fn every_prefix_is_the_smaller_tree(
        vocab in 2usize..6,
        budget in 1usize..60,
        keep in 0usize..60,
        seed in proptest::collection::vec(-4.0f32..4.0, 30),
    ) {
        let logits = &seed[..vocab * 5];
        let mut tree = build_ddtree(logits, vocab, 3, options(budget)).expect("a tree");
        tree.truncate(keep).expect("a prefix");
        prop_assert_eq!(tree, build_ddtree(logits, vocab, 3, options(budget.min(keep))).expect("a tree"));
    }
}

#[test]
fn degenerate_inputs_give_the_root_alone() {
    let logits = [0.5f32, 1.0, -1.0, 2.0, 0.0, 1.0];
    let (nan, none) = ([f32::NAN, 1.0, 0.0], [f32::NEG_INFINITY; 3]);
    let top_k = |top_k| BuildOptions { budget: 4, top_k };
    for (name, logits, options) in [
        ("budget 0", &logits[..], options(0)),
        ("K = 0", &logits[..], top_k(0)),
        ("no logits", &[][..], options(4)),
        ("first row NaN", &nan[..], options(4)),
        ("first row all -inf", &none[..], options(4)),
    ] {
        let tree = build_ddtree(logits, 3, 42, options).expect("the root alone");
        assert_eq!(tree, CandidateTree::root_only(42).expect("one node"), "{name}");
    }
}

#[test]
fn budget_one_is_the_best_token() {
    let tree = build_ddtree(&[0.5, 1.0, -1.0, 9.0, 0.0, 1.0], 3, 42, options(1)).expect("a tree");
    assert_eq!((tree.tokens(), tree.tree().parents()), (&[42, 1][..], &[-1, 0][..]));
}

#[test]
fn more_candidates_than_vocabulary_gives_every_prefix_once() {
    let logits = [0.5f32, 1.0, -1.0, 2.0];
    let tree = build_ddtree(&logits, 2, 0, BuildOptions { budget: 50, top_k: 1000 }).expect("a tree");
    assert_eq!(tree.budget(), 2 + 4);
    check_promises(&tree, 0, 50);
}

#[test]
fn a_bad_row_ends_the_horizon_before_its_depth() {
    for bad in [f32::NAN, f32::INFINITY] {
        let logits = [0.5f32, 1.0, bad, 0.0, 3.0, 4.0];
        let tree = build_ddtree(&logits, 2, 0, options(10)).expect("a tree");
        assert_eq!((tree.tokens(), tree.tree().parents()), (&[0, 1, 0][..], &[-1, 0, 0][..]));
    }
}

#[test]
fn equal_logits_rank_the_lower_token_first() {
    let logits = [1.0f32; 300];
    let tree = build_ddtree(&logits, 300, 0, options(5)).expect("a tree");
    assert_eq!(tree.tokens(), [0, 0, 1, 2, 3, 4]);
    assert_eq!(tree.ranks(), [0, 0, 1, 2, 3, 4]);
}

#[test]
fn a_token_of_probability_one_continues_before_its_equal_sibling() {
    // Depth 2 is certain, so a child ties with its parent, and the parent with its equal sibling.
    let inf = f32::NEG_INFINITY;
    let tree = build_ddtree(&[0.0, 0.0, inf, 7.0], 2, 9, options(4)).expect("a tree");
    assert_eq!(tree.tokens(), [9, 0, 1, 1, 1]);
    assert_eq!(tree.tree().parents(), [-1, 0, 1, 0, 3]);
}

#[test]
fn wrong_arguments_are_named() {
    let error = build_ddtree(&[0.0; 7], 3, 0, options(4)).expect_err("7 is no multiple of 3");
    assert_eq!(error.to_string(), "draft tree: logits, expected: [2, 3], got: [7]");
    let error = build_ddtree(&[0.0; 6], 3, 0, options(256)).expect_err("257 nodes");
    assert!(matches!(error, Error::Request { field: "budget", .. }), "{error}");
}

#[test]
fn chain_takes_every_depths_best_token() {
    let logits = [0.5f32, 1.0, -1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 5.0];
    let chain = build_chain(&logits, 3, 7, 8).expect("a chain");
    assert_eq!(chain.tokens(), [7, 1, 0, 2]);
    assert!(chain.tree().is_chain());
    let tree = build_ddtree(&logits, 3, 7, options(20)).expect("a tree");
    let deepest = (0..=tree.budget()).find(|&n| token_path(&tree, n) == [1, 0, 2]).expect("the spine");
    assert_eq!(chain.joint_log_probs()[3].to_bits(), tree.joint_log_probs()[deepest].to_bits());
    assert_eq!(build_chain(&logits, 3, 7, 2).expect("a chain").tokens(), [7, 1, 0]);
}

#[test]
fn from_tensor_reads_strided_and_16_bit_logits() {
    use candle_core::{DType, Device, Tensor};
    let logits = Tensor::new(&[[0.5f32, 9.0, -1.0], [2.0, 0.0, 1.0]], &Device::Cpu).expect("tensor");
    let want = Marginals::from_logits(&[0.5, 9.0, -1.0, 2.0, 0.0, 1.0], 3, options(6)).expect("marginals");
    let strided = logits.t().expect("t").contiguous().expect("copy").t().expect("t");
    let half = logits.to_dtype(DType::BF16).expect("bf16");
    let offset = Tensor::cat(&[&logits, &logits], 0).expect("cat").narrow(0, 1, 2).expect("narrow");
    for same in [logits, strided, half] {
        assert_eq!(Marginals::from_tensor(&same, options(6)).expect("marginals"), want);
    }
    let turned = Marginals::from_logits(&[2.0, 0.0, 1.0, 0.5, 9.0, -1.0], 3, options(6)).expect("marginals");
    assert_eq!(Marginals::from_tensor(&offset, options(6)).expect("marginals"), turned);
}

#[test]
fn a_tree_above_a_probability_is_the_beginning_of_the_whole_one() {
    let logits: Vec<f32> = (0..40).map(|i| ((i * 7919) % 31) as f32 / 6.0).collect();
    let marginals = Marginals::from_logits(&logits, 8, options(60)).expect("valid logits");
    let whole = ddtree_from(&marginals, 3, options(60)).expect("a tree");
    for least in [f64::NEG_INFINITY, -6.0, -3.0, -1.0, 0.1] {
        let tree = ddtree_above((least, 0.0), &marginals, 3, options(60)).expect("a tree");
        let above = whole.joint_log_probs()[1..].iter().filter(|&&joint| joint >= least).count();
        assert_eq!(tree.budget(), above);
        assert_eq!(tree.tokens(), &whole.tokens()[..=above]);
        assert_eq!(tree.tree().parents(), &whole.tree().parents()[..=above]);
    }
}

#[test]
fn what_is_less_sure_behind_a_sibling_comes_later_and_a_spine_stays() {
    let logits: Vec<f32> = (0..6).flat_map(|_| [2.0f32, 1.5, 0.0, -1.0]).collect();
    let marginals = Marginals::from_logits(&logits, 4, options(40)).expect("valid logits");
    let mut behind_siblings = Vec::new();
    for behind in [0.0, 0.3f64.ln(), f64::NEG_INFINITY] {
        let tree = ddtree_above((f64::NEG_INFINITY, behind), &marginals, 3, options(40)).expect("a tree");
        let (shape, ranks, joint) = (tree.tree(), tree.ranks(), tree.joint_log_probs());
        assert!(joint.windows(2).all(|pair| pair[1] <= pair[0]));
        let off_spine = |node: &usize| {
            let path = shape.path(*node);
            path[..path.len() - 1].iter().any(|&before| ranks[before] > 0)
        };
        for (node, &joint) in joint.iter().enumerate().skip(1) {
            let path = shape.path(node);
            let factors = path[1..].iter().filter(|node| off_spine(node)).count();
            let plain: f64 = path[1..].iter().map(|&node| tree.log_probs()[node]).sum();
            let expected = if factors == 0 { plain } else { plain + factors as f64 * behind };
            assert!(joint == expected || (joint - expected).abs() < 1e-9, "{behind}, node {node}");
        }
        behind_siblings.push((1..ranks.len()).filter(off_spine).count());
    }
    assert!(behind_siblings[0] > behind_siblings[1], "{behind_siblings:?}");
}

#[test]
fn every_budget_has_its_expected_tokens() {
    // Nodes of probability 3/4, 9/16 (depth 2) and 1/4.
    let logits = [3f32.ln(), 0.0, 3f32.ln(), 0.0];
    let tree = build_ddtree(&logits, 2, 0, options(3)).expect("a tree");
    let expected = expected_tokens(&tree, &[]);
    let want = [1.0, 1.75, 2.3125, 2.5625];
    assert!(expected.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{expected:?}");
    let halved = expected_tokens(&tree, &[1.0, 0.5]);
    assert!((halved[2] - (1.75 + 0.28125)).abs() < 1e-6, "{halved:?}");
}

#[test]
fn one_marginals_serves_several_budgets() {
    let logits: Vec<f32> = (0..60).map(|i| ((i * 37) % 23) as f32 / 5.0).collect();
    let marginals = Marginals::from_logits(&logits, 12, options(30)).expect("marginals");
    for budget in [0, 1, 7, 15, 30] {
        let tree = ddtree_from(&marginals, 5, options(budget)).expect("a tree");
        assert_eq!(tree, build_ddtree(&logits, 12, 5, options(budget)).expect("a tree"));
    }
}
