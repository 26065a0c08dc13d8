//! Kinds of failure that other servers have shown in public, over HTTP: the real engine with a scripted target, so that
//! every chunk of text is the literal one.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use canopy_e2e::constrain::Compiler;
use canopy_e2e::loader::{self, ModelSource};
use canopy_e2e::tokenizer::Tokenizer;
use canopy_server::engine_thread::ModelInfo;
use canopy_server::state::AppState;
use serde_json::{Value, json};

use crate::scripted::{self, SharedLog};
use crate::support::*;

const MODES: [&str; 4] = ["ar", "chain", "tree", "auto"];

/// A target that continues any prompt with `pieces[1..]` and repeats the last of them, and a drafter of block 16 that
/// knows that. Token 0 is a letter that no script has.
struct Script {
    pieces: Vec<Vec<u8>>,
    stop_tokens: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    /// What every pass of the target goes through.
    gate: Arc<Gate>,
}

impl Script {
    fn new(pieces: &[&str]) -> Self {
        Self::bytes(pieces.iter().map(|piece| piece.as_bytes()))
    }

    fn bytes<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Self {
        let pieces = std::iter::once(&b"@"[..]).chain(pieces).map(<[u8]>::to_vec).collect();
        Self { pieces, stop_tokens: Vec::new(), tokenizer: Arc::clone(&TOKENIZER), gate: Arc::default() }
    }

    /// A server's state over it, with what the target committed.
    fn state(self) -> (AppState, SharedLog) {
        let Self { mut pieces, stop_tokens, tokenizer, gate } = self;
        let last = pieces.len() - 1;
        // Chat prompts are the tokenizer's tokens; whatever they are, the script follows.
        pieces.resize(tokenizer.vocab_size().max(pieces.len()), b"?".to_vec());
        let vocab = pieces.len();
        let after = move |token: u32| {
            let mut logits = vec![0.0f32; vocab];
            let next = if (token as usize) < last { token as usize + 1 } else { last };
            logits[next] = 9.0;
            (logits, next as u32)
        };
        // A prompt's last token is no token of the script, or it is token 0.
        let known = move |history: &[u32]| match history {
            [.., last_token] if (*last_token as usize) <= last => *last_token,
            _ => 0,
        };
        let info = ModelInfo {
            name: MODEL.into(),
            vocab_size: vocab,
            context_len: 256,
            has_drafter: true,
            grammars: Compiler::new(Arc::clone(&tokenizer) as _),
            tokenizer,
            created: 7,
            self_check: String::new(),
        };
        let mut toy = scripted::Toy::new(1);
        let passing = Arc::clone(&gate);
        toy.model = Arc::new(move |history| {
            passing.pass();
            after(known(history)).0
        });
        toy.draft_model = Arc::new(move |history, depth| {
            let last = (1..depth).fold(known(history), |token, _| after(token).1);
            after(last).0
        });
        toy.text = scripted::ToyText { pieces, stop_tokens };
        toy.block_size = 16;
        let (send, logs) = mpsc::channel();
        let state = state_of(config(&["--slots", "1", "--max-waiting", "1"]), move || {
            let (engine, log) = toy.try_engine()?;
            let _ = send.send(log);
            Ok((Box::new(engine), info))
        });
        (state, logs.recv().unwrap())
    }
}

