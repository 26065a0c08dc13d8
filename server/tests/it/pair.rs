//! The embedded pair behind the real routes: equal text in every mode, exact counts, stops, streams side by side.

use std::sync::LazyLock;

use canopy_server::pair;
use canopy_server::state::AppState;
use serde_json::{Value, json};

use crate::support::*;

static PAIR: LazyLock<AppState> = LazyLock::new(|| {
    let config = config(&["--slots", "3"]);
    let loaded = config.clone();
    state_of(config, move || pair::load(&loaded))
});

const PROMPT: &str = "def fibonacci(n):";

fn complete(fields: Value) -> Value {
    let mut body = json!({"prompt": PROMPT, "max_tokens": 40});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let answer = post_json(&PAIR, "/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn text(body: &Value) -> &str {
    body["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn drafted_text_is_undrafted_text() {
    for sampling in [json!({}), json!({"temperature": 0.9, "seed": 3})] {
        let with = |fields: Value| {
            let mut all = sampling.clone();
            all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            text(&complete(all)).to_owned()
        };
        let undrafted = with(json!({"draft": false}));
        assert!(!undrafted.is_empty());
        for mode in ["ar", "chain", "tree", "auto"] {
            assert_eq!(with(json!({"speculation": {"mode": mode}})), undrafted, "{mode} with {sampling}");
        }
        assert_eq!(with(json!({"speculation": {"mode": "tree", "budget": 5}})), undrafted);
    }
}

#[test]
fn max_tokens_is_kept_exactly() {
    for tokens in [1, 7, 8, 9, 15, 16, 17] {
        let body =
            complete(json!({"max_tokens": tokens, "ignore_eos": true, "speculation": {"mode": "tree"}}));
        assert_eq!(body["usage"]["completion_tokens"], tokens);
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    }
}

#[test]
fn text_ends_before_the_stop_string_that_completes_first() {
    let whole = complete(json!({}));
    let whole = text(&whole);
    let (early, late) = (&whole[6..9], &whole[20..24]);
    assert!(whole.is_ascii() && whole.find(early).unwrap() + early.len() < whole.find(late).unwrap());
    for mode in ["ar", "tree"] {
        let fields = json!({"stop": [late, early], "speculation": {"mode": mode}, "logprobs": 0});
        let body = complete(fields);
        assert_eq!(text(&body), &whole[..whole.find(early).unwrap()], "{mode}");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let tokens = body["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
        assert_eq!(body["usage"]["completion_tokens"], tokens.len());
        let said: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert!(whole.starts_with(&said) && said.contains(early), "tokens to the completing one: {said:?}");
    }
}

#[test]
fn a_stream_is_the_whole_answer_in_pieces_and_a_stop_never_leaks() {
    let body = complete(json!({"max_tokens": 60}));
    let whole = text(&body);
    let stop = &whole[30..36];
    let cut = &whole[..whole.find(stop).unwrap()];
    for (fields, want) in [(json!({}), whole), (json!({"stop": stop}), cut)] {
        let mut body = json!({"prompt": PROMPT, "max_tokens": 60, "stream": true, "canopy": true});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = post_json(&PAIR, "/v1/completions", &body);
        let (chunks, steps) = (answer.chunks(), answer.rounds());
        let pieces: Vec<&str> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(pieces.concat(), want);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        let rounds: Vec<&Value> =
            steps.iter().map(|step| &step["round"]).filter(|round| round.is_object()).collect();
        assert!(!rounds.is_empty());
        for round in rounds {
            let nodes = round["nodes"].as_array().unwrap();
            let path: Vec<usize> =
                round["path"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            assert_eq!((path[0], nodes[0]["parent"].as_i64()), (0, Some(-1)));
            assert!(path.windows(2).all(|pair| nodes[pair[1]]["parent"] == pair[0]), "{round}");
        }
    }
}

#[test]
fn streams_side_by_side_say_what_they_say_alone() {
    let prompts = ["def add(a, b):", "import os\n", "class Stack:", "def is_prime(n):", "x = ["];
    let alone: Vec<Value> = prompts.iter().map(|prompt| complete(json!({"prompt": prompt}))).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let ask = |prompt| scope.spawn(move || complete(json!({"prompt": prompt})));
        let asked: Vec<_> = prompts.into_iter().map(ask).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(text(alone), text(together));
        assert_eq!(alone["usage"], together["usage"]);
    }
}

#[test]
fn a_chat_answer_ends_by_itself() {
    let messages = json!([{"role": "user", "content": "Write a function that reverses a string."}]);
    let body = json!({"messages": messages, "max_tokens": 400, "canopy": true});
    let answer = post_json(&PAIR, "/v1/chat/completions", &body).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!content.contains("<|im_end|>") && content.contains("def "), "{content}");
    assert!(answer["canopy"]["acceptance_length"].as_f64().unwrap() >= 1.0);
}

#[test]
fn a_schema_a_grammar_and_a_bias_hold_in_every_mode() {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["ok", "n"],
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    let grammar = r#"start: "yes" | "no""#;
    let mut texts = Vec::new();
    for mode in ["ar", "tree", "auto"] {
        let speculation = json!({"mode": mode});
        let body = complete(json!({"response_format": format, "speculation": speculation}));
        let value: Value =
            serde_json::from_str(text(&body)).unwrap_or_else(|error| panic!("{error}: {body}"));
        assert!(value["ok"].is_boolean() && value["n"].as_u64().unwrap() < 10, "{value}");
        let worded = complete(json!({"grammar": grammar, "speculation": speculation}));
        assert!(["yes", "no"].contains(&text(&worded)), "{worded}");
        texts.push((text(&body).to_owned(), text(&worded).to_owned()));
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let free = complete(json!({"max_tokens": 1, "logprobs": 0}));
    let first = free["choices"][0]["logprobs"]["tokens"][0].as_str().unwrap();
    let id = TOKENIZER.encode(first).unwrap();
    assert_eq!(id.len(), 1, "{first:?} is one token");
    let biased = complete(json!({"max_tokens": 1, "logprobs": 0, "logit_bias": {id[0].to_string(): -100}}));
    assert_ne!(biased["choices"][0]["logprobs"]["tokens"][0], first);
    for bad in [
        json!({"grammar": "start: \"a"}),
        json!({"response_format": {"type": "json_schema",
        "json_schema": {"schema": {"type": "nonsense"}}}}),
    ] {
        let mut body = json!({"prompt": PROMPT, "max_tokens": 4});
        body.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        let answer = post_json(&PAIR, "/v1/completions", &body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        let field = bad.as_object().unwrap().keys().next().unwrap().as_str();
        assert_eq!(answer.json()["error"]["param"], field, "{}", answer.text());
    }
}

#[test]
fn a_prompt_that_comes_again_is_reused_and_its_text_is_the_same() {
    let long = "def f(x):\n    return x + 1\n\n".repeat(40);
    let fields = || json!({"prompt": long, "max_tokens": 12});
    let (first, second) = (complete(fields()), complete(fields()));
    let cached = |body: &Value| body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&second) > 100, "{second}");
    assert!(cached(&first) < cached(&second));
    assert_eq!(
        (text(&first), &first["usage"]["prompt_tokens"]),
        (text(&second), &second["usage"]["prompt_tokens"])
    );
}
