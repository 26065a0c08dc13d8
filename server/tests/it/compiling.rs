//! Constraints that take long to compile: the streams that run do not wait for them, and nobody who left is waited for.

use std::io::{BufRead as _, BufReader};
use std::sync::Arc;

use canopy_e2e::constrain::{Compiler, TokenBytes};
use canopy_e2e::engine::{TextDecoder, TokenText};
use canopy_server::error::ApiError;
use serde_json::json;

use crate::support::*;

/// A vocabulary whose tokens' texts are read behind a gate: the first compilation stands there for as long as it is shut.
struct Guarded(Arc<Gate>);

impl TokenText for Guarded {
    fn stop_tokens(&self) -> &[u32] {
        TOKENIZER.stop_tokens()
    }

    fn decoder(self: Arc<Self>) -> Box<dyn TextDecoder> {
        Arc::clone(&TOKENIZER).decoder()
    }

    fn token_bytes(&self) -> Option<Vec<TokenBytes>> {
        self.0.pass();
        Some(TOKENIZER.token_bytes())
    }
}

/// A server whose first compilation waits at the gate.
fn guarded(args: Vec<&'static str>, begin: Begin) -> (Server, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    gate.allow(Some(0));
    let grammars = Compiler::new(Arc::new(Guarded(Arc::clone(&gate))));
    (Server::start(&Setup { args, begin, grammars, ..Setup::default() }), gate)
}

fn constrained(fields: &serde_json::Value) -> String {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}});
    let mut body = json!({"prompt": "x", "max_tokens": 4, "response_format": schema});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body.to_string()
}

#[test]
fn streams_go_on_while_a_schema_is_compiled() {
    let held = Held::default();
    // Without comments the reader sees silence as what it is.
    let (server, gate) = guarded(vec!["--slots", "2", "--keep-alive", "3600"], held.begin());
    let body = json!({"prompt": "x", "max_tokens": 150, "stream": true}).to_string();
    let mut running = BufReader::new(server.open("POST", "/v1/completions", &body));
    eventually("the stream runs", || server.state.queue().in_flight() == 1);
    let waiting = server.open("POST", "/v1/completions", &constrained(&json!({"n": 3})));
    eventually("the schema is being compiled", || gate.begun() == 1);
    // 74 of the stream's 75 steps.
    held.allow(74);
    let (mut line, mut texts) = (String::new(), 0);
    while texts < 74 {
        line.clear();
        assert!(running.read_line(&mut line).unwrap() > 0, "the stream ends after {texts} steps");
        texts += usize::from(line.starts_with("data: "));
    }
    assert_eq!(
        (gate.begun(), server.state.queue().in_flight()),
        (1, 4),
        "the schema is still being compiled"
    );
    assert_eq!(server.seen.lock().unwrap().len(), 1);
    gate.allow(None);
    held.release();
    let answer = read_answer(waiting);
    assert_eq!((answer.status, answer.json()["choices"].as_array().unwrap().len()), (200, 3));
    assert_eq!(server.seen.lock().unwrap().len(), 4);
}

#[test]
fn a_reader_that_leaves_while_its_schema_is_compiled_keeps_no_place() {
    let (server, gate) = guarded(vec!["--slots", "1", "--max-waiting", "1"], Arc::new(|| true));
    let leaving = [(); 2].map(|()| server.open("POST", "/v1/completions", &constrained(&json!({}))));
    eventually("a schema is being compiled", || gate.begun() == 1);
    eventually("both are admitted", || server.state.queue().in_flight() == 2);
    drop(leaving);
    eventually("both places are free", || server.state.queue().in_flight() == 0);
    // Others are served, and the next schema's turn comes after the one that nobody waits for.
    assert_works(&server.state);
    let next = server.open("POST", "/v1/completions", &constrained(&json!({})));
    eventually("the next is admitted", || server.state.queue().in_flight() == 1);
    gate.allow(None);
    assert_eq!(read_answer(next).status, 200);
    assert_eq!(server.seen.lock().unwrap().len(), 2, "whose reader left is never generated for");
}

#[test]
fn the_time_that_a_request_may_take_counts_while_its_schema_is_compiled() {
    let (server, gate) = guarded(vec!["--request-timeout", "1"], Arc::new(|| true));
    for stream in [false, true] {
        let answer = server.request("POST", "/v1/completions", &constrained(&json!({"stream": stream})));
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("generation_timeout")));
    }
    assert_eq!((gate.begun(), server.state.queue().in_flight()), (1, 0));
    gate.allow(None);
}

/// As at the end of a drain's time, without the limits that a listener has then.
#[test]
fn what_is_being_compiled_when_all_streams_are_ended_is_ended_too() {
    let (server, gate) = guarded(vec!["--slots", "2"], Held::default().begin());
    let ask = |body: String| {
        let state = server.state.clone();
        std::thread::spawn(move || post(&state, "/v1/completions", body))
    };
    let waiting = ask(constrained(&json!({})));
    let running = ask(json!({"prompt": "x", "max_tokens": 150}).to_string());
    eventually("one is compiled, one runs", || gate.begun() == 1 && server.seen.lock().unwrap().len() == 1);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(server.state.engine().end_all(ApiError::draining()));
    let ended = running.join().unwrap();
    gate.allow(None);
    for answer in [ended, waiting.join().unwrap()] {
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("shutting_down")));
    }
    assert_eq!(server.state.queue().in_flight(), 0);
}

#[test]
fn a_bad_constraint_is_a_400_that_names_it_before_any_event() {
    let server = Server::start(&Setup::default());
    for (bad, name) in [
        (json!({"grammar": "start: \"a"}), "grammar"),
        (json!({"grammar": "start: \"a\" | missing"}), "grammar"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
            "response_format",
        ),
    ] {
        let mut body = json!({"prompt": ["x", "y"], "stream": true});
        body.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        let answer = server.request("POST", "/v1/completions", &body.to_string());
        assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")), "{bad}");
        assert_eq!(answer.json()["error"]["param"], name, "{}", answer.text());
        assert_eq!(server.state.queue().in_flight(), 0);
    }
    assert!(server.seen.lock().unwrap().is_empty(), "the engine hears of none");
    assert_works(&server.state);
}
