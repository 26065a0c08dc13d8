//! Drafted text is plain text: on the embedded pair every mode, budget, batch and chunking gives the same bytes.

use canopy_e2e::engine::{Engine, Event, GenerateRequest, Mode, Sampling, Speculation};

use crate::embedded::{AR, DRAFTED, engine, ids, prompts, run};

const SLOTS: usize = 8;

/// 100 prompts of four kinds.
fn hundred() -> Vec<String> {
    let counts = [("fixed", 19), ("code", 27), ("chat", 27), ("textbook", 27)];
    let texts: Vec<String> = counts.into_iter().flat_map(|(kind, count)| prompts(kind, count)).collect();
    assert_eq!(texts.len(), 100);
    texts
}

#[test]
fn a_hundred_prompts_give_the_same_128_tokens_in_every_mode() {
    let (mut engine, tokenizer) = engine(SLOTS, Some(1024));
    let request = |text: &String| GenerateRequest {
        ignore_eos: true,
        ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 128)
    };
    let requests: Vec<GenerateRequest> = hundred().iter().map(request).collect();
    let plain = run(&mut engine, &requests, AR);
    assert!(plain.iter().all(|got| got.tokens.len() == 128 && got.stats.rounds == 127));
    for speculation in DRAFTED {
        let drafted = run(&mut engine, &requests, speculation);
        let mut accepted = 0;
        for (index, (plain, drafted)) in plain.iter().zip(&drafted).enumerate() {
            assert_eq!(ids(plain), ids(drafted), "prompt {index}, {speculation:?}");
            assert_eq!(plain.text, drafted.text, "prompt {index}, {speculation:?}");
            accepted += drafted.stats.committed - drafted.stats.rounds;
        }
        // Equal for the right reason: drafts were made and taken.
        assert!(
            speculation.mode == Mode::Auto || accepted > 100 * 20,
            "{speculation:?}: {accepted} accepted"
        );
    }
}

#[test]
fn sampled_text_depends_on_the_seed_and_not_on_the_mode() {
    let (mut engine, tokenizer) = engine(SLOTS, Some(1024));
    let requests: Vec<GenerateRequest> = prompts("fixed", 8)
        .iter()
        .enumerate()
        .map(|(index, text)| GenerateRequest {
            sampling: Sampling {
                temperature: 0.7 + 0.2 * (index % 3) as f32,
                top_k: [0, 40][index % 2],
                top_p: [1.0, 0.95][index / 2 % 2],
                min_p: [0.0, 0.02][index / 4],
                seed: index as u64,
            },
            ignore_eos: true,
            ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 96)
        })
        .collect();
    let plain = run(&mut engine, &requests, AR);
    for speculation in DRAFTED {
        for (plain, drafted) in plain.iter().zip(&run(&mut engine, &requests, speculation)) {
            assert_eq!((ids(plain), &plain.text), (ids(drafted), &drafted.text), "{speculation:?}");
        }
    }
    let reseeded: Vec<GenerateRequest> = requests
        .iter()
        .map(|r| GenerateRequest {
            sampling: Sampling { seed: r.sampling.seed + 100, ..r.sampling },
            ..r.clone()
        })
        .collect();
    let other = run(&mut engine, &reseeded, AR);
    // Not all: the model is so sure of one prompt that no seed changes its text.
    let changed = plain.iter().zip(&other).filter(|(a, b)| a.text != b.text).count();
    assert!(changed > plain.len() / 2, "{changed} texts changed with the seed");
}

