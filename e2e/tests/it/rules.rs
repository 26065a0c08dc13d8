//! Penalties, bias, least lengths, thoughts and log-probabilities are the same in every mode: at every drafted node they
//! look at the node's own root path.

use std::collections::HashMap;

use canopy_e2e::engine::{
    EmittedToken, GenerateRequest, Generation, Mode, Penalties, Reasoning, Sampling, Speculation,
};

use crate::embedded::{AR, DRAFTED, engine, ids, prompts, run};
use crate::toy::{Toy, best, hashed};

const VOCAB: usize = 9;
const MODES: [(Mode, Option<usize>); 6] = [
    (Mode::Ar, None),
    (Mode::Chain, None),
    (Mode::Tree, Some(3)),
    (Mode::Tree, Some(15)),
    (Mode::Tree, Some(64)),
    (Mode::Auto, None),
];

/// Greedy decoding with penalties and bias, as their definitions say, one token after another.
fn serial(request: &GenerateRequest) -> Vec<u32> {
    let mut history = request.prompt.clone();
    let mut counts = HashMap::<u32, f32>::new();
    for _ in 0..request.max_tokens {
        let mut row = hashed(&history, VOCAB);
        let Penalties { repetition, presence, frequency } = request.penalties;
        for (id, logit) in row.iter_mut().enumerate() {
            if history.contains(&(id as u32)) {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if let Some(count) = counts.get(&(id as u32)) {
                *logit -= presence + frequency * count;
            }
        }
        for &(id, bias) in &request.logit_bias {
            row[id as usize] += bias;
        }
        let next = best(&row);
        *counts.entry(next).or_default() += 1.0;
        history.push(next);
    }
    history.split_off(request.prompt.len())
}

fn all_penalties() -> Vec<Penalties> {
    let off = Penalties::default();
    vec![
        off,
        Penalties { repetition: 1.4, ..off },
        Penalties { presence: 0.5, ..off },
        Penalties { frequency: 0.25, ..off },
        Penalties { repetition: 0.8, presence: -0.5, frequency: 0.125 },
    ]
}

#[test]
fn greedy_text_with_penalties_is_the_serial_one_in_every_mode() {
    let mut texts = Vec::new();
    for penalties in all_penalties() {
        for logit_bias in [vec![], vec![(2, 0.5), (3, -1.0), (8, f32::NEG_INFINITY)]] {
            let request =
                GenerateRequest { penalties, logit_bias, ..GenerateRequest::new(vec![1, 4, 4, 7], 60) };
            let expected = serial(&request);
            for (mode, budget) in MODES {
                let (mut engine, _) = Toy::new(VOCAB).engine();
                let speculation = Speculation { mode, budget };
                let got = engine.run(GenerateRequest { speculation, ..request.clone() }).unwrap();
                assert_eq!(ids(&got), expected, "{mode:?} {budget:?} {:?}", request.penalties);
            }
            texts.push(expected);
        }
    }
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 10, "every setting changes the text");
}

/// A token, its log-probability's bits, and the likeliest ones with theirs.
type Told = (u32, Option<u32>, Vec<(u32, u32)>);

/// Everything about the tokens but where they came from, log-probabilities bit by bit.
fn told(generation: &Generation) -> Vec<Told> {
    let top = |token: &EmittedToken| token.top.iter().map(|&(id, p)| (id, p.to_bits())).collect();
    generation.tokens.iter().map(|t| (t.id, t.logprob.map(f32::to_bits), top(t))).collect()
}

#[test]
fn the_embedded_pairs_text_and_logprobs_under_rules_are_the_same_in_every_mode() {
    let (mut engine, tokenizer) = engine(8, Some(1024));
    let all = all_penalties();
    let request = |(index, text): (usize, &String)| GenerateRequest {
        penalties: all[index % all.len()],
        logit_bias: if index % 2 == 0 {
            vec![]
        } else {
            vec![(10, 3.0), (20, -3.0), (30, f32::NEG_INFINITY)]
        },
        min_tokens: [0, 40][index % 2],
        logprobs: Some(3),
        sampling: Sampling { temperature: [0.0, 0.8][index / 4 % 2], seed: 3, ..Sampling::default() },
        ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 64)
    };
    let texts: Vec<String> = ["fixed", "code", "chat"].iter().flat_map(|kind| prompts(kind, 4)).collect();
    let requests: Vec<GenerateRequest> = texts.iter().enumerate().map(request).collect();
    let plain = run(&mut engine, &requests, AR);
    assert!(plain.iter().zip(&requests).all(|(got, asked)| got.tokens.len() >= asked.min_tokens));
    for speculation in DRAFTED {
        for (index, (plain, drafted)) in
            plain.iter().zip(run(&mut engine, &requests, speculation)).enumerate()
        {
            assert_eq!(told(plain), told(&drafted), "prompt {index}, {speculation:?}");
            assert_eq!(plain.text, drafted.text, "prompt {index}, {speculation:?}");
        }
    }
}

#[test]
fn a_prompts_logprobs_are_those_that_its_tokens_were_generated_with() {
    let (mut engine, tokenizer) = engine(2, Some(1024));
    let prompt = tokenizer.encode(&prompts("code", 1)[0]).unwrap();
    let request =
        GenerateRequest { logprobs: Some(2), ignore_eos: true, ..GenerateRequest::new(prompt, 150) };
    let got = engine.run(request.clone()).unwrap();
    assert!(got.prompt.is_empty());
    let mut longer = request.prompt.clone();
    longer.extend(ids(&got));
    let echo = GenerateRequest { prompt: longer.clone(), prompt_logprobs: Some(2), max_tokens: 1, ..request };
    let echoed = engine.run(echo).unwrap().prompt;
    assert_eq!(echoed.iter().map(|token| token.id).collect::<Vec<_>>(), longer);
    assert_eq!((echoed[0].logprob, echoed[0].top.len()), (None, 0));
    assert!(echoed[1..].iter().all(|token| token.logprob.is_some() && token.top.len() == 2));
    let generated = &echoed[longer.len() - got.tokens.len()..];
    for (token, echoed) in got.tokens.iter().zip(generated) {
        assert_eq!((token.logprob, &token.top), (echoed.logprob, &echoed.top));
    }
}

#[test]
fn a_thought_ends_within_its_budget_in_every_mode() {
    let request = |budget| GenerateRequest {
        reasoning: Some(Reasoning { end: vec![7, 8], budget }),
        // Without the force the end would not come: its tokens are forbidden.
        logit_bias: vec![(8, -50.0)],
        ..GenerateRequest::new(vec![1, 2], 40)
    };
    let end = |ids: &[u32]| ids.windows(2).position(|pair| pair == [7, 8]);
    for budget in [0, 1, 5, 17] {
        let mut texts = Vec::new();
        for (mode, nodes) in MODES {
            let (mut engine, _) = Toy::new(VOCAB).engine();
            let speculation = Speculation { mode, budget: nodes };
            let got = engine.run(GenerateRequest { speculation, ..request(Some(budget)) }).unwrap();
            let at = end(&ids(&got)).unwrap();
            assert!(at <= budget, "{mode:?}: the thought has {at} tokens");
            assert_eq!(end(&ids(&got)[at + 2..]), None, "the end is forced once");
            texts.push(ids(&got));
        }
        texts.dedup();
        assert_eq!(texts.len(), 1);
    }
    let (mut engine, _) = Toy::new(VOCAB).engine();
    assert_eq!(end(&ids(&engine.run(request(None)).unwrap())), None);
}
