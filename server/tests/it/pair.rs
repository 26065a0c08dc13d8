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

/// The same over sockets.
static SERVER: LazyLock<Server> = LazyLock::new(|| Server::over(PAIR.clone()));

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

/// A byte of a character each, which have no text of their own.
#[test]
fn tokens_that_share_a_character_have_names_bytes_and_places_of_their_own() {
    let prompt = "a\u{1f600}b<|im_end|>c";
    let fields = json!({"prompt": prompt, "echo": true, "logprobs": 20, "max_tokens": 4});
    let body = complete(fields.clone());
    let (all, logprobs) = (text(&body), &body["choices"][0]["logprobs"]);
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens[1..5], [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]);
    let offsets = logprobs["text_offset"].as_array().unwrap();
    assert_eq!(offsets[..6], [0, 1, 1, 1, 1, 2].map(Value::from));
    for (token, offset) in tokens.iter().zip(offsets) {
        let at = usize::try_from(offset.as_u64().unwrap()).unwrap();
        let rest: String = all.chars().skip(at).collect();
        assert!(token.starts_with("bytes:") || rest.starts_with(token), "{token:?} at {at} of {all:?}");
    }
    for top in &logprobs["top_logprobs"].as_array().unwrap()[1..] {
        assert_eq!(top.as_object().unwrap().len(), 20, "{top}");
    }
    let mut streamed = fields;
    streamed["stream"] = true.into();
    let chunks = post_json(&PAIR, "/v1/completions", &streamed).chunks();
    let told = |name: &str| -> Vec<Value> {
        let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array());
        lists.flatten().cloned().collect()
    };
    assert_eq!(&told("text_offset"), offsets);
    let messages = json!([{"role": "user", "content": "x"}]);
    let body =
        json!({"messages": messages, "max_tokens": 1, "logprobs": true, "grammar": "start: \"\u{1f600}\""});
    let answer = post_json(&PAIR, "/v1/chat/completions", &body).json();
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["bytes"], json!([0xf0]));
}

#[test]
fn a_seed_is_told_as_a_request_takes_it() {
    let first = complete(json!({"prompt": PROMPT, "temperature": 1, "seed": -1, "canopy": true}));
    assert_eq!(first["canopy"]["seed"], -1);
    let seed = first["canopy"]["seed"].clone();
    let again = complete(json!({"prompt": PROMPT, "temperature": 1, "seed": seed}));
    assert_eq!(text(&first), text(&again));
}

