//! Where a generation ends: stop tokens, stop strings and characters inside an accepted path.
//!
//! The target follows a script and the drafter knows it, so that everything up to the end lies inside one path.

use canopy_e2e::engine::{EmittedToken, Event, FinishReason, GenerateRequest, Generation, Mode, Speculation};

use crate::toy::{Toy, hashed};

const MODES: [(Mode, Option<usize>); 4] =
    [(Mode::Ar, None), (Mode::Chain, None), (Mode::Tree, Some(20)), (Mode::Auto, None)];

fn run(toy: Toy, speculation: Speculation, change: impl FnOnce(&mut GenerateRequest)) -> Generation {
    let mut request = GenerateRequest { speculation, ..GenerateRequest::new(vec![0], 40) };
    change(&mut request);
    toy.engine().0.run(request).unwrap()
}

fn ids(tokens: &[EmittedToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// Runs a script in every mode and checks text, tokens and reason.
fn expect(
    (pieces, script): (&[&[u8]], &[u32]),
    change: impl Fn(&mut GenerateRequest) + Copy,
    (text, tokens, reason): (&str, &[u32], FinishReason),
) {
    for (mode, budget) in MODES {
        let toy = Toy::scripted(pieces, script);
        let got = run(toy, Speculation { mode, budget }, change);
        assert_eq!(
            (got.text.as_str(), ids(&got.tokens).as_slice(), got.reason),
            (text, tokens, reason),
            "{mode}"
        );
        assert_eq!(got.stats.completion_tokens, tokens.len(), "{mode}");
    }
}

#[test]
fn a_stop_token_inside_the_path_ends_it_there_and_is_the_last_token_committed() {
    let toy = || {
        let mut toy = Toy::scripted(&[b"a", b"b", b"<eos>", b"c", b"d"], &[4, 0, 1, 2, 3, 4]);
        toy.text.stop_tokens = vec![2];
        toy
    };
    let speculation = Speculation { mode: Mode::Chain, budget: None };
    let (mut engine, log) = toy().engine();
    let request = GenerateRequest { speculation, ..GenerateRequest::new(vec![0], 40) };
    let got = engine.run(request.clone()).unwrap();
    assert_eq!((got.text.as_str(), got.reason), ("dab", FinishReason::Stop));
    // d comes from the prompt; the round's path is [d, a, b, <eos>, c, d] and gives a, b and <eos>.
    assert_eq!(ids(&got.tokens), [4, 0, 1, 2]);
    assert_eq!(got.stats.completion_tokens, 4);
    assert_eq!(log.lock().unwrap().commits, [(0, vec![0]), (0, vec![4, 0, 1, 2])]);
    assert!(log.lock().unwrap().committed[0].is_empty(), "the slot is empty again");

    let past = run(toy(), speculation, |request| (request.ignore_eos, request.max_tokens) = (true, 6));
    assert_eq!((past.text.as_str(), past.reason), ("dab<eos>cd", FinishReason::Length));
    let further = run(toy(), speculation, |request| request.stop_tokens = vec![1]);
    assert_eq!((further.text.as_str(), further.tokens.len(), further.reason), ("da", 3, FinishReason::Stop));
}

#[test]
fn a_stop_string_completed_inside_the_path_cuts_text_tokens_and_logprobs() {
    let script: (&[&[u8]], &[u32]) = (&[b"x", b"Hello", b" wor", b"ld", b" and more"], &[1, 2, 3, 4, 4]);
    expect(script, |r| r.stop = vec!["world".into()], ("Hello ", &[1, 2, 3], FinishReason::Stop));
    // The one that completes earliest wins, not the first listed.
    let stops = || vec!["more".to_owned(), "o w".to_owned(), "world".to_owned()];
    expect(script, |r| r.stop = stops(), ("Hell", &[1, 2], FinishReason::Stop));
    let got = run(Toy::scripted(script.0, script.1), Speculation::default(), |request| {
        request.stop = vec!["world".into()];
        request.logprobs = Some(2);
    });
    assert_eq!(got.tokens.len(), 3);
    assert!(
        got.tokens.iter().all(|t| t.top.len() == 2 && t.logprob == Some(t.top[0].1) && t.logprob < Some(0.0))
    );
}

#[test]
fn nothing_of_a_forming_stop_string_leaks_and_what_cannot_complete_is_released() {
    let stop = |r: &mut GenerateRequest| (r.stop, r.max_tokens) = (vec!["\nUser:".into()], 4);
    let leak: (&[&[u8]], &[u32]) = (&[b"x", b"hi", b"\nUser", b":", b"!"], &[1, 2, 3, 4]);
    expect(leak, stop, ("hi", &[1, 2, 3], FinishReason::Stop));
    let release: (&[&[u8]], &[u32]) = (&[b"x", b"hi", b"\nUs", b"age"], &[1, 2, 3, 1]);
    expect(release, stop, ("hi\nUsagehi", &[1, 2, 3, 1], FinishReason::Length));
    // Held when max_tokens ends the text: released then.
    let cut = |r: &mut GenerateRequest| (r.stop, r.max_tokens) = (vec!["\nUser:".into()], 2);
    expect(release, cut, ("hi\nUs", &[1, 2], FinishReason::Length));

    // Event by event in ar mode: the held text is not in any event before it is decided.
    let (mut engine, _) = Toy::scripted(release.0, release.1).engine();
    let mut request = GenerateRequest::new(vec![0], 4);
    stop(&mut request);
    request.speculation.mode = Mode::Ar;
    engine.submit(request).unwrap();
    let mut pieces = Vec::new();
    while engine.load() != (0, 0) {
        for (_, event) in engine.step().unwrap() {
            if let Event::Text { text, .. } = event {
                pieces.push(text);
            }
        }
    }
    assert_eq!(pieces, ["hi", "", "\nUsage", "hi"]);
}

#[test]
fn a_character_over_three_tokens_arrives_whole() {
    let euro = "€".as_bytes();
    let pieces: [&[u8]; 4] = [b"x", &euro[..1], &euro[1..2], &euro[2..]];
    for (mode, budget) in MODES {
        let (mut engine, _) = Toy::scripted(&pieces, &[1, 2, 3, 0]).engine();
        let speculation = Speculation { mode, budget };
        engine.submit(GenerateRequest { speculation, ..GenerateRequest::new(vec![0], 4) }).unwrap();
        let mut text = String::new();
        while engine.load() != (0, 0) {
            for (_, event) in engine.step().unwrap() {
                if let Event::Text { text: piece, .. } = event {
                    assert!(!piece.contains('\u{FFFD}'), "{mode}");
                    text.push_str(&piece);
                }
            }
        }
        assert_eq!(text, "€x", "{mode}");
    }
}

#[test]
fn stop_strings_find_the_same_end_in_every_mode_on_free_text() {
    let full = run(Toy::new(6), Speculation { mode: Mode::Ar, budget: None }, |_| ());
    for at in [3, 8, 13, 21] {
        let stop = full.text[at..at + 3].to_owned();
        let cut = full.text.find(&stop).unwrap();
        for (mode, budget) in MODES {
            let got = run(Toy::new(6), Speculation { mode, budget }, |r| r.stop = vec![stop.clone()]);
            assert_eq!((got.text.as_str(), got.tokens.len()), (&full.text[..cut], cut + 3), "{mode}, {stop}");
        }
    }
}

#[test]
fn logprobs_are_the_targets_own_in_every_mode() {
    for (mode, budget) in MODES {
        let got = run(Toy::new(6), Speculation { mode, budget }, |r| r.logprobs = Some(6));
        let mut history = vec![0];
        for token in &got.tokens {
            let logits = hashed(&history, 6);
            let norm = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
            let exact = |id: u32| f64::from(logits[id as usize]) - norm;
            assert!((f64::from(token.logprob.unwrap()) - exact(token.id)).abs() < 1e-5, "{mode}");
            assert!(token.top.iter().all(|&(id, p)| (f64::from(p) - exact(id)).abs() < 1e-5), "{mode}");
            assert!(token.top.windows(2).all(|pair| pair[0].1 >= pair[1].1) && token.top.len() == 6);
            history.push(token.id);
        }
    }
}
