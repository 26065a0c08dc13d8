//! Two whole greedy speculative runs, tree and chain, from prompt to 64 tokens: our target, drafter and builder in a
//! plain loop, every stored number of the first six rounds compared, and the text equal to plain greedy decoding.

use candle_core::{DType, Tensor};
use canopy_e2e::draft::{DFlash, DraftRequest, Drafter};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_e2e::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_from};
use canopy_kernels::DraftTree;

use crate::drafter_golden::{Golden, check, golden, ids, max_diff, random_pair};

const TOKENS: usize = 64;
const STORED_ROUNDS: usize = 6;

/// What one round did.
struct Round {
    start: usize,
    draft_logits: Tensor,
    tree: CandidateTree,
    target_logits: Tensor,
    argmax: Vec<u32>,
    path: Vec<usize>,
}

impl Round {
    fn bonus(&self) -> u32 {
        self.argmax[self.path[self.path.len() - 1]]
    }
}

fn argmax(logits: &Tensor) -> Vec<u32> {
    logits.argmax(1).and_then(|t| t.to_vec1()).expect("argmax")
}

fn verify(target: &mut Qwen35, tokens: &[u32], tree: DraftTree) -> (Tensor, Tensor) {
    let stream = VerifyStream { slot: 0, tokens: tokens.to_vec(), tree, logits: LogitRows::All };
    let verified = target.verify(&[stream]).expect("verify");
    (verified.logits.expect("all rows"), verified.features.expect("taps are set"))
}

fn accept(tree: &CandidateTree, argmax: &[u32]) -> Vec<usize> {
    let mut path = vec![0];
    while let Some(next) = tree.child(path[path.len() - 1], argmax[path[path.len() - 1]]) {
        path.push(next);
    }
    path
}

fn round(target: &mut Qwen35, drafter: &mut DFlash, root: u32, chain: bool) -> Round {
    let start = target.committed(0);
    assert_eq!(drafter.context_len(0), start);
    let horizon = drafter.block_size() - 1;
    let draft_logits = drafter.draft(&[DraftRequest { slot: 0, root, horizon }]).expect("draft").remove(0);
    let options = BuildOptions { budget: if chain { horizon } else { 15 }, ..Default::default() };
    let marginals = Marginals::from_tensor(&draft_logits, options).expect("marginals");
    let tree = match chain {
        true => chain_from(&marginals, root, options),
        false => ddtree_from(&marginals, root, options),
    };
    let tree = tree.expect("tree");
    let (target_logits, features) = verify(target, tree.tokens(), tree.tree().clone());
    let argmax = argmax(&target_logits);
    let path = accept(&tree, &argmax);
    target.commit(std::slice::from_ref(&path)).expect("commit");
    let rows: Vec<u32> = path.iter().map(|&node| node as u32).collect();
    let rows = Tensor::new(rows, features.device()).expect("rows");
    drafter.extend(0, &features.index_select(&rows, 0).expect("select")).expect("extend");
    Round { start, draft_logits, tree, target_logits, argmax, path }
}

fn check_round(golden: &Golden, index: usize, round: &Round) {
    let name = |part: &str| format!("r{index}_{part}");
    let tree = &round.tree;
    let parents: Vec<i64> = tree.tree().parents().iter().map(|&parent| parent.into()).collect();
    let want = golden[&name("parents")].to_vec1::<i64>().expect("parents");
    assert_eq!(parents, want, "parents of round {index}");
    let path: Vec<u32> = round.path.iter().map(|&node| node as u32).collect();
    for (part, got) in [
        ("anchor", &tree.tokens()[..1]),
        ("start", &[round.start as u32]),
        ("tokens", tree.tokens()),
        ("depth", tree.tree().depths()),
        ("rank", tree.ranks()),
        ("target_argmax", &round.argmax),
        ("path", &path),
        ("bonus", &[round.bonus()]),
    ] {
        assert_eq!(got, ids(golden, &name(part)), "{part} of round {index}");
    }
    check(&name("draft_logits"), &round.draft_logits, &golden[&name("draft_logits")], 1e-3);
    check(&name("target_logits"), &round.target_logits, &golden[&name("target_logits")], 2e-4);
    let want = golden[&name("joint_logprob")].to_vec1::<f32>().expect("joint");
    for (node, (got, want)) in tree.joint_log_probs().iter().zip(want).enumerate() {
        assert!((got - f64::from(want)).abs() < 1e-3, "round {index}, node {node}: {got} and {want}");
    }
}

