//! Connections that misbehave, and silence: late heads, floods of heads and bodies, keep-alive comments, deadlines.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

const SECOND: Duration = Duration::from_secs(1);

fn read_all(mut socket: TcpStream) -> String {
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = Vec::new();
    // A reset counts as the end.
    let _ = socket.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_head_that_does_not_come_closes_the_connection_and_holds_up_nobody() {
    let server = Server::start(&Setup { args: vec!["--header-timeout", "1"], ..Setup::default() });
    let slow: Vec<TcpStream> = (0..50)
        .map(|at| {
            let mut socket = TcpStream::connect(server.address).unwrap();
            let begun = if at % 2 == 0 { "" } else { "POST /v1/completions HTTP/1.1\r\nhost: x\r\n" };
            socket.write_all(begun.as_bytes()).unwrap();
            socket
        })
        .collect();
    let asked = Instant::now();
    let body = json!({"prompt": "x", "max_tokens": 2}).to_string();
    assert_eq!(server.request("POST", "/v1/completions", &body).status, 200);
    assert!(asked.elapsed() < SECOND, "{:?}", asked.elapsed());
    for socket in slow {
        read_all(socket);
    }
    assert!(asked.elapsed() < 10 * SECOND, "{:?}", asked.elapsed());
    eventually("no connection is open", || {
        get(&server.state, "/metrics").text().contains("canopy_connections 0\n")
    });
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
    let args = vec!["--max-connections", "2", "--header-timeout", "2"];
    let server = Server::start(&Setup { args, ..Setup::default() });
    let idle: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(100));
    let waiting = server.open("GET", "/health", "");
    drop(idle);
    assert_eq!(read_answer(waiting).status, 200);
}

#[test]
fn silence_is_broken_by_comments() {
    let args = vec!["--keep-alive", "1"];
    let server = Server::start(&Setup { args, delay: Duration::from_millis(2500), ..Setup::default() });
    let body = json!({"prompt": "x", "max_tokens": 2, "stream": true});
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    let comments = answer.text().lines().filter(|line| line.starts_with(':')).count();
    assert!((2..=4).contains(&comments), "{}", answer.text());
    let text: String =
        answer.chunks().iter().map(|c| c["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(text, toy_text(2));
}

#[test]
fn a_generation_past_its_time_is_504_streamed_or_not() {
    let args = vec!["--request-timeout", "1", "--slots", "1"];
    let server = Server::start(&Setup { args, delay: Duration::from_millis(50), ..Setup::default() });
    let mut body = json!({"prompt": "x", "max_tokens": 190});
    let started = Instant::now();
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("generation_timeout")));
    assert!(started.elapsed() < 3 * SECOND, "190 tokens take 4.75 s, {:?} passed", started.elapsed());
    body["stream"] = true.into();
    let events = server.request("POST", "/v1/completions", &body.to_string()).events();
    let last: Value = serde_json::from_str(&events[events.len() - 1]).unwrap();
    assert_eq!(last["error"]["code"], "generation_timeout");
    let metrics = get(&server.state, "/metrics");
    assert!(metrics.text().contains(r#"canopy_streams_total{reason="timeout"} 2"#), "{}", metrics.text());
    assert_works(&server.state);
}
