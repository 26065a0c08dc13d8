//! From OpenAI's request bodies to the engine's request; every check that needs no engine is here.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use canopy_e2e::engine::{GenerateRequest, Mode, Sampling, Speculation};
use canopy_e2e::tokenizer::ChatMessage;
use serde_json::Value;

use crate::config::MAX_BUDGET;
use crate::error::ApiError;
use crate::types::{ChatMessageBody, ChatRequest, CompletionRequest, ModeBody, Shared};

/// Most alternatives per token.
const MAX_LOGPROBS: i64 = 20;
/// Most stop strings of a request, and the most bytes of one.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most stop tokens of a request.
const MAX_STOP_TOKENS: usize = 256;

/// What the checks ask of the served model and the server.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Name of the served model.
    pub model: &'a str,
    /// Rows of the logits.
    pub vocab_size: usize,
    /// Tokens of prompt and answer together.
    pub context_len: usize,
    /// max_tokens of a request that names none.
    pub default_max_tokens: usize,
    /// Whether a drafter is loaded.
    pub has_drafter: bool,
}

/// A prompt as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text to encode.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// What an answer tells besides its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CanopyOptions {
    /// Statistics at the end.
    pub stats: bool,
    /// Every round's tree, accepted path and tokens.
    pub rounds: bool,
}

/// A checked request without its prompt.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The engine's request; its prompt is empty.
    pub request: GenerateRequest,
    /// Answer with server-sent events.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// What the answer tells besides its text.
    pub canopy: CanopyOptions,
}

/// Checks a completion request.
pub fn completion(mut body: CompletionRequest, limits: &Limits<'_>) -> Result<(Prompt, Plan), ApiError> {
    let shared = body.take_shared();
    check_model(shared.model.as_deref(), limits)?;
    neutral("echo", body.echo, |&echo| !echo, "false")?;
    neutral("suffix", body.suffix, String::is_empty, "an empty string")?;
    neutral("best_of", body.best_of, |&best_of| best_of == 1, "1")?;
    let prompt = prompt(body.prompt, limits)?;
    let logprobs = ranged("logprobs", body.logprobs, 0, MAX_LOGPROBS)?;
    let max_tokens = shared.max_tokens;
    let plan = plan(shared, ("max_tokens", max_tokens), logprobs.map(|n| n as usize), limits)?;
    Ok((prompt, plan))
}

/// Checks a chat request.
pub fn chat(mut body: ChatRequest, limits: &Limits<'_>) -> Result<(Vec<ChatMessage>, Plan), ApiError> {
    let shared = body.take_shared();
    check_model(shared.model.as_deref(), limits)?;
    neutral("store", body.store, |&store| !store, "false")?;
    neutral("response_format", body.response_format, |f| f["type"] == "text", r#"{"type": "text"}"#)?;
    neutral("tools", body.tools, Vec::is_empty, "an empty list")?;
    neutral("tool_choice", body.tool_choice, |c| c == "none" || c == "auto", "none or auto")?;
    neutral("modalities", body.modalities, |m| m.iter().all(|m| m == "text"), r#"["text"]"#)?;
    neutral("service_tier", body.service_tier, |t| t == "auto" || t == "default", "auto or default")?;
    let messages = messages(body.messages)?;
    let top = ranged("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)?;
    let logprobs = match (body.logprobs.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0) as usize),
        (false, None | Some(0)) => None,
        (false, Some(top)) => return Err(ApiError::field("top_logprobs", "0 without logprobs: true", top)),
    };
    let max_tokens = match (shared.max_tokens, body.max_completion_tokens) {
        (Some(one), Some(other)) if one != other => {
            return Err(ApiError::field("max_completion_tokens", format!("max_tokens, {one}"), other));
        }
        (_, Some(max)) => ("max_completion_tokens", Some(max)),
        (max, None) => ("max_tokens", max),
    };
    let plan = plan(shared, max_tokens, logprobs, limits)?;
    Ok((messages, plan))
}

/// The plan's request with its prompt, refused when it leaves no room for a token.
pub fn with_prompt(
    mut request: GenerateRequest,
    prompt: Vec<u32>,
    field: &'static str,
    context_len: usize,
) -> Result<GenerateRequest, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(field, "at least one token", "none"));
    }
    if prompt.len() >= context_len {
        return Err(ApiError::context_length(field, context_len, prompt.len()));
    }
    request.max_tokens = request.max_tokens.min(context_len - prompt.len());
    request.prompt = prompt;
    Ok(request)
}

