//! Every route through the router, no socket: the answers' shapes, headers, keys.

use axum::body::Body;
use axum::http::Request;
use canopy_e2e::engine::{Constraint, Mode, Penalties};
use serde_json::{Value, json};

use crate::support::*;

fn toy() -> (canopy_server::state::AppState, Seen) {
    toy_state(&Setup::default())
}

#[test]
fn a_completion_has_openais_shape() {
    let (state, _) = toy();
    let answer =
        post_json(&state, "/v1/completions", &json!({"model": MODEL, "prompt": "def f():", "max_tokens": 7}));
    assert_eq!(answer.status, 200);
    let body = answer.json();
    assert_eq!(body["object"], "text_completion");
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(body["model"], MODEL);
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "text": toy_text(7), "logprobs": null, "finish_reason": "length"}])
    );
    let prompt = TOKENIZER.encode("def f():").unwrap().len();
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7,
                       "prompt_tokens_details": {"cached_tokens": 0},
                       "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 3,
                                                     "rejected_prediction_tokens": 5}});
    assert_eq!(body["usage"], usage);
    assert!(body.get("canopy").is_none());
}

#[test]
fn a_chat_answer_has_openais_shape() {
    let (state, seen) = toy();
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "two numbers."}]},
    ]);
    let body = json!({"model": MODEL, "messages": messages, "max_completion_tokens": 4});
    let answer = post_json(&state, "/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let message = json!({"role": "assistant", "content": toy_text(4), "refusal": null});
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "message": message, "logprobs": null, "finish_reason": "length"}])
    );
    let prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd two numbers.<|im_end|>\n\
                  <|im_start|>assistant\n";
    assert_eq!(seen.lock().unwrap()[0].prompt, TOKENIZER.encode(prompt).unwrap());
}

#[test]
fn a_prompt_is_a_string_token_ids_or_a_list_of_one() {
    let (state, seen) = toy();
    let ids = TOKENIZER.encode("def f():").unwrap();
    for prompt in [json!("def f():"), json!(["def f():"]), json!(ids), json!([ids])] {
        let body = json!({"prompt": prompt, "max_tokens": 1});
        let answer = post_json(&state, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{prompt}: {}", answer.text());
        assert_eq!(seen.lock().unwrap().last().unwrap().prompt, ids);
    }
}

/// The first prompt's answers come first; each answer is that of its prompt alone.
#[test]
fn several_prompts_are_answered_in_order() {
    let (state, seen) = toy();
    let texts = ["def f():", "import os", "x"];
    let ids = texts.map(|text| TOKENIZER.encode(text).unwrap());
    let tokens: usize = ids.iter().map(Vec::len).sum();
    for prompt in [json!(texts), json!(ids), json!([texts[0], ids[1], texts[2]])] {
        let body = json!({"prompt": prompt, "max_tokens": 3, "n": 2, "seed": 5, "echo": true, "logprobs": 0});
        let answer = post_json(&state, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{prompt}: {}", answer.text());
        let body = answer.json();
        let choices = body["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 6);
        for (index, choice) in choices.iter().enumerate() {
            let text = format!("{}{}", texts[index / 2], toy_text(3));
            assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!(text)));
            assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), ids[index / 2].len() + 3);
        }
        assert_eq!(
            (
                &body["usage"]["prompt_tokens"],
                &body["usage"]["completion_tokens"],
                &body["usage"]["total_tokens"]
            ),
            (&json!(tokens), &json!(18), &json!(tokens + 18))
        );
        let asked: Vec<(Vec<u32>, u64)> =
            seen.lock().unwrap().drain(..).map(|request| (request.prompt, request.sampling.seed)).collect();
        let expected = ids.iter().flat_map(|ids| [(ids.clone(), 5), (ids.clone(), 6)]);
        assert_eq!(asked, expected.collect::<Vec<_>>());
    }
}

