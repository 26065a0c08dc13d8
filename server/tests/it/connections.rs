//! Connections that misbehave, and silence: late heads, floods of heads and bodies, keep-alive comments, deadlines.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

fn read_all(mut socket: TcpStream) -> String {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = Vec::new();
    // A reset counts as the end; silence does not.
    if let Err(error) = socket.read_to_end(&mut bytes) {
        assert!(
            !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            "no end within a minute"
        );
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Connections whose heads do not come, the half of them begun.
fn slow_heads(server: &Server, count: usize) -> Vec<TcpStream> {
    let slow = |at| {
        let mut socket = TcpStream::connect(server.address).unwrap();
        let begun = if at % 2 == 0 { "" } else { "POST /v1/completions HTTP/1.1\r\nhost: x\r\n" };
        socket.write_all(begun.as_bytes()).unwrap();
        socket
    };
    (0..count).map(slow).collect()
}

#[test]
fn a_head_that_does_not_come_closes_the_connection_and_holds_up_nobody() {
    let server = Server::start(&Setup { args: vec!["--header-timeout", "3600"], ..Setup::default() });
    let slow = slow_heads(&server, 50);
    eventually("all are connected", || has_connections(&server.state, 50));
    let body = json!({"prompt": "x", "max_tokens": 2}).to_string();
    assert_eq!(server.request("POST", "/v1/completions", &body).status, 200);
    eventually("the slow ones are connected still", || has_connections(&server.state, 50));
    drop(slow);
    let server = Server::start(&Setup { args: vec!["--header-timeout", "1"], ..Setup::default() });
    let started = Instant::now();
    for socket in slow_heads(&server, 6) {
        read_all(socket);
    }
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    eventually("no connection is open", || has_connections(&server.state, 0));
}

#[test]
fn a_body_that_does_not_come_is_408() {
    let server = Server::start(&Setup { args: vec!["--body-timeout", "1"], ..Setup::default() });
    let mut socket = TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{\"prompt\": ";
    socket.write_all(head.as_bytes()).unwrap();
    let answer = read_answer(socket);
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (408, &json!("request_timeout")));
    assert_works(&server.state);
}

#[test]
fn a_flood_of_headers_is_431_and_a_bad_head_400() {
    let server = Server::start(&Setup::default());
    let many: String = (0..200).map(|at| format!("x-{at}: y\r\n")).collect();
    let long = format!("x-long: {}\r\n", "y".repeat(200_000));
    for flood in [many, long] {
        let mut socket = TcpStream::connect(server.address).unwrap();
        // The server may answer and close before everything is sent.
        let _ = socket.write_all(format!("GET /health HTTP/1.1\r\nhost: x\r\n{flood}\r\n").as_bytes());
        let answer = read_all(socket);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
    for bad in ["\u{0}\u{1}\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "nonsense\r\n\r\n"] {
        let mut socket = TcpStream::connect(server.address).unwrap();
        let _ = socket.write_all(bad.as_bytes());
        let answer = read_all(socket);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{bad:?}: {answer}");
    }
    assert_eq!(server.request("GET", "/health", "").status, 200);
}

#[test]
fn one_connection_too_many_waits_until_one_is_closed() {
    let args = vec!["--max-connections", "2", "--header-timeout", "3600"];
    let server = Server::start(&Setup { args, ..Setup::default() });
    let idle: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    eventually("both are connected", || has_connections(&server.state, 2));
    let waiting = server.open("GET", "/health", "");
    // The listener has it, the server has not.
    assert!(has_connections(&server.state, 2));
    drop(idle);
    assert_eq!(read_answer(waiting).status, 200);
}

/// The step ends when two comments have come: however late they are.
#[test]
fn silence_is_broken_by_comments() {
    let (gate, begin) = Gate::of_steps();
    let server = Server::start(&Setup { args: vec!["--keep-alive", "1"], begin, ..Setup::default() });
    let body = json!({"prompt": "x", "max_tokens": 2, "stream": true});
    let started = Instant::now();
    let mut reader = BufReader::new(server.open("POST", "/v1/completions", &body.to_string()));
    let (mut text, mut comments) = (String::new(), 0);
    while reader.read_line(&mut text).unwrap() > 0 {
        let line = text.lines().last().unwrap();
        comments += usize::from(line.starts_with(':'));
        if comments == 2 {
            gate.allow(None);
        }
    }
    // One a second at most.
    assert!((2..=started.elapsed().as_secs() as usize).contains(&comments), "{comments}: {text}");
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    let answer = Answer { status: 200, headers: Vec::new(), body: body.into() };
    let text: String =
        answer.chunks().iter().map(|c| c["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(text, toy_text(2));
}

/// The streams are at a stand: nothing but the limit ends them.
#[test]
fn a_generation_past_its_time_is_504_streamed_or_not() {
    let (args, held) = (vec!["--request-timeout", "1", "--slots", "1"], Held::default());
    let server = Server::start(&Setup { args, begin: held.begin(), ..Setup::default() });
    let mut body = json!({"prompt": "x", "max_tokens": 190});
    let started = Instant::now();
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("generation_timeout")));
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    body["stream"] = true.into();
    let events = server.request("POST", "/v1/completions", &body.to_string()).events();
    let last: Value = serde_json::from_str(&events[events.len() - 1]).unwrap();
    assert_eq!(last["error"]["code"], "generation_timeout");
    let metrics = get(&server.state, "/metrics");
    assert!(metrics.text().contains(r#"canopy_streams_total{reason="timeout"} 2"#), "{}", metrics.text());
    held.release();
    // A machine that stands still for a second answers 504 again.
    let short = json!({"prompt": "x", "max_tokens": 2});
    eventually("the next one is answered", || {
        post_json(&server.state, "/v1/completions", &short).status == 200
    });
}