fn check_model(asked: Option<&str>, limits: &Limits<'_>) -> Result<(), ApiError> {
    match asked {
        Some(asked) if asked != limits.model => Err(ApiError::model_not_found(asked, limits.model)),
        _ => Ok(()),
    }
}

fn plan(
    shared: Shared,
    (max_name, max_tokens): (&'static str, Option<i64>),
    logprobs: Option<usize>,
    limits: &Limits<'_>,
) -> Result<Plan, ApiError> {
    neutral("n", shared.n, |&n| n == 1, "1")?;
    neutral("frequency_penalty", shared.frequency_penalty, |&p| p == 0.0, "0")?;
    neutral("presence_penalty", shared.presence_penalty, |&p| p == 0.0, "0")?;
    neutral("logit_bias", shared.logit_bias.as_ref(), |bias| bias.is_empty(), "{}")?;
    let stream = shared.stream.unwrap_or(false);
    if shared.stream_options.is_some() && !stream {
        return Err(ApiError::field("stream_options", "null without stream: true", "an object"));
    }
    let canopy = canopy_options(shared.canopy.as_ref())?;
    let max_tokens = ranged(max_name, max_tokens, 1, i64::MAX)?;
    Ok(Plan {
        stream,
        include_usage: shared.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
        canopy,
        request: GenerateRequest {
            prompt: Vec::new(),
            max_tokens: max_tokens
                .map_or(limits.default_max_tokens, |max| max as usize)
                .min(limits.context_len),
            stop: stops(shared.stop.as_ref())?,
            stop_tokens: stop_tokens(shared.stop_token_ids.as_deref(), limits)?,
            ignore_eos: shared.ignore_eos.unwrap_or(false),
            sampling: sampling(&shared)?,
            speculation: speculation(&shared, limits)?,
            logprobs,
            report_rounds: canopy.rounds,
            ..GenerateRequest::new(Vec::new(), 1)
        },
    })
}

fn sampling(shared: &Shared) -> Result<Sampling, ApiError> {
    let within = |name: &'static str, value: Option<f32>, default, expected, ok: fn(f32) -> bool| {
        let value = value.unwrap_or(default);
        if ok(value) { Ok(value) } else { Err(ApiError::field(name, expected, value)) }
    };
    let temperature =
        within("temperature", shared.temperature, 0.0, "0 to 2", |value| (0.0..=2.0).contains(&value))?;
    let top_p =
        within("top_p", shared.top_p, 1.0, "above 0 and at most 1", |value| value > 0.0 && value <= 1.0)?;
    let min_p =
        within("min_p", shared.min_p, 0.0, "at least 0 and below 1", |value| (0.0..1.0).contains(&value))?;
    let top_k = ranged("top_k", shared.top_k, -1, i64::from(u32::MAX))?.unwrap_or(0).max(0);
    let seed = match shared.seed {
        Some(seed) => seed as u64,
        None if temperature > 0.0 => random_seed(),
        None => 0,
    };
    Ok(Sampling { temperature, top_p, top_k: top_k as usize, min_p, seed })
}

/// A seed that JSON carries exactly.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

fn speculation(shared: &Shared, limits: &Limits<'_>) -> Result<Speculation, ApiError> {
    let asked = shared.speculation.as_ref();
    let mode = asked.and_then(|speculation| speculation.mode);
    let budget = asked.and_then(|speculation| speculation.budget);
    let budget = ranged("speculation.budget", budget, 0, MAX_BUDGET as i64)?.map(|budget| budget as usize);
    if shared.draft == Some(false) && mode.is_some_and(|mode| mode != ModeBody::Ar) {
        return Err(ApiError::field("speculation.mode", "ar with draft: false", "another mode"));
    }
    let mode = match mode {
        _ if shared.draft == Some(false) => Mode::Ar,
        None | Some(ModeBody::Auto) => Mode::Auto,
        Some(ModeBody::Ar) => Mode::Ar,
        Some(ModeBody::Chain) => Mode::Chain,
        Some(ModeBody::Tree) => Mode::Tree,
    };
    if !limits.has_drafter && matches!(mode, Mode::Chain | Mode::Tree) {
        return Err(ApiError::field("speculation.mode", "ar or auto: no drafter is loaded", "another mode"));
    }
    Ok(Speculation { mode, budget })
}