#[test]
fn what_is_asked_for_reaches_the_engine() {
    let (state, seen) = toy();
    let body = json!({
        "prompt": "x", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11,
        "stop": ["a", "b", "c", "d", "e"], "stop_token_ids": [5], "ignore_eos": true,
        "speculation": {"mode": "tree", "budget": 31}, "presence_penalty": 0.5, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "logit_bias": {"7": 3, "5": -100}, "min_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    });
    assert_eq!(post_json(&state, "/v1/completions", &body).status, 200);
    let request = seen.lock().unwrap().pop().unwrap();
    assert_eq!((request.max_tokens, request.stop.len(), request.stop_tokens.as_slice()), (3, 5, &[5][..]));
    assert!(request.ignore_eos && !request.report_rounds && request.logprobs.is_none());
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (0.5, 0.9, 0.05));
    assert_eq!((sampling.top_k, sampling.seed), (40, 11));
    assert_eq!((request.speculation.mode, request.speculation.budget), (Mode::Tree, Some(31)));
    let penalties = Penalties { presence: 0.5, frequency: -1.0, repetition: 1.5 };
    assert_eq!((request.penalties, request.min_tokens), (penalties, 2));
    assert_eq!(request.logit_bias, [(5, f32::NEG_INFINITY), (7, 3.0)]);
    assert_eq!(request.constraint, Constraint::JsonSchema(json!({"type": "object"})));
    assert!(request.deadline.is_some() && request.reuse_prefix);
    for (fields, constraint) in [
        (json!({"response_format": {"type": "json_object"}}), Constraint::JsonObject),
        (json!({"grammar": "start: \"a\""}), Constraint::Grammar("start: \"a\"".into())),
    ] {
        let mut body = json!({"prompt": "x", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(post_json(&state, "/v1/completions", &body).status, 200);
        assert_eq!(seen.lock().unwrap().pop().unwrap().constraint, constraint);
    }
}

#[test]
fn echo_puts_the_prompt_before_the_text() {
    let (state, seen) = toy();
    let ids = TOKENIZER.encode("def f():").unwrap();
    for prompt in [json!("def f():"), json!(ids)] {
        let mut body = json!({"prompt": prompt, "max_tokens": 3, "echo": true});
        let whole = post_json(&state, "/v1/completions", &body).json();
        assert_eq!(whole["choices"][0]["text"], format!("def f():{}", toy_text(3)));
        body["stream"] = true.into();
        let chunks = post_json(&state, "/v1/completions", &body).chunks();
        let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, format!("def f():{}", toy_text(3)));
    }
    let told = json!({"prompt": "def f():", "max_tokens": 3, "echo": true, "logprobs": 1});
    for stream in [false, true] {
        let mut body = told.clone();
        body["stream"] = stream.into();
        let answer = post_json(&state, "/v1/completions", &body);
        let chunks = if stream { answer.chunks() } else { vec![answer.json()] };
        let logprobs: Vec<&Value> =
            chunks.iter().map(|c| &c["choices"][0]["logprobs"]).filter(|l| !l.is_null()).collect();
        let tokens: Vec<&str> = logprobs
            .iter()
            .flat_map(|l| l["tokens"].as_array().unwrap())
            .map(|token| token.as_str().unwrap())
            .collect();
        assert_eq!(tokens.concat(), format!("def f():{}", toy_text(3)));
        assert_eq!(
            (&logprobs[0]["token_logprobs"][0], &logprobs[0]["top_logprobs"][0]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(logprobs[0]["token_logprobs"][1], -0.25);
    }
    assert_eq!(seen.lock().unwrap().pop().unwrap().prompt_logprobs, Some(1));
}

#[test]
fn a_call_of_a_tool_is_read_out_of_the_text_streamed_or_not() {
    let (state, _) = toy();
    let parameters =
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": parameters}}]);
    let body = json!({"messages": [{"role": "user", "content": CALLING}], "tools": tools});
    let choice = post_json(&state, "/v1/chat/completions", &body).json()["choices"][0].take();
    let function = json!({"name": "add", "arguments": r#"{"a":1,"note":"7"}"#});
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Sure."))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"], &calls[0]["type"]), (1, &function, &json!("function")));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call-"));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = post_json(&state, "/v1/chat/completions", &streamed).chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    let told: Vec<&Value> =
        deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    assert_eq!((text.as_str(), told.len(), &told[0]["function"]), ("Sure.", 1, &function));
    assert_eq!(chunks[chunks.len() - 1]["choices"][0]["finish_reason"], "tool_calls");
    // Without tools, or told not to call, the text stays text.
    let mut none = body.clone();
    none["tool_choice"] = "none".into();
    let choice = post_json(&state, "/v1/chat/completions", &none).json()["choices"][0].take();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(CALL), &json!("stop")));
    // The conversation goes on with the call and its result.
    let said = json!({"role": "assistant", "content": null, "tool_calls": calls});
    let result = json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "8"});
    let on = json!({"messages": [{"role": "user", "content": "x"}, said, result], "tools": tools, "max_tokens": 2});
    let answer = post_json(&state, "/v1/chat/completions", &on);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn a_demanded_call_is_a_constraint() {
    let (state, seen) = toy();
    let tools = json!([{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "sub"}}]);
    for (choice, names) in [
        (json!("required"), vec!["add", "sub"]),
        (json!({"type": "function", "function": {"name": "sub"}}), vec!["sub"]),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice,
                          "parallel_tool_calls": false, "max_tokens": 2});
        let answer = post_json(&state, "/v1/chat/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let Constraint::Grammar(grammar) = seen.lock().unwrap().pop().unwrap().constraint else {
            panic!("no grammar")
        };
        for name in ["add", "sub"] {
            assert_eq!(grammar.contains(&format!("<function={name}>")), names.contains(&name), "{grammar}");
        }
    }
}

