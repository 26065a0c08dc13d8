//! Prompt chunks share rounds with decoding, and nobody waits for somebody else's long prompt.

use canopy_e2e::engine::{EngineConfig, Event, GenerateRequest, Mode, Speculation, StreamId};
use proptest::prelude::*;

use crate::embedded::{self, ids, prompts};
use crate::toy::Toy;

const VOCAB: usize = 9;

fn prompt(length: usize, salt: usize) -> Vec<u32> {
    (0..length).map(|i| ((i * i + i / 3 + salt) % VOCAB) as u32).collect()
}

#[test]
fn a_short_request_beside_a_long_prompt_starts_within_a_few_rounds() {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.context, toy.config.prefill_chunk) = (3, 2048, 128);
    let (mut engine, log) = toy.engine();
    // One token a round, so that it is still decoding when the others have started.
    let mut plain = GenerateRequest::new(prompt(3, 0), 400);
    plain.speculation = Speculation { mode: Mode::Ar, ..Speculation::default() };
    let decoding = engine.submit(plain).unwrap();
    engine.step().unwrap();
    let long = engine.submit(GenerateRequest::new(prompt(1900, 1), 4)).unwrap();
    engine.step().unwrap();
    let short = engine.submit(GenerateRequest::new(prompt(70, 2), 4)).unwrap();
    let mut first = std::collections::HashMap::<StreamId, usize>::new();
    for round in 1..=40 {
        let events = engine.step().unwrap();
        let tokens = |id| events.iter().any(|(of, e)| *of == id && matches!(e, Event::Text { .. }));
        assert!(tokens(decoding), "the decoding stream gets tokens in round {round}");
        for id in [long, short] {
            if tokens(id) {
                first.entry(id).or_insert(round);
            }
        }
    }
    // Half a chunk a round: 70 tokens take two.
    assert_eq!(first[&short], 2);
    // What others left over is the long one's: (1900 - 128) less 122 for two rounds, then 128 a round.
    assert!(first[&long] <= 15, "{first:?}");
    let log = log.lock().unwrap();
    assert!(log.passes.iter().all(|&rows| rows <= 128 + 3 * 65), "a pass is bounded");
}

#[test]
fn long_parts_of_prompts_are_read_beside_the_others_and_in_whole_passes_alone() {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.context, toy.config.prefill_chunk) = (3, 8192, 2048);
    let (mut engine, log) = toy.engine();
    let alone = engine.run(GenerateRequest::new(prompt(5000, 1), 6)).unwrap();
    let mut plain = GenerateRequest::new(prompt(3, 0), 400);
    plain.speculation = Speculation { mode: Mode::Ar, ..Speculation::default() };
    let decoding = engine.submit(plain).unwrap();
    engine.step().unwrap();
    let long = engine.submit(GenerateRequest::new(prompt(5000, 1), 6)).unwrap();
    let short = engine.submit(GenerateRequest::new(prompt(100, 2), 6)).unwrap();
    let (mut first, mut text) = (std::collections::HashMap::<StreamId, usize>::new(), Vec::new());
    for round in 1..=14 {
        for (id, event) in engine.step().unwrap() {
            if let Event::Text { tokens, .. } = event {
                first.entry(id).or_insert(round);
                text.extend(tokens.iter().filter(|_| id == long).map(|token| token.id));
            }
        }
        assert_eq!(first.get(&decoding), Some(&1), "the decoding stream gets tokens from the first round on");
    }
    // 512 rows a round beside others; the short prompt is no long part and goes along with the first round.
    assert_eq!((first[&short], first[&long]), (1, 10));
    let whole: Vec<u32> = alone.tokens.iter().map(|token| token.id).collect();
    assert_eq!(text, whole[..text.len()]);
    // The toy's default reads a pass by slices.
    assert!(log.lock().unwrap().passes.iter().all(|&rows| rows <= 256 + 3 * 65), "a pass is bounded");
}

#[test]
fn the_embedded_pair_says_the_same_however_its_prompts_are_read() {
    let run = |prefill_chunk, requests: &[GenerateRequest]| {
        let config = EngineConfig { prefill_chunk, ..EngineConfig::default() };
        let (mut engine, _) = embedded::engine_with(3, Some(2048), config);
        let streams: Vec<StreamId> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut texts = vec![Vec::new(); requests.len()];
        while engine.load() != (0, 0) {
            for (id, event) in engine.step().unwrap() {
                let stream = streams.iter().position(|&stream| stream == id).unwrap();
                if let Event::Text { tokens, .. } = event {
                    texts[stream].extend(tokens.iter().map(|t| t.id));
                }
            }
        }
        texts
    };
    let request = |length: u32, mode| GenerateRequest {
        ignore_eos: true,
        speculation: Speculation { mode, ..Speculation::default() },
        ..GenerateRequest::new((0..length).map(|i| (i * i + 7 * i) % 6000).collect(), 20)
    };
    let requests = [request(700, Mode::Tree), request(1100, Mode::Auto), request(90, Mode::Chain)];
    assert_eq!(run(1024, &requests), run(128, &requests));
}

