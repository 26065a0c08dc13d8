//! Rejected nodes leave no trace: whatever was drafted before, the text goes on as if it had not been.

use std::sync::Arc;

use canopy_e2e::engine::{Engine, Event, GenerateRequest, Mode, Speculation};

use crate::toy::{Toy, best, hashed};

const VOCAB: usize = 7;

fn tree(budget: usize) -> Speculation {
    Speculation { mode: Mode::Tree, budget: Some(budget) }
}

/// Decodes with the budgets in turn, one per round, and gives the tokens.
fn alternate(engine: &mut Engine, request: GenerateRequest, budgets: &[usize]) -> Vec<u32> {
    let speculation = tree(budgets[0]);
    let id = engine.submit(GenerateRequest { speculation, ..request }).unwrap();
    let mut tokens = Vec::new();
    for round in 0.. {
        for (_, event) in engine.step().unwrap() {
            match event {
                Event::Text { tokens: new, .. } => tokens.extend(new.iter().map(|t| t.id)),
                Event::Done { .. } => return tokens,
                other => panic!("{other:?}"),
            }
        }
        engine.set_speculation(id, tree(budgets[round % budgets.len()])).unwrap();
    }
    unreachable!("the loop ends with the stream")
}

/// The greedy text after `prompt`, one token at a time.
fn serial(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..count {
        history.push(best(&hashed(&history, VOCAB)));
    }
    history.split_off(prompt.len())
}

#[test]
fn budgets_that_change_every_round_leave_the_text_alone() {
    let (mut engine, _) = Toy::new(VOCAB).engine();
    let prompt = vec![2, 5, 1];
    for budgets in [[0, 7, 0, 1, 64, 0], [64, 0, 64, 0, 1, 7], [1, 1, 1, 1, 1, 1]] {
        let tokens = alternate(&mut engine, GenerateRequest::new(prompt.clone(), 96), &budgets);
        assert_eq!(tokens, serial(&prompt, 96), "{budgets:?}");
    }
}

#[test]
fn a_drafter_that_is_always_wrong_costs_speed_only() {
    let mut toy = Toy::new(VOCAB);
    let target = toy.model.clone();
    toy.draft_model = Arc::new(move |history, depth| {
        // The least likely token first; nothing of its trees is ever accepted beyond chance at depth 2 and more.
        let mut logits = target(history);
        logits.iter_mut().for_each(|logit| *logit *= -4.0);
        logits.rotate_left(depth - 1);
        logits
    });
    let (mut engine, log) = toy.engine();
    let request = GenerateRequest { speculation: tree(3), ..GenerateRequest::new(vec![4], 40) };
    let got = engine.run(request).unwrap();
    let ids: Vec<u32> = got.tokens.iter().map(|t| t.id).collect();
    assert_eq!(ids, serial(&[4], 40));
    assert!(got.stats.acceptance_length() < 1.3, "{}", got.stats.acceptance_length());
    let committed: Vec<u32> =
        log.lock().unwrap().commits.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
    assert_eq!(committed, [&[4], &ids[..39]].concat());
}

#[test]
fn every_root_is_committed_exactly_once_through_non_prefix_paths() {
    let (mut engine, log) = Toy::new(VOCAB).engine();
    let request = GenerateRequest {
        speculation: tree(20),
        report_rounds: true,
        ..GenerateRequest::new(vec![4, 4], 120)
    };
    let got = engine.run(request).unwrap();
    assert_eq!(got.tokens.iter().map(|t| t.id).collect::<Vec<_>>(), serial(&[4, 4], 120));
    assert!(got.rounds.iter().any(|round| round.path.windows(2).any(|pair| pair[1] > pair[0] + 1)));
    let mut position = 2;
    for round in &got.rounds {
        assert_eq!(round.start, position);
        position += round.path.len();
        assert_eq!(round.nodes[0].parent, -1);
        assert!(round.nodes.iter().all(|node| (0.0..=1.0).contains(&node.prob)));
    }
    assert_eq!(log.lock().unwrap().commits.iter().map(|c| c.1.len()).sum::<usize>(), 2 + 119);
    let stats = &got.stats;
    assert_eq!((stats.prompt_tokens, stats.completion_tokens, stats.committed), (2, 120, 119));
    assert_eq!(
        (stats.rounds, stats.drafted_rounds),
        (got.rounds.len(), got.rounds.len() - usize::from(got.rounds.last().unwrap().nodes.len() == 1))
    );
    assert_eq!(stats.budgets.values().sum::<usize>(), stats.rounds);
    assert_eq!(stats.nodes, got.rounds.iter().map(|round| round.nodes.len()).sum::<usize>());
}