/// Compiles, but has no text: a rule that never ends, an empty intersection, a text that a bias forbids.
#[test]
fn a_constraint_that_leaves_no_token_is_the_callers_error() {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}});
    let letter = TOKENIZER.encode("a").unwrap()[0];
    let cases = [
        json!({"response_format": schema}),
        json!({"grammar": "start: B\nB: A & C\nA: /a/\nC: /c/"}),
        json!({"grammar": "start: \"a\"", "logit_bias": {letter.to_string(): -100}}),
    ];
    for case in cases {
        for stream in [false, true] {
            let mut body = json!({"prompt": PROMPT, "max_tokens": 4, "stream": stream});
            body.as_object_mut().unwrap().extend(case.as_object().unwrap().clone());
            let answer = post_json(&PAIR, "/v1/completions", &body);
            let body = answer.text();
            let error: Value = serde_json::from_str(body.trim().trim_start_matches("data: ")).unwrap();
            assert_eq!((answer.status, stream), if stream { (200, true) } else { (400, false) }, "{error}");
            assert_eq!(error["error"]["code"], "invalid_value", "{error}");
            assert!(
                error["error"]["message"].as_str().unwrap().starts_with("no token can be chosen"),
                "{error}"
            );
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
        // What `auto` drafts follows measured times; every other count is fixed.
        let counts = |body: &Value| {
            let mut usage = body["usage"].clone();
            usage.as_object_mut().unwrap().remove("completion_tokens_details").unwrap();
            usage
        };
        assert_eq!(counts(alone), counts(together));
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

#[test]
fn several_prompts_say_what_each_says_alone() {
    let server = &*SERVER;
    let prompts = ["def add(a, b):", "import os\n", "class Stack:", "x = ["];
    let alone: Vec<Value> = prompts.iter().map(|prompt| complete(json!({"prompt": prompt}))).collect();
    let tokens = |body: &Value, kind: &str| body["usage"][kind].as_u64().unwrap();
    for stream in [false, true] {
        let body = json!({"prompt": prompts, "max_tokens": 40, "stream": stream});
        let answer = server.request("POST", "/v1/completions", &body.to_string());
        assert_eq!(answer.status, 200, "{}", answer.text());
        let parts = if stream { answer.chunks() } else { vec![answer.json()] };
        let choices: Vec<&Value> =
            parts.iter().flat_map(|part| part["choices"].as_array().unwrap()).collect();
        for (index, alone) in alone.iter().enumerate() {
            let own: Vec<&str> = choices
                .iter()
                .filter(|choice| choice["index"] == index)
                .map(|choice| choice["text"].as_str().unwrap())
                .collect();
            assert_eq!(own.concat(), text(alone), "prompt {index}, stream {stream}");
        }
        if !stream {
            for kind in ["prompt_tokens", "completion_tokens", "total_tokens"] {
                assert_eq!(
                    tokens(&parts[0], kind),
                    alone.iter().map(|body| tokens(body, kind)).sum::<u64>(),
                    "{kind}"
                );
            }
        }
    }
}

#[test]
fn usage_tells_accepted_and_rejected_drafts_streamed_or_not() {
    let server = &*SERVER;
    let mut all_rejected = 0;
    for (mode, choices) in [("chain", 1), ("tree", 1), ("tree", 2), ("auto", 1), ("ar", 1)] {
        for stream in [false, true] {
            let mut body = json!({"prompt": ["def add(a, b):", "x = ["], "max_tokens": 40, "n": choices, "stream": stream,
                                  "speculation": {"mode": mode}, "canopy": {"stats": true}});
            if stream {
                body["stream_options"] = json!({"include_usage": true});
            }
            let answer = server.request("POST", "/v1/completions", &body.to_string());
            let parts = if stream { answer.chunks() } else { vec![answer.json()] };
            let usage = parts.iter().map(|part| &part["usage"]).find(|usage| usage.is_object()).unwrap();
            let details = &usage["completion_tokens_details"];
            // The statistics, which a stream tells of each choice.
            let stats = parts.iter().map(|part| &part["canopy"]).filter(|canopy| canopy.is_object());
            let of = |name: &str| -> u64 { stats.clone().map(|canopy| canopy[name].as_u64().unwrap()).sum() };
            let (accepted, verified) = (of("drafted_tokens"), of("nodes") - of("rounds"));
            let expected = json!({"reasoning_tokens": 0, "accepted_prediction_tokens": accepted,
                                  "rejected_prediction_tokens": verified - accepted});
            assert_eq!(*details, expected, "{mode}, stream {stream}");
            // Whether `auto` drafts at all follows measured times.
            assert!(mode == "auto" || (accepted == 0) == (mode == "ar"), "{mode}: {accepted}");
            assert!(accepted + of("bonus_tokens") == usage["completion_tokens"].as_u64().unwrap());
            all_rejected += verified - accepted;
        }
    }
    assert!(all_rejected > 0);
}

/// What a chat answer says, its tokens from their log-probabilities, and its usage.
#[derive(Debug, PartialEq)]
struct Said {
    reasoning: String,
    content: String,
    tokens: Vec<String>,
    finish: String,
    usage: (u64, u64),
    thought: u64,
}

fn said(server: &Server, fields: &Value, more: &Value) -> Said {
    let messages = json!([{"role": "user", "content": "Write a function that adds two numbers."}]);
    let mut body = json!({"messages": messages, "max_tokens": 40, "logprobs": true});
    for fields in [fields, more] {
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    let answer = server.request("POST", "/v1/chat/completions", &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (parts, message) = match body["stream"] == true {
        true => (answer.chunks(), "delta"),
        false => (vec![answer.json()], "message"),
    };
    let choices: Vec<&Value> = parts.iter().filter_map(|part| part["choices"].get(0)).collect();
    let told = |field: &str| choices.iter().filter_map(|choice| choice[message][field].as_str()).collect();
    let tokens = choices.iter().filter_map(|choice| choice["logprobs"]["content"].as_array()).flatten();
    let usage = parts.iter().map(|part| &part["usage"]).find(|usage| usage.is_object()).unwrap();
    Said {
        reasoning: told("reasoning_content"),
        content: told("content"),
        tokens: tokens.map(|token| token["token"].as_str().unwrap().to_owned()).collect(),
        finish: choices.iter().filter_map(|choice| choice["finish_reason"].as_str()).collect(),
        usage: (usage["prompt_tokens"].as_u64().unwrap(), usage["completion_tokens"].as_u64().unwrap()),
        thought: usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap(),
    }
}

/// Over sockets: what `fields` get, the same in every mode, streamed or not.
fn said_in_every_mode(server: &Server, fields: &Value) -> Said {
    let first = said(server, fields, &json!({"draft": false}));
    for mode in ["chain", "tree", "auto"] {
        for stream in [false, true] {
            let mut more = json!({"speculation": {"mode": mode}, "stream": stream});
            if stream {
                more["stream_options"] = json!({"include_usage": true});
            }
            assert_eq!(said(server, fields, &more), first, "{mode}, stream {stream}, {fields}");
        }
    }
    first
}

#[test]
fn thinking_is_asked_for_bounded_and_counted_in_every_mode() {
    let server = &*SERVER;
    let plain = said_in_every_mode(server, &json!({}));
    let off = said_in_every_mode(server, &json!({"chat_template_kwargs": {"enable_thinking": false}}));
    assert_eq!(plain, off);
    assert!(plain.reasoning.is_empty() && !plain.content.is_empty() && plain.thought == 0, "{plain:?}");
    let mut answered = false;
    let opening = TOKENIZER.encode("<think>\n").unwrap().len() as u64;
    let asked =
        [json!({"chat_template_kwargs": {"enable_thinking": true}}), json!({"enable_thinking": true})];
    for (sampling, budget) in [
        (json!({}), None),
        (json!({}), Some(0)),
        (json!({}), Some(1)),
        (json!({}), Some(8)),
        (json!({"temperature": 0.9, "seed": 5}), Some(8)),
    ] {
        let mut told = Vec::new();
        for asked in &asked {
            let mut fields = asked.clone();
            fields.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
            if let Some(budget) = budget {
                fields["thinking_budget"] = budget.into();
            }
            told.push(said_in_every_mode(server, &fields));
        }
        assert_eq!(told[0], told[1], "both spellings mean the same");
        let got = &told[0];
        assert_eq!(got.usage, (plain.usage.0 + opening, got.tokens.len() as u64), "{got:?}");
        assert!(got.finish != "length" || got.tokens.len() == 40, "{got:?}");
        let whole = got.tokens.concat();
        let ended_at = |count: &usize| got.tokens[..*count].concat().contains("</think>");
        let thought = (1..=got.tokens.len()).find(ended_at).unwrap_or(got.tokens.len());
        assert_eq!(got.thought, thought as u64, "{got:?}");
        match budget {
            None => assert!(!got.reasoning.is_empty(), "{got:?}"),
            Some(budget) => {
                let (thought, content) = whole.split_once("</think>").unwrap_or_else(|| panic!("{got:?}"));
                assert_eq!(
                    (got.reasoning.as_str(), got.content.as_str()),
                    (
                        thought.trim_end_matches('\n'),
                        content.trim_start_matches('\n').trim_end_matches("<|im_end|>")
                    )
                );
                let mut before = 0;
                let tokens = got.tokens.iter().take_while(|token| {
                    before += token.len();
                    before <= thought.len()
                });
                assert!(tokens.count() <= budget, "{got:?}");
                answered |= !got.content.is_empty();
            }
        }
    }
    assert!(answered, "no thought was followed by an answer");
}
