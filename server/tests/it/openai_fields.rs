//! OpenAI's parameters and what other servers add to them: each is honoured, refused by its name, or one of the few that
//! change nothing. None is dropped in silence.

use serde_json::{Value, json};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn body(path: &str) -> Value {
    match path {
        CHAT => json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        _ => json!({"prompt": "x", "max_tokens": 2}),
    }
}

/// Sends each field alone and expects a 400 that names it.
fn refused(path: &str, fields: &[(&str, Value)]) {
    let (state, seen) = toy_state(&Setup::default());
    for (name, value) in fields {
        let mut body = body(path);
        body[*name] = value.clone();
        let answer = post_json(&state, path, &body);
        assert_eq!(answer.status, 400, "{path} {name}: {}", answer.text());
        let error = &answer.json()["error"];
        let param = error["param"].as_str().unwrap_or_default();
        assert_eq!(param.split(['.', '[']).next(), Some(*name), "{path}: {error}");
        assert!(error["message"].as_str().unwrap().contains(name), "{error}");
    }
    assert!(seen.lock().unwrap().is_empty(), "a refused request reached the engine");
}

#[test]
fn what_chat_does_not_serve_is_refused_by_name() {
    let parts = json!([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]);
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    refused(
        CHAT,
        &[
            ("audio", json!({"voice": "alloy", "format": "wav"})),
            ("function_call", json!("auto")),
            ("functions", json!([function])),
            ("messages", json!([{"role": "user", "content": parts}])),
            ("messages", json!([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])),
            ("messages", json!([{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}])),
            ("messages", json!([{"role": "function", "name": "f", "content": "x"}])),
            ("messages", json!([{"role": "assistant", "content": "x", "audio": {"id": "a"}}])),
            ("messages", json!([{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}])),
            ("messages", json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]}])),
            ("messages", json!([{"role": "assistant", "tool_calls": ["f"]}])),
            ("modalities", json!(["text", "audio"])),
            ("moderation", json!({"model": "m"})),
            ("parallel_tool_calls", json!("no")),
            ("prediction", json!({"type": "content", "content": "x"})),
            ("prompt_cache_key", json!("k")),
            ("prompt_cache_options", json!({})),
            ("prompt_cache_retention", json!("24h")),
            ("reasoning_effort", json!("low")),
            ("safety_identifier", json!("s")),
            ("service_tier", json!("priority")),
            ("store", json!(true)),
            ("tool_choice", json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}})),
            ("tools", json!([{"type": "function", "function": {"name": "f", "strict": true}}])),
            ("tools", json!([{"type": "custom", "custom": {"name": "f"}}])),
            ("verbosity", json!("low")),
            ("web_search_options", json!({})),
            ("add_generation_prompt", json!(false)),
            ("chat_template", json!("{{ messages }}")),
            ("documents", json!([])),
            ("best_of", json!(1)),
            ("echo", json!(true)),
            ("suffix", json!("x")),
        ],
    );
    let (state, _) = toy_state(&Setup::default());
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (choice, named) in [
        (json!({"type": "function", "function": {"name": "f"}, "x": 1}), "tool_choice.x"),
        (json!({"type": "function", "function": {"name": "f", "x": 1}}), "tool_choice.function.x"),
    ] {
        let mut body = body(CHAT);
        body["tools"] = json!([tool]);
        body["tool_choice"] = choice;
        assert_eq!(post_json(&state, CHAT, &body).json()["error"]["param"], named);
    }
}

#[test]
fn what_completions_do_not_serve_is_refused_by_name() {
    refused(
        COMPLETIONS,
        &[
            ("best_of", json!(2)),
            ("logprobs", json!(21)),
            ("suffix", json!("x")),
            ("tools", json!([])),
            ("metadata", json!({})),
            ("service_tier", json!("auto")),
            ("enable_thinking", json!(true)),
        ],
    );
}

#[test]
fn what_other_servers_add_is_refused_by_name_on_both() {
    for path in [CHAT, COMPLETIONS] {
        refused(
            path,
            &[
                ("use_beam_search", json!(true)),
                ("length_penalty", json!(1.2)),
                ("early_stopping", json!(true)),
                ("include_stop_str_in_output", json!(true)),
                ("spaces_between_special_tokens", json!(false)),
                ("truncate_prompt_tokens", json!(5)),
                ("prompt_logprobs", json!(1)),
                ("allowed_token_ids", json!([1])),
                ("bad_words", json!(["x"])),
                ("guided_json", json!({})),
                ("guided_regex", json!("a+")),
                ("structured_outputs", json!({"regex": "a+"})),
                ("priority", json!(1)),
                ("typical_p", json!(0.9)),
                ("mirostat", json!(2)),
                ("logit_bias", json!({"x": 1})),
                ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {}, "x": 1}})),
                ("response_format", json!({"type": "structural_tag"})),
                ("stream_options", json!({"include_usage": true})),
            ],
        );
    }
}

/// README names these: they are read, checked for their type, and change nothing.
#[test]
fn what_changes_nothing_is_taken() {
    let (state, seen) = toy_state(&Setup::default());
    let mut chat = body(CHAT);
    let mut completion = body(COMPLETIONS);
    let plain = [post_json(&state, CHAT, &chat).json(), post_json(&state, COMPLETIONS, &completion).json()];
    for (field, value) in
        [("user", json!("u")), ("metadata", json!({"a": "b"})), ("service_tier", json!("default"))]
    {
        chat[field] = value;
    }
    chat["messages"][0]["name"] = json!("someone");
    completion["user"] = json!("u");
    let with = [post_json(&state, CHAT, &chat).json(), post_json(&state, COMPLETIONS, &completion).json()];
    for (plain, with) in plain.iter().zip(&with) {
        assert_eq!((&plain["choices"], &plain["usage"]), (&with["choices"], &with["usage"]));
    }
    let seen = seen.lock().unwrap();
    assert_eq!(format!("{:?}", seen[0].prompt), format!("{:?}", seen[2].prompt));
}

/// OpenAI allows five alternatives, this server twenty.
#[test]
fn six_alternatives_are_six() {
    let (state, _) = toy_state(&Setup::default());
    let mut body = body(COMPLETIONS);
    body["logprobs"] = json!(6);
    let answer = post_json(&state, COMPLETIONS, &body).json();
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 6);
}