#[test]
fn text_becomes_tokens_and_tokens_text() {
    let (state, _) = toy();
    let ids = TOKENIZER.encode("def f():").unwrap();
    let answer = post_json(&state, "/tokenize", &json!({"prompt": "def f():"})).json();
    assert_eq!(
        (&answer["tokens"], &answer["count"], &answer["max_model_len"]),
        (&json!(ids), &json!(ids.len()), &json!(CONTEXT))
    );
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), ids.len());
    let messages = json!([{"role": "user", "content": "x"}]);
    let prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n";
    let tools = json!([{"type": "function", "function": {"name": "zzz"}}]);
    for (fields, starts, ends) in [
        (json!({}), prompt, prompt),
        (
            json!({"chat_template_kwargs": {"enable_thinking": true}}),
            prompt,
            "<|im_start|>assistant\n<think>\n",
        ),
        (json!({"tools": tools}), "<|im_start|>system\n# Tools", prompt),
    ] {
        let mut body = json!({"model": MODEL, "messages": messages});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let chat = post_json(&state, "/tokenize", &body).json();
        let tokens: Vec<&str> =
            chat["token_strs"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        let text = tokens.concat();
        assert!(text.starts_with(starts) && text.ends_with(ends), "{fields}: {text}");
        assert_eq!(chat["count"], tokens.len());
    }
    let back = post_json(&state, "/detokenize", &json!({"tokens": ids}));
    assert_eq!((back.status, back.json()), (200, json!({"prompt": "def f():"})));
    for (path, body, field, code) in [
        ("/tokenize", json!({}), "prompt", "missing_field"),
        ("/tokenize", json!({"prompt": "x", "messages": messages}), "messages", "invalid_value"),
        ("/tokenize", json!({"text": "x"}), "text", "unknown_field"),
        ("/tokenize", json!({"prompt": "x", "tools": tools}), "tools", "invalid_value"),
        (
            "/tokenize",
            json!({"messages": messages, "chat_template_kwargs": {"x": 1}}),
            "chat_template_kwargs.x",
            "unknown_field",
        ),
        ("/detokenize", json!({}), "tokens", "missing_field"),
        ("/detokenize", json!({"tokens": [0, 9_999_999]}), "tokens[1]", "invalid_value"),
    ] {
        let answer = post_json(&state, path, &body);
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["param"], &error["code"]),
            (400, &json!(field), &json!(code)),
            "{body}"
        );
    }
}