/// A completion in a mode, whole and as a stream; both must tell the same. Gives the whole one, and the stream's texts.
fn complete(server: &Server, mode: &str, fields: &Value) -> (Value, Vec<String>) {
    let mut body = json!({"prompt": [0], "max_tokens": 40, "speculation": {"mode": mode}});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let whole = server.request("POST", "/v1/completions", &body.to_string());
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let chunks = server.request("POST", "/v1/completions", &body.to_string()).chunks();
    let texts: Vec<String> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .filter(|text| !text.is_empty())
        .map(str::to_owned)
        .collect();
    assert_eq!(texts.concat(), whole["choices"][0]["text"].as_str().unwrap(), "{mode}");
    let [.., last, usage] = &chunks[..] else { panic!("{chunks:?}") };
    assert_eq!(last["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"], "{mode}");
    let counts = |body: &Value| {
        let mut usage = body["usage"].clone();
        // What `auto` drafts follows measured times.
        let details = usage["completion_tokens_details"].take();
        let drafts = ["accepted_prediction_tokens", "rejected_prediction_tokens"].map(|name| &details[name]);
        assert!(mode != "ar" || drafts == [0, 0], "{details}");
        (usage, (mode != "auto").then_some(details))
    };
    assert_eq!(counts(usage), counts(&whole), "{mode}");
    (whole, texts)
}

fn expect(script: Script, fields: Value, text: &str, tokens: usize, reason: &str) -> Vec<Vec<String>> {
    let server = Server::over(script.state().0);
    let run = |mode: &&str| {
        let (whole, texts) = complete(&server, mode, &fields);
        assert_eq!(whole["choices"][0]["text"], text, "{mode}");
        assert_eq!(whole["usage"]["completion_tokens"], tokens, "{mode}");
        assert_eq!(whole["choices"][0]["finish_reason"], reason, "{mode}");
        if let Some(logprobs) = whole["choices"][0]["logprobs"].as_object() {
            assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), tokens, "{mode}");
            assert_eq!(logprobs["tokens"].as_array().unwrap().len(), tokens, "{mode}");
        }
        texts
    };
    MODES.iter().map(run).collect()
}

/// Case 23.
#[test]
fn a_stop_string_completed_inside_an_accepted_block_cuts_text_tokens_and_logprobs() {
    let script = Script::new(&["Hello", " wor", "ld", " and", " more"]);
    expect(script, json!({"stop": "world", "logprobs": 1}), "Hello ", 3, "stop");
}

/// Case 24.
#[test]
fn the_stop_string_that_completes_earliest_wins() {
    let stops = json!({"stop": ["more", "o w", "world"], "logprobs": 0});
    expect(Script::new(&["Hello", " wor", "ld", " and", " more"]), stops, "Hell", 2, "stop");
    // Both complete in one token: the one whose end comes first.
    expect(Script::new(&["a", "bcde", "f"]), json!({"stop": ["bcd", "ab"]}), "", 2, "stop");
}

/// Case 25.
#[test]
fn a_forming_stop_string_never_leaks_and_one_that_cannot_complete_is_released() {
    let script = Script::new(&["hi", "\nUser", ":", "!"]);
    for texts in expect(script, json!({"stop": "\nUser:"}), "hi", 3, "stop") {
        assert_eq!(texts, ["hi"]);
    }
    let script = Script::new(&["hi", "\nUs", "age", "!"]);
    let fields = json!({"stop": ["\nUser:"], "max_tokens": 4});
    let runs = expect(script, fields, "hi\nUsage!", 4, "length");
    // Token by token: the held text comes with what decides it.
    assert_eq!(runs[0], ["hi", "\nUsage", "!"]);
    // Held at the end: released with it.
    let script = Script::new(&["hi", "\nUs", "age", "!"]);
    expect(script, json!({"stop": ["\nUser:"], "max_tokens": 2}), "hi\nUs", 2, "length");
}

/// Case 26.
#[test]
fn a_character_over_three_tokens_arrives_as_one_chunk() {
    let euro = "€".as_bytes();
    let pieces: [&[u8]; 5] = [b"a", &euro[..1], &euro[1..2], &euro[2..], b"b"];
    let script = || Script::bytes(pieces.into_iter());
    let runs = expect(script(), json!({"max_tokens": 5}), "a€b", 5, "length");
    assert_eq!(runs[0], ["a", "€", "b"]);
    assert!(runs.concat().iter().all(|text| !text.contains('\u{FFFD}')));
    // A text that ends inside the character ends before it.
    for (max_tokens, text) in [(1, "a"), (2, "a"), (3, "a"), (4, "a€")] {
        expect(script(), json!({"max_tokens": max_tokens}), text, max_tokens, "length");
    }
}