fn check_states(golden: &Golden, target: &Qwen35, drafter: &DFlash) {
    assert_eq!(target.committed(0), ids(golden, "final_committed")[0] as usize);
    for (layer, (keys, values)) in drafter.context_tensors(0).expect("context").iter().enumerate() {
        for (part, got) in [("k", keys), ("v", values)] {
            let name = format!("final_drafter_layer{layer}_{part}");
            check(&name, got, &golden[&name], 2e-4);
        }
    }
    for (name, got) in target.state_tensors(0).expect("states") {
        let (layer, part) = name.split_once('.').expect("layer and part");
        let (part, got) = match part {
            "state" => ("S", got.transpose(1, 2).and_then(|t| t.contiguous()).expect("k first")),
            "conv_state" => ("conv", got),
            other => (other, got),
        };
        let name = format!("final_{layer}_{part}");
        check(&name, &got.to_dtype(DType::F32).expect("f32"), &golden[&name], 2e-4);
    }
}

/// The target alone, one token a round.
fn greedy(target: &mut Qwen35, prompt: &[u32]) -> Vec<u32> {
    let (logits, _) = verify(target, prompt, DraftTree::chain(prompt.len()).expect("chain"));
    target.commit(&[(0..prompt.len()).collect()]).expect("commit");
    let mut tokens = vec![*argmax(&logits).last().expect("a row")];
    while tokens.len() < TOKENS {
        let (logits, _) = verify(target, &tokens[tokens.len() - 1..], DraftTree::chain(1).expect("root"));
        target.commit(&[vec![0]]).expect("commit");
        tokens.push(argmax(&logits)[0]);
    }
    tokens
}

fn run(file: &str, chain: bool) {
    let golden = golden(&format!("rounds-random/{file}.safetensors"));
    let prompt = ids(&golden, "prompt");
    let (mut target, mut drafter) = random_pair("dflash-random-new", 1);
    let plain = greedy(&mut target, &prompt);
    assert_eq!(plain, ids(&golden, "greedy"), "plain greedy text");
    target.reset(0).expect("reset");

    let (logits, features) = verify(&mut target, &prompt, DraftTree::chain(prompt.len()).expect("chain"));
    target.commit(&[(0..prompt.len()).collect()]).expect("commit");
    drafter.extend(0, &features).expect("extend");
    let mut root = *argmax(&logits).last().expect("a row");
    let (mut tokens, mut lengths) = (vec![root], Vec::new());
    while tokens.len() < TOKENS {
        let round = round(&mut target, &mut drafter, root, chain);
        if lengths.len() < STORED_ROUNDS {
            check_round(&golden, lengths.len(), &round);
        }
        lengths.push(round.path.len() as u32);
        tokens.extend(round.path[1..].iter().map(|&node| round.tree.tokens()[node]));
        root = round.bonus();
        tokens.push(root);
        if lengths.len() == STORED_ROUNDS {
            check_states(&golden, &target, &drafter);
        }
    }
    tokens.truncate(TOKENS);
    assert_eq!(tokens, plain, "speculative text");
    assert_eq!(tokens, ids(&golden, "run_tokens"));
    assert_eq!(lengths, ids(&golden, "accept_lengths"));
}

#[test]
fn tree_run() {
    run("tree", false);
}

#[test]
fn chain_run() {
    run("chain", true);
}

// A child's position is its depth, not its row: a draft from features of a run with branching paths depends on it.
#[test]
fn accepted_rows_are_the_features_that_count() {
    let golden = golden("rounds-random/tree.safetensors");
    let prompt = ids(&golden, "prompt");
    let (mut target, mut drafter) = random_pair("dflash-random-new", 1);
    let (logits, features) = verify(&mut target, &prompt, DraftTree::chain(prompt.len()).expect("chain"));
    target.commit(&[(0..prompt.len()).collect()]).expect("commit");
    drafter.extend(0, &features).expect("extend");
    let first = round(&mut target, &mut drafter, *argmax(&logits).last().expect("a row"), false);
    let horizon = drafter.block_size() - 1;
    let request = DraftRequest { slot: 0, root: first.bonus(), horizon };
    let right = drafter.draft(&[request]).expect("draft").remove(0);
    check("second draft", &right, &golden["r1_draft_logits"], 1e-3);

    // The same text, but the features of the first rows in packing order.
    let (mut target, mut drafter) = random_pair("dflash-random-new", 1);
    verify(&mut target, &prompt, DraftTree::chain(prompt.len()).expect("chain"));
    target.commit(&[(0..prompt.len()).collect()]).expect("commit");
    drafter.extend(0, &features).expect("extend");
    let (_, rows) = verify(&mut target, first.tree.tokens(), first.tree.tree().clone());
    drafter.extend(0, &rows.narrow(0, 0, first.path.len()).expect("rows")).expect("extend");
    let wrong = drafter.draft(&[request]).expect("draft").remove(0);
    assert!(max_diff(&wrong, &golden["r1_draft_logits"]) > 0.05);
}