fn canopy_options(value: Option<&Value>) -> Result<CanopyOptions, ApiError> {
    let wrong = |name: String, value: &Value| Err(ApiError::field(name, "true or false", shown(value)));
    match value {
        None => Ok(CanopyOptions::default()),
        Some(&Value::Bool(on)) => Ok(CanopyOptions { stats: on, rounds: on }),
        Some(Value::Object(fields)) => {
            let mut options = CanopyOptions { stats: true, rounds: false };
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("stats", &Value::Bool(on)) => options.stats = on,
                    ("rounds", &Value::Bool(on)) => options.rounds = on,
                    ("stats" | "rounds", value) => return wrong(format!("canopy.{name}"), value),
                    _ => {
                        let mut error =
                            ApiError::field(format!("canopy.{name}"), "stats or rounds", "another field");
                        error.code = Some("unknown_field");
                        return Err(error);
                    }
                }
            }
            Ok(options)
        }
        Some(other) => Err(ApiError::field("canopy", r#"true, false or {"stats", "rounds"}"#, shown(other))),
    }
}

fn prompt(value: Option<Value>, limits: &Limits<'_>) -> Result<Prompt, ApiError> {
    const EXPECTED: &str = "a string, a list of one string, or token ids";
    match value {
        Some(Value::String(text)) => non_empty(text, "prompt".into()).map(Prompt::Text),
        Some(Value::Array(mut items)) => match items.first() {
            None => Err(ApiError::field("prompt", EXPECTED, "an empty list")),
            Some(Value::Number(_)) => token_ids("prompt", &items, limits).map(Prompt::Tokens),
            Some(Value::String(_) | Value::Array(_)) if items.len() > 1 => {
                Err(ApiError::field("prompt", "one prompt per request", format!("{} prompts", items.len())))
            }
            Some(Value::String(_) | Value::Array(_)) => match items.remove(0) {
                Value::Array(ids) if !ids.is_empty() => {
                    token_ids("prompt[0]", &ids, limits).map(Prompt::Tokens)
                }
                Value::String(text) => non_empty(text, "prompt[0]".into()).map(Prompt::Text),
                _ => Err(ApiError::field("prompt[0]", EXPECTED, "an empty list")),
            },
            Some(other) => Err(ApiError::field("prompt[0]", EXPECTED, shown(other))),
        },
        Some(other) => Err(ApiError::field("prompt", EXPECTED, shown(&other))),
        None => Err(missing("prompt")),
    }
}

fn non_empty(text: String, field: String) -> Result<String, ApiError> {
    if text.is_empty() {
        Err(ApiError::field(field, "at least one character", "an empty string"))
    } else {
        Ok(text)
    }
}

fn token_ids(field: &str, items: &[Value], limits: &Limits<'_>) -> Result<Vec<u32>, ApiError> {
    let id = |(at, item): (usize, &Value)| match item.as_u64() {
        Some(id) if (id as usize) < limits.vocab_size => Ok(id as u32),
        _ => {
            let expected = format!("a token id below {}", limits.vocab_size);
            Err(ApiError::field(format!("{field}[{at}]"), expected, shown(item)))
        }
    };
    items.iter().enumerate().map(id).collect()
}

fn messages(bodies: Option<Vec<ChatMessageBody>>) -> Result<Vec<ChatMessage>, ApiError> {
    let bodies = bodies.ok_or_else(|| missing("messages"))?;
    if bodies.is_empty() {
        return Err(ApiError::field("messages", "at least one message", "an empty list"));
    }
    bodies.into_iter().enumerate().map(|(at, body)| message(at, body)).collect()
}

