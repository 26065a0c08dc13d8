//! More than fits, going down, slow readers, a failing engine.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::json;

use crate::support::*;

/// Where no other test listens: none takes the port of a server that has ended. Linux has the whole network of 127.0.0.1.
const OWN_ADDRESS: &str = if cfg!(target_os = "linux") { "127.0.0.3:0" } else { "127.0.0.1:0" };

#[test]
fn one_stream_too_many_is_429_and_says_when_to_come_back() {
    let (args, held) = (vec!["--slots", "1", "--max-waiting", "1"], Held::default());
    let server = Server::start(&Setup { args, begin: held.begin(), ..Setup::default() });
    let body = json!({"prompt": "x", "max_tokens": 40}).to_string();
    let admitted: Vec<_> = (0..2).map(|_| server.open("POST", "/v1/completions", &body)).collect();
    eventually("both are admitted", || server.state.queue().in_flight() == 2);
    let refused = server.request("POST", "/v1/completions", &body);
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    let error = &refused.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("overloaded_error"), &json!("overloaded")));
    held.release();
    for socket in admitted {
        let answer = read_answer(socket);
        assert_eq!(
            (answer.status, answer.json()["choices"][0]["text"].as_str()),
            (200, Some(toy_text(40).as_str()))
        );
    }
    assert_works(&server.state);
}

#[test]
fn a_body_over_the_limit_is_413_declared_or_not() {
    let server = Server::start(&Setup { args: vec!["--body-limit", "2048"], ..Setup::default() });
    let fits = json!({"prompt": "x", "max_tokens": 1, "user": "u".repeat(1500)}).to_string();
    assert_eq!(server.request("POST", "/v1/completions", &fits).status, 200);
    let large = json!({"prompt": "x", "max_tokens": 1, "user": "u".repeat(3000)}).to_string();
    let answer = server.request("POST", "/v1/completions", &large);
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (413, &json!("body_too_large")));

    let mut socket = TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                transfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    socket.write_all(head.as_bytes()).unwrap();
    for _ in 0..3 {
        let _ = socket.write_all(format!("400\r\n{}\r\n", "x".repeat(1024)).as_bytes());
    }
    let mut start = [0; 12];
    socket.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 413");
    assert_works(&server.state);
}

#[test]
fn a_drain_finishes_what_runs_and_refuses_what_comes() {
    let args = vec!["--slots", "1", "--max-waiting", "1", "--drain-timeout", "600"];
    let held = Held::default();
    let (state, _) = toy_state(&Setup { args, begin: held.begin(), ..Setup::default() });
    let mut server = Server::at(OWN_ADDRESS, state);
    let body = json!({"prompt": "x", "max_tokens": 40, "stream": true}).to_string();
    let admitted: Vec<_> = (0..2).map(|_| server.open("POST", "/v1/completions", &body)).collect();
    eventually("both are admitted", || server.state.queue().in_flight() == 2);
    server.stop();
    eventually("the server is not ready", || get(&server.state, "/ready").status == 503);
    let refused = server.request("POST", "/v1/completions", &body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("shutting_down")));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(server.request("GET", "/health", "").status, 200);
    held.release();
    for socket in admitted {
        let text: String = read_answer(socket)
            .chunks()
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(text, toy_text(40));
    }
    server.join();
    assert!(TcpStream::connect(server.address).is_err(), "the listener is closed");
}

#[test]
fn a_drain_that_takes_too_long_ends_the_streams_with_an_error() {
    let (args, held) = (vec!["--drain-timeout", "0"], Held::default());
    let mut server = Server::start(&Setup { args, begin: held.begin(), ..Setup::default() });
    let body = json!({"prompt": "x", "max_tokens": 190, "stream": true}).to_string();
    let mut socket = server.open("POST", "/v1/completions", &body);
    socket.read_exact(&mut [0; 1]).unwrap();
    server.stop();
    let mut events = String::new();
    socket.read_to_string(&mut events).unwrap();
    assert!(events.trim_end().lines().last().unwrap().contains("shutting_down"), "{events}");
    server.join();
}

/// The reader takes nothing while its stream runs far ahead of the two updates that fit. It is ended; the other
/// stream's steps go on meanwhile.
#[test]
fn a_slow_reader_stalls_nobody() {
    let setup = Setup { args: vec!["--slots", "2"], update_buffer: 2, ..Setup::default() };
    let (state, _) = toy_state(&setup);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let request = canopy_e2e::engine::GenerateRequest::new(vec![5], 150);
    let slow = state.queue().admit().unwrap();
    let mut unread = runtime.block_on(state.engine().submit(request, None, slow)).unwrap();
    eventually("the slow reader's place is free", || state.queue().in_flight() == 0);
    let kept = std::iter::from_fn(|| unread.blocking_recv()).count();
    assert_eq!(kept, 2, "what fitted is still there, then the channel ends");
}

#[test]
fn a_step_that_panics_is_told_by_health_and_answers_stay_whole() {
    let (state, _) = toy_state(&Setup::default());
    let answer = post_json(&state, "/v1/completions", &json!({"prompt": PANICKING, "max_tokens": 5}));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (500, &json!("internal")));
    eventually("health fails", || get(&state, "/health").status == 503);
    let after = post_json(&state, "/v1/completions", &json!({"prompt": "x", "max_tokens": 5}));
    assert_eq!((after.status, &after.json()["error"]["code"]), (503, &json!("engine_down")));
}

#[test]
fn a_stuck_step_is_told_by_health() {
    let (gate, begin) = Gate::of_steps();
    let (state, _) = toy_state(&Setup { begin, ..Setup::default() });
    let health = || state.engine().health().check(Duration::from_millis(50));
    assert!(health().is_ok());
    let asking = std::thread::spawn({
        let state = state.clone();
        move || post_json(&state, "/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).status
    });
    eventually("the step is stuck", || health().is_err());
    assert_eq!(gate.begun(), 1);
    gate.allow(None);
    assert_eq!(asking.join().unwrap(), 200);
    eventually("the step is over", || health().is_ok());
}
