//! Every bad input is a 4xx with OpenAI's error body that names the field, streamed or not, and harms nobody.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Posts, checks the error's shape, and gives status, field and code.
fn error(answer: &Answer) -> (u16, Option<String>, String) {
    let body = answer.json();
    let error = body["error"].as_object().unwrap_or_else(|| panic!("no error in {body}"));
    let keys: Vec<&str> = error.keys().map(String::as_str).collect();
    assert_eq!(keys, ["message", "type", "param", "code"]);
    assert_eq!(error["type"], "invalid_request_error");
    let param = error["param"].as_str().map(str::to_owned);
    if let Some(param) = &param {
        assert!(error["message"].as_str().unwrap().contains(param.as_str()), "{body}");
    }
    (answer.status, param, error["code"].as_str().unwrap().to_owned())
}

fn check(path: &str, base: &Value, cases: &[(Value, u16, &str, &str)]) {
    let (state, seen) = toy_state(&Setup::default());
    for (fields, status, field, code) in cases {
        for stream in [false, true] {
            let mut body = base.clone();
            let body_fields = body.as_object_mut().unwrap();
            body_fields.insert("stream".into(), stream.into());
            body_fields.extend(fields.as_object().unwrap().clone());
            let answer = post_json(&state, path, &body);
            assert_eq!(
                answer.header("content-type"),
                Some("application/json"),
                "{fields}: {}",
                answer.text()
            );
            assert_eq!(error(&answer), (*status, Some((*field).to_owned()), (*code).to_owned()), "{body}");
        }
        assert_works(&state);
    }
    assert_eq!(seen.lock().unwrap().len(), cases.len(), "a bad request reached the engine");
}

