//! Streams share passes and nothing else: each one's text is that of running it alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use canopy_e2e::Error;
use canopy_e2e::engine::{
    Event, FinishReason, GenerateRequest, Generation, Mode, Sampling, Speculation, StreamId,
};

use crate::toy::{Toy, hashed};

const VOCAB: usize = 9;

/// Different prompts, lengths, modes, budgets and temperatures.
fn mixed(count: usize) -> Vec<GenerateRequest> {
    let modes = [
        (Mode::Tree, Some(7)),
        (Mode::Tree, Some(21)),
        (Mode::Ar, None),
        (Mode::Chain, None),
        (Mode::Tree, Some(64)),
        (Mode::Auto, None),
    ];
    let request = |index: usize| {
        let prompt = (0..1 + index * 5 % 23).map(|i| ((i * index + i) % VOCAB) as u32).collect();
        let (mode, budget) = modes[index % modes.len()];
        GenerateRequest {
            speculation: Speculation { mode, budget },
            sampling: Sampling {
                temperature: (index % 3) as f32 * 0.6,
                seed: index as u64,
                ..Sampling::default()
            },
            ..GenerateRequest::new(prompt, 5 + index * 7 % 40)
        }
    };
    (0..count).map(request).collect()
}

fn solo(request: &GenerateRequest) -> Vec<u32> {
    let got = Toy::new(VOCAB).engine().0.run(request.clone()).unwrap();
    got.tokens.iter().map(|token| token.id).collect()
}

#[test]
fn streams_that_join_and_leave_get_the_text_that_they_get_alone() {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.config.prefill_chunk) = (5, 16);
    let (mut engine, log) = toy.engine();
    let requests = mixed(24);
    let got = engine.run_all(requests.clone()).unwrap();
    for (index, (request, got)) in requests.iter().zip(got).enumerate() {
        let ids: Vec<u32> = got.unwrap().tokens.iter().map(|token| token.id).collect();
        assert_eq!(ids, solo(request), "stream {index}");
    }
    let log = log.lock().unwrap();
    assert!(log.drafts.iter().any(|&requests| requests > 1), "one draft call serves several streams");
    assert_eq!(log.resets.len(), requests.len());
}

