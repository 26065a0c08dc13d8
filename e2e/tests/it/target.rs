//! The target's promises to the engine: bits do not depend on how rows are grouped, a verify changes nothing, a
//! commit equals plain decoding, a saved slot continues as if nothing had happened, bad requests name the field.

use canopy_e2e::Error;
use canopy_e2e::embedded;
use canopy_e2e::loader::{LoadOptions, load_target};
use canopy_e2e::target::{LogitRows, PromptChunk, Target, VerifyStream};
use canopy_kernels::DraftTree;
use canopy_kernels::tree_gdn::{Solve, Variant};

use crate::support::*;

/// 20 tokens of a plausible text.
fn prompt() -> Vec<u32> {
    let text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)";
    let tokenizer = canopy_e2e::loader::load_tokenizer(&embedded::target(), tiny_model(1).config()).unwrap();
    let mut ids = tokenizer.encode(text).unwrap();
    assert!(ids.len() >= 20);
    ids.truncate(20);
    ids
}

#[test]
fn every_chunking_of_a_prompt_gives_the_same_bits() {
    let ids = prompt();
    let mut target = tiny_model(1);
    let whole = bits(&append(&mut target, 0, &ids));
    let state = state_bits(&target, 0);
    for size in 1..=ids.len() {
        target.reset(0).unwrap();
        let mut rows = Vec::new();
        for part in ids.chunks(size) {
            rows.extend(bits(&append(&mut target, 0, part)));
        }
        assert_eq!(rows, whole, "chunks of {size}");
        assert_eq!(state_bits(&target, 0), state, "chunks of {size}");
    }
}

/// Two prompts in one pass, one of them cut into passes anywhere, against their rows as trees.
#[test]
fn a_prefill_pass_has_the_bits_of_verified_chains() {
    let mut target = model(&embedded::target(), 2, 1024);
    target.set_taps(&[1, 6]).unwrap();
    let long: Vec<u32> = (0..700).map(|i| (i * i + 7 * i) % 6000).collect();
    let prompts = [&long[..], &long[300..330]];
    let mut want = Vec::new();
    for (slot, prompt) in prompts.iter().enumerate() {
        let (mut logits, mut features) = (Vec::new(), Vec::new());
        for part in prompt.chunks(200) {
            let verified =
                target.verify(&[stream(slot, part, DraftTree::chain(part.len()).unwrap())]).unwrap();
            target.commit(&[(0..part.len()).collect()]).unwrap();
            logits.extend(bits(&verified.logits.unwrap()));
            features.extend(bits(&verified.features.unwrap()));
        }
        want.push((logits, features, state_bits(&target, slot)));
    }
    for cuts in [vec![700], vec![256, 444], vec![1, 698, 1]] {
        let (mut logits, mut features) = (vec![Vec::new(); 2], vec![Vec::new(); 2]);
        (0..2).for_each(|slot| target.reset(slot).unwrap());
        let mut first = 0;
        for (pass, &rows) in cuts.iter().enumerate() {
            let chunk = |slot, tokens: &[u32]| PromptChunk {
                slot,
                tokens: tokens.to_vec(),
                logits: LogitRows::All,
                features: true,
            };
            let mut chunks = vec![chunk(0, &long[first..first + rows])];
            if pass == 0 {
                chunks.push(chunk(1, prompts[1]));
            }
            first += rows;
            let read = target.prefill(&chunks).unwrap();
            assert_eq!(read.logit_rows, read.cu_rows.iter().map(|&row| row as usize).collect::<Vec<_>>());
            let (all, taps) = (read.logits.unwrap(), read.features.unwrap());
            for (chunk, ends) in chunks.iter().zip(read.cu_rows.windows(2)) {
                let part = |of: &candle_core::Tensor| {
                    bits(&of.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize).unwrap())
                };
                logits[chunk.slot].extend(part(&all));
                features[chunk.slot].extend(part(&taps));
            }
        }
        for (slot, (want_logits, want_features, want_state)) in want.iter().enumerate() {
            assert_eq!(&logits[slot], want_logits, "logits of slot {slot}, cuts {cuts:?}");
            assert_eq!(&features[slot], want_features, "features of slot {slot}, cuts {cuts:?}");
            assert_eq!(&state_bits(&target, slot), want_state, "states of slot {slot}, cuts {cuts:?}");
        }
    }
    let beyond = PromptChunk { slot: 0, tokens: vec![1; 2000], logits: LogitRows::None, features: false };
    assert!(target.prefill(&[beyond]).is_err());
}