/// Case 27: what the path holds after the stop token is neither told nor committed.
#[test]
fn a_stop_token_inside_the_path_is_the_last_token_told_and_committed() {
    for mode in MODES {
        let script = Script { stop_tokens: vec![3], ..Script::new(&["a", "b", "<eos>", "c", "d"]) };
        let (state, log) = script.state();
        let server = Server::over(state);
        let (whole, _) = complete(&server, mode, &json!({}));
        assert_eq!(whole["choices"][0]["text"], "ab", "{mode}");
        assert_eq!(whole["choices"][0]["finish_reason"], "stop", "{mode}");
        assert_eq!(whole["usage"]["completion_tokens"], 3, "{mode}");
        let log = log.lock().unwrap();
        let committed: Vec<u32> = log.commits.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
        // Twice, whole and streamed. A stop token that ends a path is committed with it; one that follows a path is
        // the root of a round that does not happen.
        let mut runs = committed.chunk_by(|_, &next| next != 0);
        for run in [runs.next().unwrap(), runs.next().unwrap()] {
            let drafted = mode == "chain" || mode == "tree";
            assert!(run == [0, 1, 2, 3] || (!drafted && run == [0, 1, 2]), "{mode}: {run:?}");
        }
        assert_eq!(runs.next(), None);
    }
}

/// Case 28.
#[test]
fn max_tokens_around_a_block_of_16_is_exact() {
    let text = "abcdefghijklmnopqrstuvwxyz";
    let pieces: Vec<&str> = (0..text.len()).map(|at| &text[at..=at]).collect();
    let server = Server::over(Script::new(&pieces).state().0);
    for tokens in [1, 7, 8, 9, 15, 16, 17] {
        for mode in MODES {
            let (whole, _) = complete(&server, mode, &json!({"max_tokens": tokens, "logprobs": 2}));
            assert_eq!(whole["choices"][0]["text"], text[..tokens], "{mode}");
            assert_eq!(whole["usage"]["completion_tokens"], tokens, "{mode}");
            assert_eq!(whole["usage"]["total_tokens"], tokens + 1, "{mode}");
            let logprobs = &whole["choices"][0]["logprobs"]["token_logprobs"];
            assert_eq!(logprobs.as_array().unwrap().len(), tokens, "{mode}");
        }
    }
}

/// Sends raw bytes and reads until the server closes the connection.
fn raw(server: &Server, text: &str) -> String {
    let mut socket = TcpStream::connect(server.address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).expect("the server closes the connection");
    String::from_utf8(answer).unwrap()
}