#[test]
fn a_cancelled_stream_frees_its_slot_at_once_and_harms_nobody() {
    let (mut engine, log) = Toy::new(VOCAB).engine();
    let requests = mixed(3);
    let ids: Vec<StreamId> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    engine.step().unwrap();
    engine.step().unwrap();
    assert_eq!(engine.load(), (1, 2));
    engine.cancel(ids[0]);
    engine.cancel(ids[1]);
    engine.cancel(ids[1]);
    assert_eq!(engine.load(), (0, 1));
    assert!(log.lock().unwrap().committed[0].is_empty());
    let (mut cancelled, mut tokens) = (Vec::new(), Vec::new());
    while engine.load() != (0, 0) {
        for (id, event) in engine.step().unwrap() {
            match event {
                Event::Done { reason: FinishReason::Cancelled, .. } => cancelled.push(id),
                Event::Text { tokens: new, .. } => tokens.extend(new.iter().map(|t| (id, t.id))),
                Event::Done { .. } => assert_eq!(id, ids[2]),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(cancelled, ids[..2]);
    let expected: Vec<_> = solo(&requests[2]).into_iter().map(|token| (ids[2], token)).collect();
    assert_eq!(tokens, expected);
}

#[test]
fn a_stream_whose_logits_are_not_finite_fails_alone() {
    let mut toy = Toy::new(VOCAB);
    toy.slots = 3;
    // Token 8 in a prompt poisons the fifth position after it.
    toy.model = Arc::new(|history| {
        let mut logits = hashed(history, VOCAB - 1);
        let poisoned = history.len() > 6 && history[history.len() - 6] == 8;
        logits.push(if poisoned { f32::NAN } else { -9.0 });
        logits
    });
    let healthy = GenerateRequest::new(vec![1, 2, 3], 30);
    let sick = GenerateRequest { prompt: vec![1, 8], ..healthy.clone() };
    let sick_prompt = GenerateRequest { prompt: vec![1, 8, 0, 0, 0, 0, 0], ..healthy.clone() };
    let (mut engine, log) = toy.engine();
    let alone = engine.run(healthy.clone()).unwrap();
    let got = engine.run_all(vec![sick, healthy, sick_prompt]).unwrap();
    assert!(matches!(got[0], Err(Error::NonFinite { position: 6, .. })), "{:?}", got[0]);
    // Auto may draft differently in company: the tokens are the same, where they came from is not.
    let ids = |got: &Generation| got.tokens.iter().map(|token| token.id).collect::<Vec<_>>();
    assert_eq!(ids(got[1].as_ref().unwrap()), ids(&alone));
    assert!(matches!(got[2], Err(Error::NonFinite { position: 6, .. })), "{:?}", got[2]);
    assert!(log.lock().unwrap().committed.iter().all(Vec::is_empty));
    assert_eq!(engine.load(), (0, 0));
}

#[test]
fn a_pass_that_fails_ends_its_streams_and_the_engine_goes_on() {
    let mut toy = Toy::new(VOCAB);
    toy.slots = 2;
    let (mut engine, log) = toy.engine();
    let requests = mixed(3);
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    engine.step().unwrap();
    log.lock().unwrap().fail_next_verify = true;
    let events = engine.step().unwrap();
    assert_eq!(events.len(), 2);
    assert!(events.iter().all(|(_, event)| matches!(event, Event::Failed(Error::Round(_)))));
    assert_eq!(engine.load(), (0, 1));
    let mut tokens = Vec::new();
    while engine.load() != (0, 0) {
        for (_, event) in engine.step().unwrap() {
            if let Event::Text { tokens: new, .. } = event {
                tokens.extend(new.iter().map(|t| t.id));
            }
        }
    }
    assert_eq!(tokens, solo(&requests[2]));
}

#[test]
fn drafted_logits_that_are_not_finite_cost_speed_only() {
    let mut toy = Toy::new(VOCAB);
    toy.draft_model = Arc::new(|_, depth| vec![if depth == 1 { 1.0 } else { f32::NAN }; VOCAB]);
    for request in mixed(6) {
        let (mut engine, _) = Toy { draft_model: toy.draft_model.clone(), ..Toy::new(VOCAB) }.engine();
        let ids: Vec<u32> = engine.run(request.clone()).unwrap().tokens.iter().map(|t| t.id).collect();
        assert_eq!(ids, solo(&request));
    }
}

#[test]
fn ar_streams_never_reach_the_drafter_and_cannot_start_to_draft() {
    let (mut engine, log) = Toy::new(VOCAB).engine();
    let ar = Speculation { mode: Mode::Ar, budget: None };
    let request = GenerateRequest { speculation: ar, ..GenerateRequest::new(vec![1, 2], 9) };
    let id = engine.submit(request).unwrap();
    engine.step().unwrap();
    let tree = Speculation { mode: Mode::Tree, budget: Some(4) };
    assert!(matches!(engine.set_speculation(id, tree), Err(Error::Request { field: "mode", .. })));
    assert!(matches!(
        engine.set_speculation(StreamId(99), tree),
        Err(Error::Request { field: "stream", .. })
    ));
    while engine.load() != (0, 0) {
        engine.step().unwrap();
    }
    let log = log.lock().unwrap();
    assert!(log.drafts.is_empty());
    assert!(log.passes[1..].iter().all(|&rows| rows == 1));
}

#[test]
fn the_events_of_other_streams_wait_for_the_next_step() {
    let mut toy = Toy::new(VOCAB);
    toy.slots = 2;
    let (mut engine, _) = toy.engine();
    let requests = mixed(2);
    let id = engine.submit(requests[0].clone()).unwrap();
    engine.run(requests[1].clone()).unwrap();
    let mut tokens = Vec::new();
    let mut done = false;
    while !done {
        for (from, event) in engine.step().unwrap() {
            assert_eq!(from, id);
            match event {
                Event::Text { tokens: new, .. } => tokens.extend(new.iter().map(|t| t.id)),
                Event::Done { .. } => done = true,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(tokens, solo(&requests[0]));
}

#[test]
fn a_stream_past_its_deadline_ends_between_rounds_and_frees_its_slot() {
    let (mut engine, log) = Toy::new(VOCAB).engine();
    let now = Instant::now();
    let late = GenerateRequest { deadline: Some(now), ..GenerateRequest::new(vec![1, 2], 9) };
    let hour = now + Duration::from_secs(3600);
    let running = engine.submit(GenerateRequest { deadline: Some(hour), ..late.clone() }).unwrap();
    engine.step().unwrap();
    let waiting = engine.submit(late.clone()).unwrap();
    let events = engine.step().unwrap();
    let timed_out = |(id, event): &(StreamId, Event)| {
        *id == waiting && matches!(event, Event::Done { reason: FinishReason::TimedOut, .. })
    };
    assert_eq!(events.iter().filter(|event| timed_out(event)).count(), 1, "{events:?}");
    assert!(events.iter().any(|(id, event)| *id == running && matches!(event, Event::Text { .. })));
    engine.cancel(running);
    // Late while it runs: its deadline lies between two steps. Where the first one comes too late, it is given more time.
    let mut time = Duration::from_millis(40);
    let (running, deadline) = loop {
        let deadline = Instant::now() + time;
        let request = GenerateRequest { deadline: Some(deadline), max_tokens: 200, ..late.clone() };
        let running = engine.submit(request).unwrap();
        engine.step().unwrap();
        if engine.load() == (1, 0) {
            break (running, deadline);
        }
        time *= 2;
        assert!(time < Duration::from_secs(60), "a stream is never in time");
    };
    while Instant::now() <= deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let events = engine.step().unwrap();
    assert!(
        matches!(events[..], [(id, Event::Done { reason: FinishReason::TimedOut, .. })] if id == running)
    );
    assert!(log.lock().unwrap().committed[0].is_empty());
    assert_eq!(engine.stats().free_slots, 1);
}