#[test]
fn a_bad_field_that_both_endpoints_share_is_named() {
    let cases = [
        (json!({"model": "gpt-5"}), 404, "model", "model_not_found"),
        (json!({"model": 5}), 400, "model", "invalid_type"),
        (json!({"max_tokens": -1}), 400, "max_tokens", "invalid_value"),
        (json!({"max_tokens": 0}), 400, "max_tokens", "invalid_value"),
        (json!({"max_tokens": "many"}), 400, "max_tokens", "invalid_type"),
        (json!({"max_tokens": 1.5}), 400, "max_tokens", "invalid_type"),
        (json!({"max_tokens": 1u64 << 63}), 400, "max_tokens", "invalid_type"),
        (json!({"temperature": -0.1}), 400, "temperature", "invalid_value"),
        (json!({"temperature": 2.1}), 400, "temperature", "invalid_value"),
        (json!({"temperature": "hot"}), 400, "temperature", "invalid_type"),
        (json!({"top_p": 0}), 400, "top_p", "invalid_value"),
        (json!({"top_p": 1.01}), 400, "top_p", "invalid_value"),
        (json!({"top_k": -2}), 400, "top_k", "invalid_value"),
        (json!({"min_p": 1}), 400, "min_p", "invalid_value"),
        (json!({"seed": "x"}), 400, "seed", "invalid_type"),
        (json!({"stop": 5}), 400, "stop", "invalid_value"),
        (json!({"stop": ""}), 400, "stop", "invalid_value"),
        (json!({"stop": ["a", 5]}), 400, "stop[1]", "invalid_value"),
        (json!({"stop": ["a", ""]}), 400, "stop[1]", "invalid_value"),
        (json!({"stop": vec!["x"; 17]}), 400, "stop", "invalid_value"),
        (json!({"stop": "x".repeat(2000)}), 400, "stop", "invalid_value"),
        (json!({"stop_token_ids": [-1]}), 400, "stop_token_ids[0]", "invalid_type"),
        (json!({"stop_token_ids": [0, 1_000_000]}), 400, "stop_token_ids[1]", "invalid_value"),
        (json!({"skip_special_tokens": false}), 400, "skip_special_tokens", "unsupported_value"),
        (json!({"return_hidden_states": true}), 400, "return_hidden_states", "unsupported_value"),
        (json!({"n": 0}), 400, "n", "invalid_value"),
        (json!({"n": 17}), 400, "n", "invalid_value"),
        (json!({"min_tokens": -1}), 400, "min_tokens", "invalid_value"),
        (json!({"max_tokens": 5, "min_tokens": 6}), 400, "min_tokens", "invalid_value"),
        (json!({"frequency_penalty": 2.5}), 400, "frequency_penalty", "invalid_value"),
        (json!({"presence_penalty": -2.1}), 400, "presence_penalty", "invalid_value"),
        (json!({"repetition_penalty": 0}), 400, "repetition_penalty", "invalid_value"),
        (json!({"logit_bias": {"5": 101}}), 400, "logit_bias.5", "invalid_value"),
        (json!({"logit_bias": {"5": "x"}}), 400, "logit_bias.5", "invalid_value"),
        (json!({"logit_bias": {"five": 1}}), 400, "logit_bias", "invalid_value"),
        (json!({"logit_bias": {"99999999": 1}}), 400, "logit_bias", "invalid_value"),
        (json!({"logit_bias": [5]}), 400, "logit_bias", "invalid_type"),
        (json!({"grammar": ""}), 400, "grammar", "invalid_value"),
        (
            json!({"grammar": "start: \"a\"", "response_format": {"type": "json_object"}}),
            400,
            "grammar",
            "invalid_value",
        ),
        (json!({"response_format": "json"}), 400, "response_format", "invalid_value"),
        (json!({"response_format": {}}), 400, "response_format.type", "missing_field"),
        (json!({"response_format": {"type": "xml"}}), 400, "response_format.type", "invalid_value"),
        (json!({"response_format": {"type": "text", "x": 1}}), 400, "response_format.x", "unknown_field"),
        (
            json!({"response_format": {"type": "json_schema"}}),
            400,
            "response_format.json_schema",
            "missing_field",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            400,
            "response_format.json_schema.schema",
            "missing_field",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
            400,
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (json!({"ignore_eos": 1}), 400, "ignore_eos", "invalid_type"),
        (json!({"stream_options": {"x": 1}}), 400, "stream_options.x", "unknown_field"),
        (json!({"stream": false, "stream_options": {}}), 400, "stream_options", "invalid_value"),
        (json!({"stream": "yes"}), 400, "stream", "invalid_type"),
        (json!({"draft": "no"}), 400, "draft", "invalid_type"),
        (json!({"draft": false, "speculation": {"mode": "tree"}}), 400, "speculation.mode", "invalid_value"),
        (json!({"speculation": {"mode": "forest"}}), 400, "speculation.mode", "invalid_value"),
        (json!({"speculation": {"mood": "tree"}}), 400, "speculation.mood", "unknown_field"),
        (json!({"speculation": "tree"}), 400, "speculation", "invalid_type"),
        (json!({"speculation": {"budget": -1}}), 400, "speculation.budget", "invalid_value"),
        (json!({"speculation": {"budget": 256}}), 400, "speculation.budget", "invalid_value"),
        (json!({"speculation": {"budget": "big"}}), 400, "speculation.budget", "invalid_type"),
        (json!({"canopy": "yes"}), 400, "canopy", "invalid_value"),
        (json!({"canopy": {"rounds": 1}}), 400, "canopy.rounds", "invalid_value"),
        (json!({"speculation": ["tree", 8]}), 400, "speculation", "invalid_type"),
        (json!({"stream": true, "stream_options": [true]}), 400, "stream_options", "invalid_type"),
        (json!({"canopy": {"trees": true}}), 400, "canopy.trees", "unknown_field"),
        (json!({"max_tokns": 5}), 400, "max_tokns", "unknown_field"),
    ];
    check(COMPLETIONS, &json!({"prompt": "x"}), &cases);
    check(CHAT, &json!({"messages": [{"role": "user", "content": "x"}]}), &cases);
}

#[test]
fn a_bad_completion_field_is_named() {
    let long = vec![5; CONTEXT];
    let text = "word ".repeat(CONTEXT * 2);
    let cases = [
        (json!({"prompt": ""}), 400, "prompt", "invalid_value"),
        (json!({"prompt": []}), 400, "prompt", "invalid_value"),
        (json!({"prompt": [""]}), 400, "prompt[0]", "invalid_value"),
        (json!({"prompt": [[]]}), 400, "prompt[0]", "invalid_value"),
        (json!({"prompt": ["a", ""]}), 400, "prompt[1]", "invalid_value"),
        (json!({"prompt": ["a", 1]}), 400, "prompt[1]", "invalid_value"),
        (json!({"prompt": [[1], []]}), 400, "prompt[1]", "invalid_value"),
        (json!({"prompt": [[1], [2, 1_000_000]]}), 400, "prompt[1][1]", "invalid_value"),
        (json!({"prompt": [{"text": "a"}]}), 400, "prompt[0]", "invalid_value"),
        (json!({"prompt": ["a", long]}), 400, "prompt[1]", "context_length_exceeded"),
        (json!({"prompt": vec!["a"; 100]}), 400, "prompt", "invalid_value"),
        (json!({"prompt": vec!["a"; 50], "n": 2}), 400, "n", "invalid_value"),
        (json!({"prompt": [1, "a"]}), 400, "prompt[1]", "invalid_value"),
        (json!({"prompt": [1, -1]}), 400, "prompt[1]", "invalid_value"),
        (json!({"prompt": [1_000_000]}), 400, "prompt[0]", "invalid_value"),
        (json!({"prompt": 5}), 400, "prompt", "invalid_value"),
        (json!({"prompt": {"text": "a"}}), 400, "prompt", "invalid_value"),
        (json!({"prompt": null}), 400, "prompt", "missing_field"),
        (json!({"prompt": long}), 400, "prompt", "context_length_exceeded"),
        (json!({"prompt": text}), 400, "prompt", "context_length_exceeded"),
        (json!({"suffix": "end"}), 400, "suffix", "unsupported_value"),
        (json!({"best_of": 3}), 400, "best_of", "unsupported_value"),
        (json!({"logprobs": 21}), 400, "logprobs", "invalid_value"),
        (json!({"logprobs": true}), 400, "logprobs", "invalid_type"),
        (json!({"messages": []}), 400, "messages", "unknown_field"),
    ];
    check(COMPLETIONS, &json!({"prompt": "x"}), &cases);
}

#[test]
fn a_bad_chat_field_is_named() {
    let message = |fields: Value| json!({"messages": [{"role": "system", "content": "x"}, fields]});
    const ARGUMENTS: &str = "messages[1].tool_calls[0].function.arguments";
    let call = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    let text = "word ".repeat(CONTEXT * 2);
    let cases = [
        (json!({"messages": null}), 400, "messages", "missing_field"),
        (json!({"messages": []}), 400, "messages", "invalid_value"),
        (json!({"messages": "hello"}), 400, "messages", "invalid_type"),
        (json!({"messages": ["hello"]}), 400, "messages[0]", "invalid_type"),
        (message(json!({"content": "x"})), 400, "messages[1].role", "missing_field"),
        (message(json!({"role": "function", "content": "x"})), 400, "messages[1].role", "invalid_value"),
        (message(json!({"role": "user"})), 400, "messages[1].content", "missing_field"),
        (message(json!({"role": "user", "content": 5})), 400, "messages[1].content", "invalid_value"),
        (message(json!({"role": "user", "content": ["x"]})), 400, "messages[1].content[0]", "invalid_value"),
        (
            message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
            400,
            "messages[1].content[0].type",
            "invalid_value",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            400,
            "messages[1].content[0].text",
            "invalid_value",
        ),
        (
            message(json!({"role": "user", "content": "x", "tool_calls": [{}]})),
            400,
            "messages[1].tool_calls",
            "invalid_value",
        ),
        (
            message(json!({"role": "user", "content": "x", "mood": 1})),
            400,
            "messages[1].mood",
            "unknown_field",
        ),
        (call(json!({"function": {"name": "f", "arguments": {"a": 1}}})), 400, ARGUMENTS, "invalid_value"),
        (call(json!({"function": {"name": "f", "arguments": "[]"}})), 400, ARGUMENTS, "invalid_value"),
        (
            call(json!({"function": {"name": 5}})),
            400,
            "messages[1].tool_calls[0].function.name",
            "invalid_value",
        ),
        (call(json!({"function": {}})), 400, "messages[1].tool_calls[0].function.name", "missing_field"),
        (
            call(json!({"id": 5, "function": {"name": "f"}})),
            400,
            "messages[1].tool_calls[0].id",
            "invalid_value",
        ),
        (
            call(json!({"index": "0", "function": {"name": "f"}})),
            400,
            "messages[1].tool_calls[0].index",
            "invalid_value",
        ),
        (message(json!({"role": "user", "content": text})), 400, "messages", "context_length_exceeded"),
        (json!({"max_completion_tokens": 0}), 400, "max_completion_tokens", "invalid_value"),
        (json!({"max_tokens": 4, "max_completion_tokens": 5}), 400, "max_completion_tokens", "invalid_value"),
        (json!({"logprobs": true, "top_logprobs": 21}), 400, "top_logprobs", "invalid_value"),
        (json!({"top_logprobs": 2}), 400, "top_logprobs", "invalid_value"),
        (json!({"logprobs": 2}), 400, "logprobs", "invalid_type"),
        (json!({"store": true}), 400, "store", "unsupported_value"),
        (json!({"tools": [{"type": "function"}]}), 400, "tools[0].function", "missing_field"),
        (
            json!({"tools": [{"type": "web", "function": {"name": "f"}}]}),
            400,
            "tools[0].type",
            "invalid_value",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f g"}}]}),
            400,
            "tools[0].function.name",
            "invalid_value",
        ),
        (json!({"tool_choice": "sometimes"}), 400, "tool_choice", "invalid_value"),
        (json!({"tool_choice": "required"}), 400, "tool_choice", "invalid_value"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": false}),
            400,
            "parallel_tool_calls",
            "unsupported_value",
        ),
        (json!({"thinking_budget": -1}), 400, "thinking_budget", "invalid_value"),
        (json!({"enable_thinking": "yes"}), 400, "enable_thinking", "invalid_type"),
        (json!({"chat_template_kwargs": {"x": 1}}), 400, "chat_template_kwargs.x", "unknown_field"),
        (json!({"chat_template_kwargs": [true]}), 400, "chat_template_kwargs", "invalid_type"),
        (
            json!({"chat_template_kwargs": {"tools": []}}),
            400,
            "chat_template_kwargs.tools",
            "unsupported_value",
        ),
        (
            json!({"chat_template_kwargs": {"enable_thinking": 1}}),
            400,
            "chat_template_kwargs.enable_thinking",
            "invalid_value",
        ),
        (json!({"messages": [["user", "x"]]}), 400, "messages[0]", "invalid_type"),
        (json!({"tools": [["function", {"name": "f"}]]}), 400, "tools[0]", "invalid_type"),
        (
            json!({"tools": [{"type": "function", "function": ["f"]}]}),
            400,
            "tools[0].function",
            "invalid_type",
        ),
        (
            json!({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false}}),
            400,
            "chat_template_kwargs.enable_thinking",
            "invalid_value",
        ),
        (json!({"modalities": ["audio"]}), 400, "modalities", "unsupported_value"),
        (json!({"service_tier": "flex"}), 400, "service_tier", "unsupported_value"),
        (json!({"prompt": "x"}), 400, "prompt", "unknown_field"),
    ];
    check(CHAT, &json!({"messages": [{"role": "user", "content": "x"}]}), &cases);
}

