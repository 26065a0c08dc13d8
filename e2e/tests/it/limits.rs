//! Lengths: max_tokens at every edge of a block, prompts at every edge of a chunk, the context's end, the queue's.

use canopy_e2e::Error;
use canopy_e2e::engine::{EngineConfig, FinishReason, GenerateRequest, Mode, Speculation};

use crate::toy::{Toy, best, hashed};

const VOCAB: usize = 7;
const MODES: [(Mode, Option<usize>); 5] = [
    (Mode::Ar, None),
    (Mode::Chain, None),
    (Mode::Tree, Some(15)),
    (Mode::Tree, Some(64)),
    (Mode::Auto, None),
];

fn serial(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..count {
        history.push(best(&hashed(&history, VOCAB)));
    }
    history.split_off(prompt.len())
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| i * i % VOCAB as u32).collect()
}

fn request(length: usize, max_tokens: usize, (mode, budget): (Mode, Option<usize>)) -> GenerateRequest {
    GenerateRequest {
        speculation: Speculation { mode, budget },
        ..GenerateRequest::new(prompt(length), max_tokens)
    }
}

#[test]
fn exactly_max_tokens_come_out() {
    let mut toy = Toy::new(VOCAB);
    toy.block_size = 16;
    let (mut engine, _) = toy.engine();
    for mode in MODES {
        for max_tokens in [1, 7, 8, 9, 15, 16, 17] {
            let got = engine.run(request(3, max_tokens, mode)).unwrap();
            let ids: Vec<u32> = got.tokens.iter().map(|t| t.id).collect();
            assert_eq!(ids, serial(&prompt(3), max_tokens), "{mode:?}");
            assert_eq!(
                (got.stats.completion_tokens, got.reason),
                (max_tokens, FinishReason::Length),
                "{mode:?}"
            );
            assert_eq!(got.text.len(), max_tokens, "{mode:?}");
        }
    }
}

#[test]
fn prompts_of_every_length_and_chunking_continue_alike() {
    for chunk in [1, 3, 8, 256] {
        let mut toy = Toy::new(VOCAB);
        toy.config = EngineConfig { prefill_chunk: chunk, ..EngineConfig::default() };
        let (mut engine, log) = toy.engine();
        for mode in MODES {
            for length in (1..=20).chain([31, 32, 33]) {
                let got = engine.run(request(length, 12, mode)).unwrap();
                let ids: Vec<u32> = got.tokens.iter().map(|t| t.id).collect();
                assert_eq!(ids, serial(&prompt(length), 12), "{mode:?}, prompt {length}, chunk {chunk}");
            }
        }
        let log = log.lock().unwrap();
        assert!(log.commits.iter().any(|(_, tokens)| tokens.len() == chunk.min(33)));
        // A chunk of the prompt, or a round: a draft block of 8, or a looked up chain of at most all 12 tokens.
        assert!(log.commits.iter().all(|(_, tokens)| tokens.len() <= chunk.max(12)));
    }
}

#[test]
fn the_contexts_end_ends_the_stream_and_no_node_lies_beyond_it() {
    // The toy target panics when a node's position reaches its context.
    for mode in MODES {
        for length in [1, 20, 29, 30, 31] {
            let mut toy = Toy::new(VOCAB);
            toy.context = 32;
            let (mut engine, _) = toy.engine();
            let got = engine.run(request(length, 1000, mode)).unwrap();
            let ids: Vec<u32> = got.tokens.iter().map(|t| t.id).collect();
            assert_eq!(ids, serial(&prompt(length), 32 - length), "{mode:?}, prompt {length}");
            assert_eq!(got.reason, FinishReason::Length);
        }
        let mut toy = Toy::new(VOCAB);
        toy.context = 32;
        assert!(matches!(
            toy.engine().0.run(request(32, 1, mode)),
            Err(Error::Request { field: "prompt", .. })
        ));
    }
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_there_is_room() {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.config.max_waiting) = (2, 1);
    let (mut engine, _) = toy.engine();
    let ask = || request(3, 4, (Mode::Ar, None));
    for _ in 0..3 {
        engine.submit(ask()).unwrap();
    }
    assert!(matches!(engine.submit(ask()), Err(Error::Full { running: 0, waiting: 3 })));
    engine.step().unwrap();
    assert_eq!(engine.load(), (2, 1));
    assert!(matches!(engine.submit(ask()), Err(Error::Full { running: 2, waiting: 1 })));
    while engine.load() != (0, 0) {
        engine.step().unwrap();
    }
    engine.submit(ask()).unwrap();
}

#[test]
fn engine_limits_out_of_range_are_refused_by_name() {
    for (config, key) in [
        (EngineConfig { prefill_chunk: 0, ..EngineConfig::default() }, "prefill_chunk"),
        (EngineConfig { prefill_chunk: 257, ..EngineConfig::default() }, "prefill_chunk"),
        (EngineConfig { default_budget: 256, ..EngineConfig::default() }, "default_budget"),
        (EngineConfig { auto_budget: 256, ..EngineConfig::default() }, "auto_budget"),
    ] {
        let mut toy = Toy::new(VOCAB);
        toy.config = config;
        match toy.try_engine() {
            Err(Error::Config { key: got, .. }) => assert_eq!(got, key),
            other => panic!("{:?}", other.err()),
        }
    }
}
