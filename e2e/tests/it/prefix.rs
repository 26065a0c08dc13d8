//! Prefix reuse: a prompt that starts like an earlier one gives the text that it gives alone, whatever is drafted, whatever
//! was evicted, and says how much it did not read again.

use std::sync::Arc;

use canopy_e2e::engine::{Engine, EngineConfig, GenerateRequest, Mode, Sampling, Speculation};
use canopy_e2e::loader::{LoadOptions, load};
use canopy_e2e::tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::embedded::{AR, DRAFTED, ids, prompts};
use crate::toy::{Toy, hashed};

const VOCAB: usize = 9;

fn prompt(length: usize, salt: usize) -> Vec<u32> {
    (0..length).map(|i| ((i * i + i / 7 + salt) % VOCAB) as u32).collect()
}

fn toy(cache_bytes: usize, cache_page: usize) -> Toy {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.context) = (3, 1024);
    toy.config = EngineConfig { cache_bytes, cache_page, prefill_chunk: 50, ..EngineConfig::default() };
    toy
}

/// An engine over the embedded pair that saves prefixes.
fn engine(slots: usize, cache_bytes: usize, cache_page: usize) -> (Engine, Arc<Tokenizer>) {
    let loaded = load(&LoadOptions { slots, context_len: Some(2048), ..LoadOptions::default() }).unwrap();
    let tokenizer = loaded.tokenizer;
    let config = EngineConfig { cache_bytes, cache_page, ..EngineConfig::default() };
    (Engine::new(loaded.target, loaded.drafter, tokenizer.clone(), config).unwrap(), tokenizer)
}

#[test]
fn what_was_read_is_not_read_again_and_is_told() {
    let (mut engine, log) = toy(1 << 20, 100).engine();
    let request = GenerateRequest::new(prompt(350, 0), 9);
    let cold = engine.run(request.clone()).unwrap();
    assert_eq!((cold.stats.cached_tokens, engine.stats().cache.entries), (0, 3));
    let before = log.lock().unwrap().passes.len();
    let warm = engine.run(request.clone()).unwrap();
    assert_eq!((warm.stats.cached_tokens, warm.stats.prompt_tokens), (300, 350));
    assert_eq!(log.lock().unwrap().passes[before], 50, "one pass reads the rest");
    assert_eq!(ids(&warm), ids(&cold));
    let unsaved = GenerateRequest { reuse_prefix: false, ..request };
    let fresh = engine.run(unsaved).unwrap();
    assert_eq!((fresh.stats.cached_tokens, ids(&fresh)), (0, ids(&cold)));
    let stats = engine.stats().cache;
    assert_eq!((stats.hits, stats.misses, stats.reused_tokens), (1, 1, 300));
    assert!(stats.bytes > 3 * 1000 && stats.bytes <= stats.budget);
}

#[test]
fn the_next_turn_of_a_conversation_starts_where_it_was_said_to() {
    let (mut engine, _) = toy(1 << 20, 1000).engine();
    let first = GenerateRequest { save_at: Some(120), ..GenerateRequest::new(prompt(125, 3), 5) };
    engine.run(first.clone()).unwrap();
    let mut longer = first.prompt[..120].to_vec();
    longer.extend(prompt(80, 5));
    let second = GenerateRequest { prompt: longer, save_at: None, ..first };
    assert_eq!(engine.run(second).unwrap().stats.cached_tokens, 120);
}

#[test]
fn a_stream_that_never_drafts_saves_nothing_that_a_drafting_one_could_use() {
    let (mut engine, _) = toy(1 << 20, 100).engine();
    let ar = Speculation { mode: Mode::Ar, budget: None };
    let tree = Speculation { mode: Mode::Tree, budget: Some(15) };
    let request = GenerateRequest { speculation: ar, ..GenerateRequest::new(prompt(250, 1), 20) };
    let cached = |engine: &mut Engine, speculation| {
        let got = engine.run(GenerateRequest { speculation, ..request.clone() }).unwrap();
        (got.stats.cached_tokens, ids(&got))
    };
    let (cold, text) = cached(&mut engine, ar);
    assert_eq!(cold, 0);
    // The toy drafter ends the test when its context is not the committed tokens.
    for (speculation, expected) in [(tree, 0), (tree, 200), (ar, 200)] {
        assert_eq!(cached(&mut engine, speculation), (expected, text.clone()));
    }
}