#[test]
fn a_body_that_is_no_json_is_said_so() {
    let (state, _) = toy_state(&Setup::default());
    let bodies: [(&[u8], &str); 8] = [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{\"model\": \"x\",}", "invalid_json"),
        (b"{\"model\": \"x\"} {}", "invalid_json"),
        (b"{\"model\": \"x\", \"temperature\": 1e999}", "invalid_json"),
        (b"{\"model\": \"\xc3\x28\"}", "invalid_utf8"),
        (b"\xff\xfe{\x00}\x00", "invalid_utf8"),
        (b"{\"model\": \"\\ud800\"}", "invalid_json"),
    ];
    for path in [COMPLETIONS, CHAT] {
        for (body, code) in bodies {
            let answer = post(&state, path, body);
            assert_eq!((answer.status, error(&answer).2.as_str()), (400, code), "{body:?}");
            assert_works(&state);
        }
        let deep = post(&state, path, "[".repeat(100_000));
        assert_eq!(error(&deep).0, 400);
        for body in ["[]", r#"["toy"]"#, r#"["x", 1, true, null, null, "toy"]"#, "null", "\"prompt\"", "5"] {
            assert_eq!(error(&post(&state, path, body)), (400, None, "invalid_type".into()), "{body}");
        }
        let twice = post(&state, path, r#"{"model": "toy", "model": "toy"}"#);
        assert_eq!(error(&twice), (400, Some("model".into()), "duplicate_field".into()));
        let schema =
            r#"{"type": "object", "properties": {"a": {"type": "null"}, "b": {}, "a": {"type": "string"}}}"#;
        let input = if path == CHAT {
            r#""messages": [{"role": "user", "content": "x"}]"#
        } else {
            r#""prompt": "x""#
        };
        for stream in [false, true] {
            let schema = format!(
                r#"{{{input}, "stream": {stream}, "response_format":
                {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}}}"#
            );
            let within = post(&state, path, schema);
            let name = "response_format.json_schema.schema.properties.a";
            assert_eq!(error(&within), (400, Some(name.into()), "duplicate_field".into()));
        }
        assert_works(&state);
    }
}

