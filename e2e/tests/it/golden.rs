//! The target against stored vectors of torch and transformers: a random model (logits, trees, three speculative
//! rounds, the state after them) and the embedded model (every layer, logits, greedy texts).

use canopy_e2e::target::Target;
use canopy_kernels::DraftTree;

use crate::support::*;

const LOGITS: f32 = 2e-4;
const STATE: f32 = 1e-4;

fn tree(tensors: &Tensors, name: &str) -> DraftTree {
    DraftTree::new(ints(&tensors[name])).unwrap()
}

#[test]
fn random_logits() {
    let reference = tensors(golden("qwen35-random/reference.safetensors"));
    let ids: Vec<u32> = ints(&reference["input_ids"]);
    let logits = append(&mut random_model(1), 0, &ids);
    let error = max_abs(&logits, &reference["logits"].squeeze(0).unwrap());
    assert!(error < LOGITS, "{error}");
}

#[test]
fn random_tree_from_the_empty_state() {
    let reference = tensors(golden("qwen35-random/reference.safetensors"));
    let tokens: Vec<u32> = ints(&reference["tree_tokens"]);
    let logits = verify(&mut random_model(1), stream(0, &tokens, tree(&reference, "tree_parents")));
    let error = max_abs(&logits, &reference["tree_logits"]);
    assert!(error < LOGITS, "{error}");
}

/// Three rounds with branching paths; round 1 accepts only its root. Slot 1 of 2, so that slot 0 is not special.
#[test]
fn random_rounds_and_their_final_state() {
    let rounds = tensors(golden("qwen35-random/spec_rounds.safetensors"));
    let mut target = random_model(2);
    append(&mut target, 1, &ints(&rounds["prompt"]));
    for round in 0..3 {
        let name = |part: &str| format!("r{round}_{part}");
        let tokens: Vec<u32> = ints(&rounds[&name("tokens")]);
        let logits = verify(&mut target, stream(1, &tokens, tree(&rounds, &name("parents"))));
        let error = max_abs(&logits, &rounds[&name("logits")]);
        assert!(error < LOGITS, "round {round}: {error}");
        target.commit(&[ints(&rounds[&name("path")])]).unwrap();
    }
    assert_eq!(target.committed(1), 22);
    let mut compared = 0;
    for (name, tensor) in target.state_tensors(1).unwrap() {
        let (layer, part) = name.strip_prefix("layer").unwrap().split_once('.').unwrap();
        let golden = match part {
            "state" => rounds[&format!("final_layer{layer}_S")].transpose(1, 2).unwrap(),
            "conv_state" => rounds[&format!("final_layer{layer}_conv")].clone(),
            part => rounds[&format!("final_layer{layer}_{part}")].clone(),
        };
        let error = max_abs(&tensor, &golden);
        assert!(error < STATE, "{name}: {error}");
        compared += 1;
    }
    assert_eq!(compared, 16);
}

#[test]
fn embedded_layers_and_head() {
    let golden = tensors(golden("canopy-tiny/golden.safetensors"));
    let ids: Vec<u32> = ints(&golden["p0.ids"]);
    let mut target = tiny_model(1);
    let embedding = target.head().embed(&ids).unwrap();
    assert_eq!(bits(&embedding), bits(&golden["p0.embed"]));
    let taps: Vec<usize> = (0..8).collect();
    target.set_taps(&taps).unwrap();
    let verified = target.verify(&[chain(0, &ids)]).unwrap();
    let features = verified.features.unwrap();
    for layer in taps {
        let stream = features.narrow(1, layer * 256, 256).unwrap();
        let error = max_abs(&stream, &golden[&format!("p0.layer{layer}")]);
        assert!(error < 1e-4, "layer {layer}: {error}");
    }
    let last = features.narrow(1, 7 * 256, 256).unwrap().contiguous().unwrap();
    let normed = target.final_norm(&last).unwrap();
    let error = max_abs(&normed, &golden["p0.final_norm"]);
    assert!(error < LOGITS, "final norm: {error}");
    assert_eq!(bits(&target.head().logits(&normed).unwrap()), bits(&verified.logits.unwrap()));
}

#[test]
fn embedded_logits() {
    let golden = tensors(golden("canopy-tiny/golden.safetensors"));
    for prompt in 0..5 {
        let ids: Vec<u32> = ints(&golden[&format!("p{prompt}.ids")]);
        let logits = append(&mut tiny_model(1), 0, &ids);
        let (logits, expected) = match golden.get(&format!("p{prompt}.logits")) {
            Some(expected) => (logits, expected),
            None => {
                let argmax: Vec<u32> = ints(&golden["p4.argmax"]);
                let own: Vec<u32> = (0..ids.len()).map(|i| argmax_of(&logits, i)).collect();
                assert_eq!(own, argmax);
                (logits.narrow(0, ids.len() - 4, 4).unwrap(), &golden["p4.logits_last4"])
            }
        };
        let error = max_abs(&logits, expected);
        assert!(error < LOGITS, "prompt {prompt}: {error}");
    }
}

/// Greedy texts agree up to the first near-tie of the reference.
#[test]
fn embedded_greedy_texts() {
    let golden = tensors(golden("canopy-tiny/golden.safetensors"));
    let mut target = tiny_model(1);
    let mut agreed = 0;
    for prompt in 0..5 {
        let ids: Vec<u32> = ints(&golden[&format!("p{prompt}.ids")]);
        let expected: Vec<u32> = ints(&golden[&format!("p{prompt}.greedy")]);
        let margins = floats(&golden[&format!("p{prompt}.greedy_margin")]);
        target.reset(0).unwrap();
        let last = append(&mut target, 0, &ids);
        let text = greedy(&mut target, 0, last, expected.len());
        let clear = margins.iter().position(|&margin| margin < 1e-3).unwrap_or(expected.len());
        assert_eq!(text[..clear], expected[..clear], "prompt {prompt}");
        agreed += clear;
    }
    assert!(agreed >= 200, "only {agreed} of 320 tokens are before a near-tie");
}

fn argmax_of(logits: &candle_core::Tensor, row: usize) -> u32 {
    argmax(&logits.narrow(0, row, 1).unwrap())
}