/// Known failure 16 among others: siblings share a position, so a row is that of the chain along its own path.
#[test]
fn tree_rows_equal_their_own_chains() {
    let ids = prompt();
    let tree = DraftTree::new(vec![-1, 0, 0, 1, 2, 2, 1, 5, 3, 0]).unwrap();
    let tokens: Vec<u32> = (0..10).map(|i| 300 + 37 * i).collect();
    let mut target = tiny_model(2);
    append(&mut target, 1, &ids);
    let before = state_bits(&target, 1);
    let saved = target.snapshot(1).unwrap();
    let rows = verify(&mut target, stream(1, &tokens, tree.clone()));
    assert_eq!(state_bits(&target, 1), before, "verify changed a committed state");
    for node in 0..tree.len() {
        target.restore(1, &saved).unwrap();
        let path = tree.path(node);
        let along: Vec<u32> = path.iter().map(|&node| tokens[node]).collect();
        let chain_rows = append(&mut target, 1, &along);
        let last = chain_rows.get(path.len() - 1).unwrap();
        assert_eq!(bits(&rows.get(node).unwrap()), bits(&last), "node {node}");
        let chain_state = state_bits(&target, 1);

        target.restore(1, &saved).unwrap();
        verify(&mut target, stream(1, &tokens, tree.clone()));
        target.commit(&[path]).unwrap();
        assert_eq!(state_bits(&target, 1), chain_state, "commit of node {node}");
    }
}

/// Known failure 11: reject everything after depth 1, decode three tokens, compare with a fresh run on that text.
#[test]
fn rejection_leaves_no_trace() {
    let ids = prompt();
    let mut target = tiny_model(1);
    append(&mut target, 0, &ids);
    let tree = DraftTree::new(vec![-1, 0, 0, 1, 2, 3, 4]).unwrap();
    let tokens = [900, 31, 77, 1200, 5, 640, 2000];
    verify(&mut target, stream(0, &tokens, tree));
    target.commit(&[vec![0, 2]]).unwrap();
    let after = [411, 29, 3100];
    let rows: Vec<_> = after.iter().flat_map(|&id| bits(&append(&mut target, 0, &[id]))).collect();

    let mut fresh = tiny_model(1);
    append(&mut fresh, 0, &[ids.as_slice(), &[900, 77]].concat());
    let fresh_rows: Vec<_> = after.iter().flat_map(|&id| bits(&append(&mut fresh, 0, &[id]))).collect();
    assert_eq!(rows, fresh_rows);
    assert_eq!(state_bits(&target, 0), state_bits(&fresh, 0));
}

#[test]
fn a_batch_equals_its_streams_alone() {
    let ids = prompt();
    let mut target = tiny_model(3);
    let trees = [vec![-1, 0, 0, 1], vec![-1], vec![-1, 0, 1, 2, 2]].map(|tree| DraftTree::new(tree).unwrap());
    let tokens: [&[u32]; 3] = [&[7, 8, 9, 10], &[11], &[12, 13, 14, 15, 16]];
    let slots = [2, 0, 1];
    let wanted = [LogitRows::All, LogitRows::Last, LogitRows::None];
    target.set_taps(&[6, 1]).unwrap();
    for slot in 0..3 {
        append(&mut target, slot, &ids[..4 + 5 * slot]);
    }
    let alone: Vec<_> = (0..3)
        .map(|i| {
            let verified = target.verify(&[stream(slots[i], tokens[i], trees[i].clone())]).unwrap();
            (verified.logits.unwrap(), verified.features.unwrap())
        })
        .collect();
    let streams: Vec<_> = (0..3)
        .map(|i| VerifyStream { logits: wanted[i], ..stream(slots[i], tokens[i], trees[i].clone()) })
        .collect();
    let verified = target.verify(&streams).unwrap();
    assert_eq!(verified.logit_rows, [0, 4, 5, 5]);
    let logits = verified.logits.unwrap();
    assert_eq!(logits.dims(), [5, 6144]);
    assert_eq!(bits(&logits.narrow(0, 0, 4).unwrap()), bits(&alone[0].0));
    assert_eq!(bits(&logits.narrow(0, 4, 1).unwrap()), bits(&alone[1].0));
    let features: Vec<u32> = alone.iter().flat_map(|(_, features)| bits(features)).collect();
    let own = verified.features.unwrap();
    assert_eq!(own.dims(), [10, 512]);
    assert_eq!(bits(&own), features);

    let committed: Vec<_> = (0..3).map(|slot| target.committed(slot)).collect();
    target.commit(&[vec![0, 1, 3], vec![0], vec![]]).unwrap();
    assert_eq!([2, 0, 1].map(|slot| target.committed(slot) - committed[slot]), [3, 1, 0]);

    let none = VerifyStream { logits: LogitRows::None, ..chain(0, &[1, 2]) };
    let verified = target.verify(&[none]).unwrap();
    assert!(verified.logits.is_none());
    assert_eq!(verified.logit_rows, [0, 0]);
}

#[test]
fn threads_do_not_change_bits() {
    let ids = prompt();
    let run = |threads| {
        canopy_e2e::threads::pool(Some(threads)).unwrap().install(|| {
            let mut target = tiny_model(1);
            (bits(&append(&mut target, 0, &ids)), state_bits(&target, 0))
        })
    };
    let one = run(1);
    for threads in [2, 3, 5] {
        assert_eq!(run(threads), one, "{threads} threads");
    }
}