#[test]
fn info_tells_what_runs_and_no_key() {
    let (state, _) =
        toy_state(&Setup { args: vec!["--api-key", "Sesame,Second", "--slots", "3"], ..Setup::default() });
    assert_eq!(get(&state, "/info").status, 401);
    let request = Request::get("/info").header("authorization", "Bearer Second").body(Body::empty()).unwrap();
    let answer = oneshot(&state, request);
    assert!(answer.status == 200 && !answer.text().contains("Sesame"), "{}", answer.text());
    let info = answer.json();
    assert_eq!((&info["model"]["name"], &info["model"]["drafter"]), (&json!(MODEL), &json!(true)));
    assert_eq!((&info["limits"]["slots"], &info["speculation"]["mode"]), (&json!(3), &json!("auto")));
    assert_eq!(
        (&info["config"]["slots"], &info["build"]["version"]),
        (&json!(3), &json!(env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn other_sites_may_ask_only_where_they_are_named() {
    let ask = |args: Vec<&'static str>, method: &str, origin: &str| {
        let (state, _) = toy_state(&Setup { args, ..Setup::default() });
        let request = Request::builder()
            .method(method)
            .uri("/v1/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type");
        let answer = oneshot(&state, request.body(Body::empty()).unwrap());
        (answer.status, answer.header("access-control-allow-origin").map(str::to_owned))
    };
    let site = "https://a.org";
    assert_eq!(ask(vec![], "OPTIONS", site), (405, None));
    assert_eq!(ask(vec!["--cors-origin", site], "OPTIONS", site), (200, Some(site.into())));
    assert_eq!(ask(vec!["--cors-origin", site], "OPTIONS", "https://b.org").1, None);
    assert_eq!(ask(vec!["--cors-origin", "*"], "OPTIONS", "https://b.org"), (200, Some("*".into())));
}

#[test]
fn draft_false_is_serial_decoding_and_the_default_is_auto() {
    let (state, seen) = toy();
    let modes = [
        (json!({}), Mode::Auto),
        (json!({"draft": true}), Mode::Auto),
        (json!({"draft": false}), Mode::Ar),
        (json!({"draft": false, "speculation": {"mode": "ar"}}), Mode::Ar),
        (json!({"draft": false, "speculation": {"budget": 8}}), Mode::Ar),
        (json!({"speculation": {"mode": "chain"}}), Mode::Chain),
    ];
    for (fields, mode) in modes {
        let mut body = json!({"prompt": "x", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(post_json(&state, "/v1/completions", &body).status, 200, "{fields}");
        assert_eq!(seen.lock().unwrap().last().unwrap().speculation.mode, mode, "{fields}");
    }
}

#[test]
fn defaults_are_greedy_and_256_tokens_cut_to_the_context() {
    let (state, seen) = toy();
    assert_eq!(post_json(&state, "/v1/completions", &json!({"prompt": "x"})).status, 200);
    let request = seen.lock().unwrap().pop().unwrap();
    assert_eq!((request.sampling.temperature, request.sampling.seed), (0.0, 0));
    assert_eq!(request.max_tokens, CONTEXT - request.prompt.len());
    let sampled = json!({"prompt": "x", "max_tokens": 1, "temperature": 1});
    let seeds: Vec<u64> = (0..2)
        .map(|_| {
            assert_eq!(post_json(&state, "/v1/completions", &sampled).status, 200);
            seen.lock().unwrap().pop().unwrap().sampling.seed
        })
        .collect();
    assert_ne!(seeds[0], seeds[1]);
}

#[test]
fn neutral_values_of_what_is_not_supported_are_accepted() {
    let (state, _) = toy();
    let completion = json!({
        "model": MODEL, "prompt": "x", "max_tokens": 1, "n": 1, "best_of": 1, "echo": false, "suffix": "",
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "someone", "logprobs": null,
        "no_stop_trim": false, "skip_special_tokens": true, "return_hidden_states": false,
        "stop": null, "stream": false, "stream_options": null, "seed": null, "top_k": -1,
    });
    assert_eq!(post_json(&state, "/v1/completions", &completion).status, 200);
    let said = json!({
        "role": "assistant", "content": "a", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "tool_calls": null, "reasoning_content": "thought",
    });
    let chat = json!({
        "messages": [{"role": "developer", "content": "x", "name": "me"}, said, {"role": "user", "content": ""}],
        "max_tokens": 1, "max_completion_tokens": 1, "n": null, "logit_bias": null, "store": false,
        "metadata": {"a": "b"}, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
        "parallel_tool_calls": true, "modalities": ["text"], "service_tier": "auto", "logprobs": false,
        "top_logprobs": 0, "frequency_penalty": null, "continue_final_message": false, "separate_reasoning": true,
        "stream_reasoning": true, "include_reasoning": true,
    });
    let answer = post_json(&state, "/v1/chat/completions", &chat);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn logprobs_have_the_shape_of_each_endpoint() {
    let (state, _) = toy();
    let body = json!({"prompt": "x", "max_tokens": 3, "logprobs": 2});
    let logprobs = &post_json(&state, "/v1/completions", &body).json()["choices"][0]["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), toy_text(3));
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5]));
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(logprobs["text_offset"][1], tokens[0].chars().count());
    let messages = json!([{"role": "user", "content": "x"}]);
    let body = json!({"messages": messages, "max_tokens": 3, "logprobs": true, "top_logprobs": 1});
    let content =
        &post_json(&state, "/v1/chat/completions", &body).json()["choices"][0]["logprobs"]["content"];
    assert_eq!(content.as_array().unwrap().len(), 3);
    assert_eq!((&content[0]["token"], &content[0]["logprob"]), (&json!(tokens[0]), &json!(-0.5)));
    assert_eq!(content[0]["bytes"], json!(tokens[0].as_bytes()));
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 1);
}

#[test]
fn canopy_true_tells_statistics_and_rounds() {
    let (state, _) = toy();
    let body =
        json!({"prompt": "x", "max_tokens": 6, "canopy": true, "speculation": {"mode": "tree", "budget": 2}});
    let canopy = &post_json(&state, "/v1/completions", &body).json()["canopy"];
    assert_eq!((&canopy["mode"], &canopy["budget"]), (&json!("tree"), &json!(2)));
    assert_eq!(
        (&canopy["rounds"], &canopy["nodes"], &canopy["committed"]),
        (&json!(3), &json!(9), &json!(6))
    );
    assert_eq!(canopy["acceptance_length"], 2.0);
    assert_eq!((&canopy["drafted_tokens"], &canopy["bonus_tokens"]), (&json!(3), &json!(3)));
    let rounds = canopy["round_reports"].as_array().unwrap();
    assert_eq!(rounds.len(), 3);
    assert_eq!(rounds[0]["round"]["path"], json!([0, 2]));
    assert_eq!(rounds[0]["round"]["nodes"][1]["parent"], 0);
    assert_eq!(rounds[0]["tokens"][1]["origin"], "bonus");
    let stats = json!({"prompt": "x", "max_tokens": 6, "canopy": {"rounds": false}});
    let canopy = &post_json(&state, "/v1/completions", &stats).json()["canopy"];
    assert!(canopy["rounds"] == 3 && canopy.get("round_reports").is_none());
}

#[test]
fn the_models_are_listed_and_found_by_name() {
    let (state, _) = toy();
    let list = get(&state, "/v1/models").json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(get(&state, "/v1/models/toy").json(), list["data"][0]);
    let missing = get(&state, "/v1/models/Qwen/Qwen3.5-9B");
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
}

#[test]
fn health_ready_and_metrics_answer() {
    let (state, _) = toy();
    assert_eq!((get(&state, "/health").status, get(&state, "/ready").status), (200, 200));
    assert_works(&state);
    let metrics = get(&state, "/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    for line in [
        r#"canopy_requests_total{route="/v1/completions",status="200"} 1"#,
        r#"canopy_requests_total{route="/health",status="200"} 1"#,
        r#"canopy_streams_total{reason="length"} 1"#,
        r#"canopy_completion_tokens_total{origin="drafted"} 2"#,
        r#"canopy_completion_tokens_total{origin="bonus"} 3"#,
        "canopy_streams_running 0",
        "canopy_streams_waiting 0",
        "canopy_rounds_total 3",
        r#"canopy_acceptance_length_bucket{le="2"} 1"#,
        r#"canopy_stage_seconds_count{stage="verify"} 1"#,
    ] {
        assert!(metrics.text().lines().any(|have| have == line), "{line} is not in\n{}", metrics.text());
    }
}

/// The local files that an HTML text names.
fn links(html: &str) -> Vec<String> {
    let starts = ["href=\"./", "src=\"./"];
    let named = starts.iter().flat_map(|start| html.split(start).skip(1));
    let mut paths: Vec<String> =
        named.filter_map(|rest| Some(format!("/{}", rest.split_once('"')?.0))).collect();
    paths.retain(|path| !path.contains('#'));
    paths
}

#[test]
fn the_page_and_its_parts_are_served_under_a_policy() {
    let (state, _) = toy();
    let page = get(&state, "/");
    let parts = links(page.text());
    assert!(
        parts.iter().any(|path| path.ends_with(".js")) && parts.iter().any(|path| path.ends_with(".css"))
    );
    let results = ["kernels", "e2e", "machines", "rounds"].map(|name| format!("/results/{name}.json"));
    for path in parts.iter().chain(&results).map(String::as_str).chain(["/", "/post.html"]) {
        let answer = get(&state, path);
        assert_eq!(answer.status, 200, "{path}");
        let kind = match path.rsplit_once('.').map_or("html", |(_, ending)| ending) {
            "js" => "text/javascript",
            "css" => "text/css",
            "json" => "application/json",
            "svg" => "image/svg+xml",
            _ => "text/html",
        };
        assert!(answer.header("content-type").unwrap().starts_with(kind), "{path}");
        assert!(answer.header("content-security-policy").unwrap().starts_with("default-src 'none'"));
        let forever = answer.header("cache-control").unwrap().contains("immutable");
        assert_eq!(forever, path.starts_with("/assets/"), "{path}");
    }
    assert_eq!(get(&state, "/assets/no-such.js").status, 404);
    assert_eq!(get(&state, "/results/../index.html").status, 404);
}

#[test]
fn a_page_that_the_reader_has_is_not_sent_again() {
    let (state, _) = toy();
    let tag = get(&state, "/").header("etag").unwrap().to_owned();
    let again = |tag: &str| {
        oneshot(&state, Request::get("/").header("if-none-match", tag).body(Body::empty()).unwrap())
    };
    assert_eq!((again(&tag).status, again(&tag).text()), (304, ""));
    assert_eq!(again("\"other\"").status, 200);
}

#[test]
fn request_ids_are_kept_or_made() {
    let (state, _) = toy();
    let with_id = |id: &str| {
        let request = Request::get("/health").header("x-request-id", id).body(Body::empty()).unwrap();
        oneshot(&state, request).header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(with_id("abc-1"), "abc-1");
    assert!(with_id("no spaces").starts_with("req-"));
    assert!(with_id(&"x".repeat(200)).starts_with("req-"));
    let missing = get(&state, "/no/such/route");
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("not_found")));
    assert!(missing.header("x-request-id").is_some());
    let method = get(&state, "/v1/completions");
    assert_eq!((method.status, &method.json()["error"]["code"]), (405, &json!("method_not_allowed")));
}

#[test]
fn a_key_is_compared_exactly_and_its_scheme_in_any_case() {
    let (state, _) = toy_state(&Setup { args: vec!["--api-key", "AbC"], ..Setup::default() });
    let status = |value: Option<&str>| {
        let mut request = Request::get("/v1/models");
        if let Some(value) = value {
            request = request.header("authorization", value);
        }
        oneshot(&state, request.body(Body::empty()).unwrap()).status
    };
    assert_eq!((status(Some("Bearer AbC")), status(Some("bEaReR AbC"))), (200, 200));
    for wrong in
        [None, Some("Bearer abc"), Some("Bearer AbCd"), Some("Bearer Ab"), Some("Basic AbC"), Some("AbC")]
    {
        assert_eq!(status(wrong), 401, "{wrong:?}");
    }
    let answer = get(&state, "/v1/models");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
    for open in ["/", "/health", "/ready", "/metrics"] {
        assert_eq!(get(&state, open).status, 200, "{open}");
    }
}

#[test]
fn a_failing_stream_fails_alone() {
    let (state, _) = toy();
    let answer = post_json(&state, "/v1/completions", &json!({"prompt": FAILING, "max_tokens": 5}));
    assert_eq!(answer.status, 500);
    let error: &Value = &answer.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("internal")));
    assert!(!answer.text().contains("non-finite"), "internals stay in the log: {}", answer.text());
    assert_works(&state);
}