#[test]
fn the_prefixes_of_a_stream_that_fails_are_forgotten() {
    let mut toy = toy(1 << 20, 100);
    toy.model = Arc::new(|history| {
        let mut logits = hashed(history, VOCAB);
        logits[0] = if history.len() == 250 { f32::NAN } else { logits[0] };
        logits
    });
    let (mut engine, _) = toy.engine();
    engine.run(GenerateRequest::new(prompt(250, 1), 3)).unwrap_err();
    assert_eq!(engine.stats().cache.entries, 0);
    engine.run(GenerateRequest::new(prompt(240, 1), 3)).unwrap();
    assert_eq!(engine.stats().cache.entries, 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Prompts that share prefixes of all lengths, little room, several streams at once, every mode: the texts are those
    /// of an engine that saves nothing, and the bytes stay within their budget.
    #[test]
    fn reuse_changes_no_text(
        asked in prop::collection::vec((0usize..3, 1usize..400, 0usize..4, 0usize..12), 1..16),
        budget in 1000usize..20_000,
        page in 30usize..200,
    ) {
        let requests: Vec<GenerateRequest> = asked.iter().map(|&(salt, length, mode, tail)| {
            let mut tokens = prompt(length, salt);
            tokens.extend(prompt(tail, salt + 1));
            GenerateRequest {
                speculation: Speculation { mode: Mode::ALL[mode], budget: None },
                save_at: Some(length),
                ..GenerateRequest::new(tokens, 12)
            }
        }).collect();
        let (mut saving, _) = toy(budget, page).engine();
        let (mut plain, _) = toy(0, page).engine();
        let got = saving.run_all(requests.clone()).unwrap();
        for (request, got) in requests.into_iter().zip(got) {
            prop_assert_eq!(ids(&got.unwrap()), ids(&plain.run(request).unwrap()));
        }
        let stats = saving.stats().cache;
        prop_assert!(stats.bytes <= budget);
        prop_assert_eq!(stats.entries == 0, stats.bytes == 0);
    }
}

#[test]
fn warm_text_is_cold_text_byte_for_byte_in_every_mode() {
    let (mut cold, tokenizer) = engine(2, 0, 128);
    let shared: Vec<u32> =
        prompts("code", 12).iter().flat_map(|text| tokenizer.encode(text).unwrap()).take(700).collect();
    // Prompts that leave the shared one at different places, around pages and chunks.
    let cuts = [1, 65, 127, 128, 129, 255, 256, 300, 511, 513, 640, 700];
    let tail = tokenizer.encode("\n\ndef parse(text):\n    ").unwrap();
    let requests: Vec<GenerateRequest> = cuts
        .iter()
        .enumerate()
        .map(|(index, &cut)| GenerateRequest {
            logprobs: Some(1),
            sampling: Sampling { temperature: [0.0, 0.9][index % 2], seed: 4, ..Sampling::default() },
            ..GenerateRequest::new([&shared[..cut], &tail].concat(), 40)
        })
        .collect();
    let told = |engine: &mut Engine, request: &GenerateRequest, speculation| {
        let got = engine.run(GenerateRequest { speculation, ..request.clone() }).unwrap();
        let bits: Vec<_> = got.tokens.iter().map(|t| (t.id, t.logprob.map(f32::to_bits))).collect();
        (got.stats.cached_tokens, bits, got.text)
    };
    let modes = [AR, DRAFTED[0], DRAFTED[3], DRAFTED[6]];
    let plain: Vec<_> = requests.iter().map(|request| told(&mut cold, request, AR)).collect();
    // Room for everything, then for a few prefixes only.
    for (budget, evicts) in [(1 << 30, false), (24 << 20, true)] {
        let (mut warm, _) = engine(2, budget, 128);
        let mut reused = 0;
        for round in 0..2 {
            for (index, request) in requests.iter().enumerate() {
                let (cached, bits, text) = told(&mut warm, request, modes[(index + round) % modes.len()]);
                assert_eq!(
                    (&bits, &text),
                    (&plain[index].1, &plain[index].2),
                    "prompt {index}, round {round}"
                );
                reused += cached;
            }
        }
        let stats = warm.stats().cache;
        assert!(reused > 1000 && stats.reused_tokens == reused as u64, "{stats:?}");
        assert_eq!(stats.evictions > 0, evicts, "{stats:?}");
        assert!(stats.bytes <= budget);
    }
}

#[test]
fn streams_at_once_share_a_prefix_and_keep_their_texts() {
    let (mut warm, tokenizer) = engine(4, 1 << 30, 128);
    let (mut cold, _) = engine(4, 0, 128);
    let shared: Vec<u32> =
        prompts("code", 12).iter().flat_map(|text| tokenizer.encode(text).unwrap()).take(300).collect();
    let requests: Vec<GenerateRequest> = prompts("fixed", 12)
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let tail = tokenizer.encode(text).unwrap();
            let speculation = [AR, DRAFTED[2], DRAFTED[6]][index % 3];
            GenerateRequest { speculation, ..GenerateRequest::new([&shared[..], &tail].concat(), 32) }
        })
        .collect();
    let all = |engine: &mut Engine| -> Vec<Vec<u32>> {
        engine.run_all(requests.clone()).unwrap().into_iter().map(|got| ids(&got.unwrap())).collect()
    };
    let expected = all(&mut cold);
    assert_eq!(all(&mut warm), expected);
    assert_eq!(all(&mut warm), expected);
    assert!(warm.stats().cache.reused_tokens > 15 * 256, "{:?}", warm.stats().cache);
}