#[test]
fn a_path_that_is_no_text_is_said_so() {
    let (state, _) = toy_state(&Setup::default());
    for path in ["/v1/models/%ff", "/v1/models/owner/%ff", "/assets/%ff", "/results/%ff"] {
        let answer = oneshot(&state, Request::get(path).body(Body::empty()).unwrap());
        assert_eq!(error(&answer), (400, None, "invalid_utf8".into()), "{path}");
    }
}

#[test]
fn a_body_of_another_type_is_415() {
    let (state, _) = toy_state(&Setup::default());
    for kind in
        [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("application/jsonp")]
    {
        let mut request = Request::post(COMPLETIONS);
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let answer = oneshot(&state, request.body(Body::from(r#"{"prompt": "x"}"#)).unwrap());
        assert_eq!(
            error(&answer),
            (415, Some("content-type".into()), "unsupported_media_type".into()),
            "{kind:?}"
        );
    }
    let compressed = Request::post(COMPLETIONS)
        .header("content-type", "application/json")
        .header("content-encoding", "gzip")
        .body(Body::from(r#"{"prompt": "x"}"#));
    assert_eq!(
        error(&oneshot(&state, compressed.unwrap())),
        (415, Some("content-encoding".into()), "unsupported_media_type".into())
    );
    assert_works(&state);
}

#[test]
fn a_drafted_mode_without_a_drafter_is_refused() {
    let config = config(&[]);
    let info = canopy_server::engine_thread::ModelInfo {
        name: MODEL.into(),
        vocab_size: TOKENIZER.vocab_size(),
        context_len: CONTEXT,
        has_drafter: false,
        tokenizer: std::sync::Arc::clone(&TOKENIZER),
        grammars: canopy_e2e::constrain::Compiler::new(std::sync::Arc::clone(&TOKENIZER) as _),
        created: 7,
        self_check: String::new(),
    };
    let state = state_of(config, move || Ok((Box::new(Refusing), info)));
    for mode in ["chain", "tree"] {
        let answer = post_json(&state, COMPLETIONS, &json!({"prompt": "x", "speculation": {"mode": mode}}));
        assert_eq!(error(&answer), (400, Some("speculation.mode".into()), "invalid_value".into()));
    }
}

/// An engine that refuses every request with its own error.
struct Refusing;

impl canopy_server::engine_thread::Rounds for Refusing {
    fn submit(
        &mut self,
        _: canopy_e2e::engine::GenerateRequest,
        _: Option<canopy_e2e::constrain::Grammar>,
    ) -> canopy_e2e::Result<canopy_e2e::engine::StreamId> {
        Err(canopy_e2e::Error::Request { field: "prompt", expected: "another".into(), got: "this".into() })
    }
    fn cancel(&mut self, _: canopy_e2e::engine::StreamId) {}
    fn load(&self) -> (usize, usize) {
        (0, 0)
    }
    fn step(&mut self) -> canopy_e2e::Result<Vec<(canopy_e2e::engine::StreamId, canopy_e2e::engine::Event)>> {
        Ok(Vec::new())
    }
}

#[test]
fn the_engines_own_refusal_has_the_wire_formats_field() {
    let info = canopy_server::engine_thread::ModelInfo {
        name: MODEL.into(),
        vocab_size: TOKENIZER.vocab_size(),
        context_len: CONTEXT,
        has_drafter: false,
        tokenizer: std::sync::Arc::clone(&TOKENIZER),
        grammars: canopy_e2e::constrain::Compiler::new(std::sync::Arc::clone(&TOKENIZER) as _),
        created: 7,
        self_check: String::new(),
    };
    let state = state_of(config(&[]), move || Ok((Box::new(Refusing), info)));
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    let answer = post_json(&state, CHAT, &body);
    assert_eq!(error(&answer), (400, Some("messages".into()), "invalid_value".into()));
    assert_eq!(state.queue().in_flight(), 0);
}