/// All requests at once, every stream with the next of `budgets` in every round.
fn alternate(engine: &mut Engine, requests: &[GenerateRequest], budgets: &[usize]) -> Vec<Vec<u32>> {
    let tree = |round: usize| Speculation { mode: Mode::Tree, budget: Some(budgets[round % budgets.len()]) };
    let submit =
        |r: &GenerateRequest| engine.submit(GenerateRequest { speculation: tree(0), ..r.clone() }).unwrap();
    let streams: Vec<_> = requests.iter().map(submit).collect();
    let mut tokens = vec![Vec::new(); streams.len()];
    for round in 0.. {
        for (id, event) in engine.step().unwrap() {
            let stream = streams.iter().position(|&stream| stream == id).unwrap();
            match event {
                Event::Text { tokens: new, .. } => tokens[stream].extend(new.iter().map(|t| t.id)),
                Event::Done { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        if engine.load() == (0, 0) {
            break;
        }
        for (index, &stream) in streams.iter().enumerate() {
            if tokens[index].len() < requests[index].max_tokens {
                engine.set_speculation(stream, tree(round + index)).unwrap();
            }
        }
    }
    tokens
}

#[test]
fn budgets_that_alternate_between_rounds_and_streams_leave_the_text_alone() {
    let (mut engine, tokenizer) = engine(SLOTS, Some(1024));
    let request = |text: &String| GenerateRequest {
        ignore_eos: true,
        ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 128)
    };
    let requests: Vec<GenerateRequest> = prompts("fixed", 12).iter().map(request).collect();
    let plain = run(&mut engine, &requests, AR);
    let alternated = alternate(&mut engine, &requests, &[0, 7, 0, 1, 64, 0]);
    for (index, (plain, tokens)) in plain.iter().zip(&alternated).enumerate() {
        assert_eq!(&ids(plain), tokens, "prompt {index}");
    }
}

#[test]
fn a_stream_among_others_gets_the_text_and_logprobs_that_it_gets_alone() {
    let (mut many, tokenizer) = engine(5, Some(1024));
    let (mut one, _) = engine(1, Some(1024));
    let modes = [AR, DRAFTED[0], DRAFTED[2], DRAFTED[5], DRAFTED[6]];
    let requests: Vec<GenerateRequest> = prompts("code", 10)
        .iter()
        .enumerate()
        .map(|(index, text)| GenerateRequest {
            speculation: modes[index % modes.len()],
            logprobs: Some(3),
            sampling: Sampling { temperature: (index % 2) as f32, seed: 5, ..Sampling::default() },
            ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 16 + 9 * index)
        })
        .collect();
    let together = many.run_all(requests.clone()).unwrap();
    for (index, (request, together)) in requests.into_iter().zip(together).enumerate() {
        let (alone, together) = (one.run(request).unwrap(), together.unwrap());
        assert_eq!(alone.text, together.text, "stream {index}");
        let bits = |got: &canopy_e2e::engine::Generation| -> Vec<(u32, Option<u32>)> {
            got.tokens.iter().map(|t| (t.id, t.logprob.map(f32::to_bits))).collect()
        };
        assert_eq!(bits(&alone), bits(&together), "stream {index}");
    }
}

#[test]
fn lengths_around_a_block_and_short_prompts_are_the_same_in_every_mode() {
    let (mut engine, tokenizer) = engine(SLOTS, Some(512));
    let text = tokenizer.encode(&prompts("code", 1)[0]).unwrap();
    let lengths = (1..=20).map(|length| (length, 20)).chain([1, 7, 8, 9, 15, 16, 17].map(|max| (9, max)));
    let request = |(length, max_tokens): (usize, usize)| GenerateRequest {
        ignore_eos: true,
        ..GenerateRequest::new(text[..length].to_vec(), max_tokens)
    };
    let requests: Vec<GenerateRequest> = lengths.map(request).collect();
    let plain = run(&mut engine, &requests, AR);
    for speculation in DRAFTED {
        for (request, (plain, drafted)) in
            requests.iter().zip(plain.iter().zip(&run(&mut engine, &requests, speculation)))
        {
            assert_eq!(drafted.stats.completion_tokens, request.max_tokens);
            assert_eq!(ids(plain), ids(drafted), "prompt {}, {speculation:?}", request.prompt.len());
        }
    }
}

#[test]
fn the_contexts_end_is_reached_in_every_mode_with_the_same_text() {
    let (mut engine, tokenizer) = engine(2, Some(64));
    let prompt = tokenizer.encode("def fibonacci(n):").unwrap();
    let request = GenerateRequest { ignore_eos: true, ..GenerateRequest::new(prompt.clone(), 1000) };
    let plain = run(&mut engine, std::slice::from_ref(&request), AR).remove(0);
    assert_eq!(plain.tokens.len(), 64 - prompt.len());
    for speculation in DRAFTED {
        let drafted = run(&mut engine, std::slice::from_ref(&request), speculation).remove(0);
        assert_eq!(ids(&plain), ids(&drafted), "{speculation:?}");
    }
}