#[test]
fn a_snapshot_continues_in_another_slot() {
    let ids = prompt();
    let mut target = tiny_model(2);
    append(&mut target, 0, &ids[..12]);
    let saved = target.snapshot(0).unwrap();
    let there = bits(&append(&mut target, 0, &ids[12..]));
    append(&mut target, 1, &ids[3..9]);
    target.restore(1, &saved).unwrap();
    assert_eq!(target.committed(1), 12);
    assert_eq!(bits(&append(&mut target, 1, &ids[12..])), there);
    assert_eq!(state_bits(&target, 0), state_bits(&target, 1));

    let empty = {
        let fresh = tiny_model(1);
        fresh.snapshot(0).unwrap()
    };
    target.restore(1, &empty).unwrap();
    assert_eq!(target.committed(1), 0);
    target.reset(0).unwrap();
    assert_eq!(bits(&append(&mut target, 1, &ids)), bits(&append(&mut target, 0, &ids)));
}

#[test]
fn the_closed_form_agrees_with_the_walk() {
    let ids = prompt();
    let solve = LoadOptions {
        slots: 1,
        context_len: Some(64),
        variant: Some(Variant::Solve(Solve::Forward)),
        ..LoadOptions::default()
    };
    let mut closed = load_target(&embedded::target(), &solve).unwrap();
    let mut walk = tiny_model(1);
    let tree = DraftTree::new(vec![-1, 0, 0, 1, 2, 2]).unwrap();
    let tokens = [42, 43, 44, 45, 46, 47];
    for target in [&mut closed, &mut walk] {
        append(target, 0, &ids);
        verify(target, stream(0, &tokens, tree.clone()));
        target.commit(&[vec![0, 2, 5]]).unwrap();
    }
    let error = max_abs(&append(&mut closed, 0, &[48]), &append(&mut walk, 0, &[48]));
    assert!(error < 1e-3, "{error}");
}

fn field(result: canopy_e2e::Result<impl std::fmt::Debug>) -> (&'static str, String) {
    match result {
        Err(error @ Error::Request { field, .. }) => (field, error.to_string()),
        other => panic!("expected a request error, got {other:?}"),
    }
}

#[test]
fn bad_requests_name_the_field() {
    let mut target = random_model(2);
    let (name, text) = field(target.verify(&[chain(2, &[1])]));
    assert_eq!((name, text.as_str()), ("slot", "slot: expected below the model's 2 slots, got 2"));
    let (name, text) = field(target.verify(&[chain(0, &[1, 512])]));
    assert_eq!(
        (name, text.as_str()),
        ("tokens", "tokens: expected token ids below the vocabulary's 512, got 512")
    );
    let (name, text) = field(target.verify(&[chain(0, &[1; 65])]));
    assert_eq!(
        (name, text.as_str()),
        ("tokens", "tokens: expected positions within the context of 64, got 65")
    );
    let short = VerifyStream { tokens: vec![1, 2], ..chain(0, &[1, 2, 3]) };
    assert_eq!(field(target.verify(&[short])).0, "tokens");
    assert_eq!(field(target.verify(&[])).0, "streams");
    assert_eq!(field(target.set_taps(&[8])).0, "taps");
    assert_eq!(field(target.reset(2)).0, "slot");
    assert_eq!(field(target.snapshot(2)).0, "slot");
    assert_eq!(field(target.commit(&[vec![0]])).0, "paths");
    let twice = target.verify(&[chain(0, &[1]), chain(0, &[2])]).unwrap_err();
    assert!(twice.to_string().contains("slot 0 twice"), "{twice}");

    append(&mut target, 0, &[1; 60]);
    assert_eq!(field(target.verify(&[chain(0, &[1; 5])])).0, "tokens");
    append(&mut target, 0, &[1; 4]);
    assert_eq!(target.committed(0), target.context_len());
    let foreign = tiny_model(1).snapshot(0).unwrap();
    let other = canopy_e2e::target::Snapshot::new("not a snapshot", 14);
    assert_eq!(field(target.restore(0, &other)).0, "snapshot");
    assert_eq!(field(target.restore(0, &foreign)).0, "snapshot");
}

#[test]
fn a_refused_commit_can_be_repeated() {
    let mut target = random_model(1);
    append(&mut target, 0, &[1, 2, 3]);
    let state = state_bits(&target, 0);
    let tree = DraftTree::new(vec![-1, 0, 0]).unwrap();
    verify(&mut target, stream(0, &[4, 5, 6], tree));
    let error = target.commit(&[vec![0, 1, 2]]).unwrap_err();
    assert!(error.to_string().contains("entry 2 is node 2"), "{error}");
    assert_eq!(target.committed(0), 3);
    assert_eq!(state_bits(&target, 0), state);
    target.commit(&[vec![0, 2]]).unwrap();
    assert_eq!(target.committed(0), 5);
    assert_eq!(field(target.commit(&[vec![0]])).0, "paths");

    verify(&mut target, chain(0, &[7]));
    target.reset(0).unwrap();
    assert_eq!(field(target.commit(&[vec![0]])).0, "paths");
    target.commit(&[vec![]]).unwrap();
    assert_eq!(target.committed(0), 0);
}