#[test]
fn the_embedded_pair_starts_a_short_request_beside_a_1900_token_prompt() {
    let (mut engine, tokenizer) = embedded::engine(2, Some(2048));
    let mut long = Vec::new();
    for text in prompts("code", 30).iter().cycle() {
        long.extend(tokenizer.encode(text).unwrap());
        if long.len() >= 1900 {
            break;
        }
    }
    long.truncate(1900);
    let requests = [
        GenerateRequest::new(long, 8),
        GenerateRequest::new(tokenizer.encode(&prompts("fixed", 1)[0]).unwrap(), 24),
    ];
    let alone: Vec<Vec<u32>> = requests.iter().map(|r| ids(&engine.run(r.clone()).unwrap())).collect();
    let streams: Vec<StreamId> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let (mut together, mut rounds, mut first) = ([Vec::new(), Vec::new()], 0, None);
    while engine.load() != (0, 0) {
        rounds += 1;
        for (id, event) in engine.step().unwrap() {
            let stream = streams.iter().position(|&stream| stream == id).unwrap();
            if let Event::Text { tokens, .. } = event {
                together[stream].extend(tokens.iter().map(|t| t.id));
                first = first.or((stream == 1).then_some(rounds));
            }
        }
    }
    assert_eq!(together.to_vec(), alone);
    assert!(first.unwrap() <= 2, "first token of the short request in round {first:?} of {rounds}");
}

#[derive(Clone, Debug)]
struct Client {
    prompt: usize,
    tokens: usize,
    mode: usize,
    joins: usize,
    cancelled: Option<usize>,
}

fn client() -> impl Strategy<Value = Client> {
    (1usize..60, 1usize..40, 0usize..4, 0usize..40, prop::option::weighted(0.25, 0usize..30)).prop_map(
        |(prompt, tokens, mode, joins, cancelled)| Client { prompt, tokens, mode, joins, cancelled },
    )
}

impl Client {
    fn request(&self) -> GenerateRequest {
        let speculation = Speculation { mode: Mode::ALL[self.mode], budget: None };
        GenerateRequest { speculation, ..GenerateRequest::new(prompt(self.prompt, self.tokens), self.tokens) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Clients come, leave and hang up at random: every reply is its solo run's (its beginning, when cancelled), and in the
    /// end every slot is free.
    #[test]
    fn streams_come_and_go_at_random(clients in prop::collection::vec(client(), 1..24)) {
        let mut toy = Toy::new(VOCAB);
        (toy.slots, toy.config.prefill_chunk, toy.config.max_waiting) = (4, 16, 64);
        let (mut engine, log) = toy.engine();
        let mut open: Vec<Option<StreamId>> = vec![None; clients.len()];
        let mut got = vec![Vec::new(); clients.len()];
        for step in 0.. {
            for (index, client) in clients.iter().enumerate() {
                if client.joins == step {
                    open[index] = Some(engine.submit(client.request()).unwrap());
                }
                if client.cancelled.is_some_and(|after| client.joins + after == step) {
                    engine.cancel(open[index].unwrap());
                }
            }
            if step > 70 && engine.load() == (0, 0) {
                break;
            }
            for (id, event) in engine.step().unwrap() {
                let index = open.iter().position(|&stream| stream == Some(id)).unwrap();
                match event {
                    Event::Text { tokens, .. } => got[index].extend(tokens.iter().map(|t| t.id)),
                    Event::Done { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        let (mut solo, _) = Toy::new(VOCAB).engine();
        for (client, got) in clients.iter().zip(&got) {
            let alone = ids(&solo.run(client.request()).unwrap());
            match client.cancelled {
                Some(_) => prop_assert!(alone.starts_with(got)),
                None => prop_assert_eq!(&alone, got),
            }
        }
        prop_assert_eq!(engine.stats().free_slots, 4);
        prop_assert!(log.lock().unwrap().committed.iter().all(Vec::is_empty));
    }
}
