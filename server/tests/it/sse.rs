//! Streams over real sockets: chunks, events of rounds, errors before and within, disconnects.

use std::io::Read as _;

use serde_json::{Value, json};

use crate::support::*;

fn text_of(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
}

#[test]
fn a_streamed_completion_is_chunks_and_done() {
    let server = Server::start(&Setup::default());
    let body =
        json!({"prompt": "x", "max_tokens": 9, "stream": true, "stream_options": {"include_usage": true}});
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    let chunks = answer.chunks();
    assert_eq!(text_of(&chunks), toy_text(9));
    assert!(
        chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == "text_completion")
    );
    let (usage, rest) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(9)));
    assert!(rest.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("canopy").is_none()));
    let (last, rest) = rest.split_last().unwrap();
    assert_eq!(
        last["choices"][0],
        json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "length"})
    );
    assert!(rest.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
}

#[test]
fn a_streamed_chat_answer_starts_with_the_role() {
    let server = Server::start(&Setup::default());
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": true});
    let chunks = server.request("POST", "/v1/chat/completions", &body.to_string()).chunks();
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, toy_text(5));
    let last = &chunks[chunks.len() - 1];
    assert_eq!(
        (&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]),
        (&json!({}), &json!("length"))
    );
    assert!(last.get("usage").is_none());
}

#[test]
fn rounds_come_as_events_of_their_own_before_their_text() {
    let server = Server::start(&Setup::default());
    let body = json!({"prompt": "x", "max_tokens": 6, "stream": true, "canopy": true});
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    let names: Vec<&str> = answer.named_events().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["canopy", "message", "canopy", "message", "canopy", "message", "message", "message"]);
    let mut text = String::new();
    for (at, canopy) in answer.rounds().iter().enumerate() {
        let keys: Vec<&str> = canopy.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["index", "tokens", "round"]);
        let round = &canopy["round"];
        assert_eq!((&round["start"], &round["path"]), (&json!(2 * at), &json!([0, 2])));
        let node = json!({"token": TOKENIZER.encode(TEXT).unwrap()[1], "text": toy_token(1), "parent": 0, "depth": 1,
                          "prob": 0.5, "log_prob": -0.5});
        assert_eq!((round["nodes"].as_array().unwrap().len(), &round["nodes"][1]), (3, &node));
        assert!(round["bonus"]["text"].is_string() && round["bonus"]["token"].is_u64());
        assert_eq!(canopy["tokens"][0]["origin"], "drafted");
        text.extend(canopy["tokens"].as_array().unwrap().iter().map(|token| token["text"].as_str().unwrap()));
    }
    assert_eq!(text, toy_text(6));
    // A client that does not look at event names sees chunks without choices, as it does for the usage.
    let (_, data) = answer.named_events()[0];
    let chunk: Value = serde_json::from_str(data).unwrap();
    assert_eq!((&chunk["choices"], &chunk["object"]), (&json!([]), &json!("text_completion")));
    let chunks = answer.chunks();
    assert_eq!(text_of(&chunks), toy_text(6));
    assert_eq!(chunks[3]["canopy"]["acceptance_length"], 2.0);
}

#[test]
fn several_choices_are_told_apart_and_counted_together() {
    let server = Server::start(&Setup::default());
    let body = json!({"prompt": "x", "max_tokens": 5, "stream": true, "n": 3, "temperature": 1, "seed": 7,
                      "stream_options": {"include_usage": true}});
    let chunks = server.request("POST", "/v1/completions", &body.to_string()).chunks();
    for index in 0..3 {
        let own: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        let text: String = own.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!((text, &own[own.len() - 1]["finish_reason"]), (toy_text(5), &json!("length")));
    }
    assert_eq!(chunks[chunks.len() - 1]["usage"]["completion_tokens"], 15);
    let seeds: Vec<u64> = server.seen.lock().unwrap().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [7, 8, 9]);
    let whole = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "n": 2});
    let whole = server.request("POST", "/v1/chat/completions", &whole.to_string()).json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(
        (choices.len(), &choices[1]["index"], &whole["usage"]["completion_tokens"]),
        (2, &json!(1), &json!(10))
    );
    assert_eq!(choices[1]["message"]["content"], toy_text(5));
}

#[test]
fn the_answers_to_several_prompts_stream_side_by_side() {
    let server = Server::start(&Setup::default());
    let prompts = ["def f():", "import os", "x"];
    let body = json!({"prompt": prompts, "max_tokens": 5, "n": 2, "stream": true, "echo": true,
                      "stream_options": {"include_usage": true}});
    let chunks = server.request("POST", "/v1/completions", &body.to_string()).chunks();
    for (index, prompt) in prompts.iter().flat_map(|prompt| [prompt; 2]).enumerate() {
        let own: Vec<Value> =
            chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index).cloned().collect();
        assert_eq!(text_of(&own), format!("{prompt}{}", toy_text(5)), "{index}");
        let ends: Vec<&Value> = own.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
        assert_eq!(ends.iter().filter(|end| **end == "length").count(), 1);
        assert_eq!(ends[ends.len() - 1], "length");
    }
    let tokens: usize = prompts.iter().map(|prompt| TOKENIZER.encode(prompt).unwrap().len()).sum();
    let usage = &chunks[chunks.len() - 1]["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(tokens), &json!(30)));
    // One that fails ends the request, and its neighbours' slots are free again.
    let failing = json!({"prompt": ["x", FAILING], "max_tokens": 100, "stream": true});
    let answer = server.request("POST", "/v1/completions", &failing.to_string());
    assert!(answer.text().contains("server_error") && !answer.text().contains("[DONE]"), "{}", answer.text());
    eventually("every place is free", || server.state.queue().in_flight() == 0);
}