/// Case 29, as HTTP/1.1 clients see it: one whole JSON answer, no event, and the connection ends when asked to.
#[test]
fn a_stream_with_invalid_parameters_is_a_400_and_the_connection_ends() {
    let server = Server::over(Script::new(&["a"]).state().0);
    let send = |body: &str, connection: &str| {
        let length = body.len();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\nconnection: {connection}\r\n\r\n{body}"
        )
    };
    for (fields, param) in [
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"stop": [""]}), "stop[0]"),
        (json!({"speculation": {"mode": "bush"}}), "speculation.mode"),
    ] {
        let mut body = json!({"prompt": [0], "stream": true});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        // On a kept connection the answer has an end: the next request on it is answered.
        let both = send(&body.to_string(), "keep-alive") + &send(&body.to_string(), "close");
        let answers = raw(&server, &both);
        assert_eq!(answers.matches("HTTP/1.1 400 ").count(), 2, "{answers}");
        assert_eq!(answers.matches("application/json").count(), 2, "{answers}");
        assert!(!answers.contains("data:") && !answers.contains("event-stream"), "{answers}");
        assert_eq!(answers.matches(&format!(r#""param":"{param}""#)).count(), 2, "{param}: {answers}");
    }
}

/// Case 30: after the reader has left, the target does the pass that it is in and no other; the slot is empty then.
#[test]
fn a_reader_that_leaves_frees_its_slot_within_one_step() {
    let script = Script::new(&["a", "b"]);
    let gate = Arc::clone(&script.gate);
    let (state, log) = script.state();
    let server = Server::over(state);
    let before = gate.begun();
    gate.allow(Some(3));
    let body = json!({"prompt": [0], "max_tokens": 200, "stream": true, "draft": false});
    let mut socket = server.open("POST", "/v1/completions", &body.to_string());
    socket.read_exact(&mut [0; 1]).unwrap();
    eventually("a fourth pass waits at the gate", || gate.begun() - before == 4);
    drop(socket);
    // That pass has begun.
    eventually("the server sees that the reader is gone", || has_connections(&server.state, 0));
    assert_eq!(server.state.queue().in_flight(), 1);
    gate.allow(Some(1));
    // A fifth pass would wait at the gate for ever, and the place with it.
    eventually("the place is free", || server.state.queue().in_flight() == 0);
    assert_eq!(gate.begun() - before, 4);
    assert!(log.lock().unwrap().committed[0].is_empty(), "the slot is empty");
    gate.allow(None);
    let (whole, _) = complete(&server, "ar", &json!({"max_tokens": 2}));
    assert_eq!(whole["choices"][0]["text"], "ab");
}

/// Case 31.
#[test]
fn a_key_is_compared_exactly_and_its_scheme_in_any_case() {
    let (state, _) = toy_state(&Setup { args: vec!["--api-key", "AbC"], ..Setup::default() });
    let server = Server::over(state);
    let status = |header: &str| {
        let request = format!("GET /v1/models HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{header}\r\n");
        raw(&server, &request).split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for scheme in ["Bearer", "bearer", "BEARER", "bEaReR"] {
        assert_eq!(status(&format!("authorization: {scheme} AbC\r\n")), 200, "{scheme}");
        for key in ["abc", "ABC", "AbCd", "Ab", "AbC AbC", ""] {
            assert_eq!(status(&format!("authorization: {scheme} {key}\r\n")), 401, "{scheme} {key}");
        }
    }
    assert_eq!(status("authorization: Basic AbC\r\n"), 401);
    assert_eq!(status("authorization: AbC\r\n"), 401);
    assert_eq!(status(""), 401);
}

/// Case 32.
#[test]
fn what_comes_before_the_end_of_thinking_is_reasoning() {
    let dir = tempfile::tempdir().unwrap();
    let embedded = loader::resolve(&ModelSource::Embedded, true).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::write(dir.path().join(file), embedded.require(file).unwrap()).unwrap();
    }
    let template = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let files = loader::resolve(&ModelSource::Directory(dir.path().to_owned()), true).unwrap();
    let tokenizer = Arc::new(Tokenizer::load(&files, &[]).unwrap());
    for pieces in [&["abc", "</think>", "42"][..], &["a", "bc</th", "ink>4", "2"]] {
        let script = Script { tokenizer: Arc::clone(&tokenizer), ..Script::new(pieces) };
        let server = Server::over(script.state().0);
        for mode in MODES {
            let mut body = json!({
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": pieces.len(),
                "speculation": {"mode": mode},
            });
            let whole = server.request("POST", "/v1/chat/completions", &body.to_string()).json();
            let message = &whole["choices"][0]["message"];
            assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("abc"), &json!("42")));
            body["stream"] = true.into();
            let chunks = server.request("POST", "/v1/chat/completions", &body.to_string()).chunks();
            let told = |field: &str| -> String {
                chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
            };
            assert_eq!((told("reasoning_content"), told("content")), ("abc".into(), "42".into()), "{mode}");
        }
    }
}