fn message(at: usize, body: ChatMessageBody) -> Result<ChatMessage, ApiError> {
    let field = |name: &str| format!("messages[{at}].{name}");
    let role = match body.role.as_deref() {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant")) => role,
        Some(other) => {
            let expected = "system, developer, user or assistant";
            return Err(ApiError::field(field("role"), expected, format!("{other:?}")));
        }
        None => return Err(missing(field("role"))),
    };
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let unsupported = [
        ("refusal", body.refusal, false),
        ("audio", body.audio, false),
        ("function_call", body.function_call, false),
        ("tool_call_id", body.tool_call_id, false),
        ("annotations", body.annotations, true),
        ("tool_calls", body.tool_calls, true),
    ];
    for (name, value, may_be_empty_list) in unsupported {
        neutral(field(name), value, |value| may_be_empty_list && empty(value), "null")?;
    }
    Ok(ChatMessage { role: role.to_owned(), content: content(at, body.content)? })
}

fn content(at: usize, value: Option<Value>) -> Result<String, ApiError> {
    let field = format!("messages[{at}].content");
    let parts = match value {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(ApiError::field(field, "a string or a list of text parts", shown(&other))),
        None => return Err(missing(field)),
    };
    let mut text = String::new();
    for (part_at, part) in parts.iter().enumerate() {
        let Some(part) = part.as_object() else {
            return Err(ApiError::field(format!("{field}[{part_at}]"), "a text part", shown(part)));
        };
        if part.get("type").and_then(Value::as_str) != Some("text") {
            let got = part.get("type").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].type"), "text", got));
        }
        let Some(piece) = part.get("text").and_then(Value::as_str) else {
            let got = part.get("text").map_or("none".into(), shown);
            return Err(ApiError::field(format!("{field}[{part_at}].text"), "a string", got));
        };
        text.push_str(piece);
    }
    Ok(text)
}

fn stops(value: Option<&Value>) -> Result<Vec<String>, ApiError> {
    const EXPECTED: &str = "a string or a list of strings";
    let one = |field: String, value: &Value| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(field, "at least one character", "none"))
        }
        Value::String(text) if text.len() > MAX_STOP_BYTES => {
            let expected = format!("at most {MAX_STOP_BYTES} bytes");
            Err(ApiError::field(field, expected, format!("{} bytes", text.len())))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(ApiError::field(field, EXPECTED, shown(other))),
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() > MAX_STOPS => {
            Err(ApiError::field("stop", format!("at most {MAX_STOPS} strings"), items.len()))
        }
        Some(Value::Array(items)) => {
            items.iter().enumerate().map(|(at, item)| one(format!("stop[{at}]"), item)).collect()
        }
        Some(value) => one("stop".into(), value).map(|stop| vec![stop]),
    }
}

fn stop_tokens(ids: Option<&[u32]>, limits: &Limits<'_>) -> Result<Vec<u32>, ApiError> {
    let ids = ids.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        return Err(ApiError::field("stop_token_ids", format!("at most {MAX_STOP_TOKENS} ids"), ids.len()));
    }
    match ids.iter().enumerate().find(|&(_, &id)| id as usize >= limits.vocab_size) {
        Some((at, id)) => {
            let expected = format!("a token id below {}", limits.vocab_size);
            Err(ApiError::field(format!("stop_token_ids[{at}]"), expected, id))
        }
        None => Ok(ids.to_vec()),
    }
}

fn ranged(name: &'static str, value: Option<i64>, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            let expected =
                if high == i64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
            Err(ApiError::field(name, expected, value))
        }
        value => Ok(value),
    }
}

/// Accepts a field that is left out or has the one value that changes nothing.
fn neutral<T: serde::Serialize>(
    name: impl Into<String>,
    value: Option<T>,
    is_neutral: impl FnOnce(&T) -> bool,
    expected: &str,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !is_neutral(&value) => {
            let got = serde_json::to_value(&value).unwrap_or_default();
            let expected = format!("{expected} (nothing else is supported)");
            Err(ApiError {
                code: Some("unsupported_value"),
                ..ApiError::field(name.into(), expected, shown(&got))
            })
        }
        _ => Ok(()),
    }
}

fn missing(field: impl Into<String>) -> ApiError {
    let field = field.into();
    ApiError {
        code: Some("missing_field"),
        param: Some(field.clone().into()),
        ..ApiError::invalid(format!("{field}: a value is needed"))
    }
}

/// A value as an error message shows it.
fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