#[test]
fn an_error_within_a_stream_is_an_event_and_the_end() {
    let server = Server::start(&Setup::default());
    let body = json!({"prompt": FAILING, "max_tokens": 6, "stream": true});
    let answer = server.request("POST", "/v1/completions", &body.to_string());
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let error: Value = serde_json::from_str(&events[events.len() - 1]).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert_works(&server.state);
}

#[test]
fn invalid_parameters_of_a_stream_are_a_400_before_any_event() {
    let server = Server::start(&Setup::default());
    for body in
        [json!({"prompt": "x", "stream": true, "max_tokens": -1}), json!({"prompt": "", "stream": true})]
    {
        let answer = server.request("POST", "/v1/completions", &body.to_string());
        assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")));
        assert!(answer.json()["error"]["param"].is_string() && !answer.text().contains("data:"));
    }
}

/// The reader leaves while the second step goes on: nothing is emitted for it in a third, which is the waiting request's.
#[test]
fn a_disconnect_frees_the_slot_within_a_step() {
    let (gate, begin) = Gate::of_steps();
    let args = vec!["--slots", "1", "--max-waiting", "1"];
    let server = Server::start(&Setup { args, begin, ..Setup::default() });
    let endless = json!({"prompt": "x", "max_tokens": 150, "stream": true}).to_string();
    let mut socket = server.open("POST", "/v1/completions", &endless);
    gate.allow(Some(1));
    eventually("the second step has begun", || gate.begun() == 2);
    socket.read_exact(&mut [0; 1]).unwrap();
    let waiting =
        server.open("POST", "/v1/completions", &json!({"prompt": "y", "max_tokens": 2}).to_string());
    eventually("the second waits", || server.state.queue().in_flight() == 2);
    drop(socket);
    eventually("the server sees that the reader has left", || has_connections(&server.state, 1));
    gate.allow(None);
    let answer = read_answer(waiting);
    assert_eq!(
        (answer.status, answer.json()["choices"][0]["text"].as_str()),
        (200, Some(toy_text(2).as_str()))
    );
    assert_eq!(gate.begun(), 3);
    eventually("both places are free", || server.state.queue().in_flight() == 0);
    let metrics = get(&server.state, "/metrics");
    assert!(metrics.text().contains(r#"canopy_streams_total{reason="cancelled"} 1"#), "{}", metrics.text());
}

/// Nothing comes after the last reader has left during a step, and the metrics must not wait for it.
#[test]
fn an_idle_server_says_so_after_its_last_reader_left() {
    let (gate, begin) = Gate::of_steps();
    let server = Server::start(&Setup { args: vec!["--slots", "1"], begin, ..Setup::default() });
    let endless = json!({"prompt": "x", "max_tokens": 150, "stream": true}).to_string();
    let socket = server.open("POST", "/v1/completions", &endless);
    eventually("the first step has begun", || gate.begun() == 1);
    gate.allow(Some(1));
    let running = || get(&server.state, "/metrics").text().to_owned();
    eventually("the stream runs", || running().contains("canopy_streams_running 1"));
    eventually("the second step has begun", || gate.begun() == 2);
    drop(socket);
    eventually("the server sees that the reader has left", || has_connections(&server.state, 0));
    assert_eq!(server.state.queue().in_flight(), 1);
    gate.allow(None);
    eventually("the place is free", || server.state.queue().in_flight() == 0);
    eventually("no stream runs", || running().contains("canopy_streams_running 0"));
    assert_eq!(gate.begun(), 2, "no step follows the one that the reader left in");
}

#[test]
fn a_disconnect_frees_a_waiting_place_and_an_unstreamed_answer_too() {
    let (args, held) = (vec!["--slots", "1", "--max-waiting", "2"], Held::default());
    let server = Server::start(&Setup { args, begin: held.begin(), ..Setup::default() });
    let long = json!({"prompt": "x", "max_tokens": 150}).to_string();
    let sockets: Vec<_> = (0..3).map(|_| server.open("POST", "/v1/completions", &long)).collect();
    eventually("all are admitted", || server.state.queue().in_flight() == 3);
    drop(sockets);
    eventually("all places are free", || server.state.queue().in_flight() == 0);
    held.release();
    assert_works(&server.state);
}
