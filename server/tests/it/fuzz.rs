//! Request bodies that nobody would write: parsed and planned without a panic, refused by name or within the limits.

use axum::http::StatusCode;
use canopy_server::error::ApiError;
use canopy_server::extract;
use canopy_server::plan::{self, Limits, MAX_CHOICES, Plan};
use canopy_server::types::{ChatRequest, CompletionRequest};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree as _;
use serde_json::{Map, Value, json};

const LIMITS: Limits<'_> =
    Limits { model: "toy", vocab_size: 300, context_len: 64, default_max_tokens: 16, has_drafter: true };

/// Every field of either endpoint, and two of neither.
const FIELDS: [&str; 44] = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "n",
    "response_format",
    "grammar",
    "user",
    "draft",
    "speculation",
    "canopy",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "best_of",
    "enable_thinking",
    "thinking_budget",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "store",
    "metadata",
    "modalities",
    "service_tier",
    "promt",
    "",
];

/// Values that some field takes, which get a body past the first checks.
fn likely() -> impl Strategy<Value = Value> {
    select(vec![
        json!("toy"),
        json!("x"),
        json!(""),
        json!(0),
        json!(1),
        json!(-1),
        json!(20),
        json!(16),
        json!(0.5),
        json!(true),
        json!(false),
        json!(["a", "b"]),
        json!([1, 2]),
        json!([[1], [299]]),
        json!([300]),
        json!({"5": -100}),
        json!({"include_usage": true}),
        json!({"mode": "tree", "budget": 31}),
        json!({"mode": "ar"}),
        json!({"stats": true}),
        json!({"type": "json_object"}),
        json!([{"role": "user", "content": "x"}]),
        json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        json!({"type": "function", "function": {"name": "f"}}),
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        json!("required"),
        json!("auto"),
        json!({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}),
        json!({"enable_thinking": true}),
        json!(["text"]),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e308),
        json!(-0.0),
    ])
}

fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        likely(),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let name =
            prop_oneof![select(FIELDS.to_vec()).prop_map(String::from), "[a-z_]{0,8}", Just("type".into())];
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(name, inner, 0..4).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn body() -> impl Strategy<Value = Value> {
    let value = prop_oneof![2 => likely(), 1 => anything()];
    let fields = btree_map(select(FIELDS.to_vec()), value, 0..5);
    let base = select(vec![
        json!({}),
        json!({"prompt": "x"}),
        json!({"messages": [{"role": "user", "content": "x"}]}),
    ]);
    (base, fields).prop_map(|(base, fields)| {
        let mut body: Map<String, Value> = base.as_object().unwrap().clone();
        body.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        body.into()
    })
}

fn refused_well(error: &ApiError) {
    assert!([StatusCode::BAD_REQUEST, StatusCode::NOT_FOUND].contains(&error.status), "{error:?}");
    assert!(!error.message.is_empty() && error.code.is_some(), "{error:?}");
    if let Some(param) = &error.param {
        assert!(error.message.starts_with(param.as_ref()), "{error:?}");
    }
}

fn within_limits(plan: &Plan) {
    assert!((1..=MAX_CHOICES as usize).contains(&plan.choices), "{plan:?}");
    let request = &plan.request;
    assert!(
        (1..=LIMITS.context_len).contains(&request.max_tokens) && request.min_tokens <= request.max_tokens
    );
    assert!((0.0..=2.0).contains(&request.sampling.temperature) && request.sampling.top_p > 0.0);
    assert!(request.stop_tokens.iter().all(|&id| (id as usize) < LIMITS.vocab_size));
    assert!(request.logit_bias.iter().all(|&(id, _)| (id as usize) < LIMITS.vocab_size));
    assert!(request.logprobs.is_none_or(|top| top <= 20) && request.stop.iter().all(|stop| !stop.is_empty()));
}

fn check(text: &[u8]) -> (bool, bool) {
    let completion =
        extract::parse::<CompletionRequest>(text).and_then(|body| plan::completion(body, &LIMITS));
    match &completion {
        Ok((prompts, plan)) => {
            assert!(!prompts.is_empty());
            within_limits(plan);
        }
        Err(error) => refused_well(error),
    }
    let chat = extract::parse::<ChatRequest>(text).and_then(|body| plan::chat(body, &LIMITS));
    match &chat {
        Ok(chat) => {
            assert!(!chat.input.messages.is_empty());
            within_limits(&chat.plan);
        }
        Err(error) => refused_well(error),
    }
    (completion.is_ok(), chat.is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn any_body_is_refused_by_name_or_within_the_limits(body in body()) {
        check(body.to_string().as_bytes());
    }

    /// A body cut short, with bytes changed, put in or taken out.
    #[test]
    fn a_damaged_body_is_refused_or_another_body(body in body(), at in any::<prop::sample::Index>(), byte in any::<u8>(), kind in 0..4u8) {
        let mut text = body.to_string().into_bytes();
        let at = at.index(text.len());
        match kind {
            0 => text.truncate(at),
            1 => text[at] = byte,
            2 => text.insert(at, byte),
            _ => { text.remove(at); }
        }
        check(&text);
    }

    #[test]
    fn any_bytes_are_refused(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(check(&bytes), (false, false));
    }
}

/// The strategy reaches both sides: without it the properties above could hold of nothing.
#[test]
fn bodies_are_taken_and_refused() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut completions, mut chats) = (0, 0);
    for _ in 0..1000 {
        let body = body().new_tree(&mut runner).unwrap().current();
        let (completion, chat) = check(body.to_string().as_bytes());
        completions += usize::from(completion);
        chats += usize::from(chat);
    }
    assert!((20..900).contains(&completions) && (20..900).contains(&chats), "{completions} {chats}");
}
