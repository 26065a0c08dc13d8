//! What both endpoints do with a checked request: hand it to the engine and answer, whole or streamed.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Instant;

use axum::http::{HeaderValue, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use canopy_e2e::engine::Constraint;
use futures_util::stream::{self, Stream, StreamExt as _};
use serde_json::Value;
use tokio_stream::wrappers::ReceiverStream;

use crate::engine_thread::{End, ModelInfo, Update};
use crate::error::ApiError;
use crate::plan::{Limits, Plan, Prompt, PromptList, with_prompt};
use crate::queue::Permit;
use crate::reply::{Piece, Reply, ReplyStart, Shape};
use crate::routes::{unique, unix_now};
use crate::state::AppState;

/// Longer prompts are encoded off the async threads.
const LONG_PROMPT: usize = 16 * 1024;

/// What is to be generated and how it is told.
#[derive(Debug)]
pub struct Job {
    /// The answer's shape.
    pub shape: Shape,
    /// The prompts.
    pub prompts: PromptList,
    /// Whether the prompt opened `<think>`.
    pub thinking: bool,
    /// Tools whose calls are read out of the text.
    pub tools: Vec<Value>,
    /// Everything else.
    pub plan: Plan,
}

/// The updates of a request's streams, each with its choice; none when a stream ended without an end.
type Updates = Pin<Box<dyn Stream<Item = (usize, Option<Update>)> + Send>>;

/// The served model's limits, or 503 while there is no model.
pub fn limits(state: &AppState) -> Result<Limits<'_>, ApiError> {
    state.check_ready()?;
    let model = state.engine().model()?;
    Ok(Limits {
        model: &model.name,
        vocab_size: model.vocab_size,
        context_len: model.context_len,
        default_max_tokens: state.config().default_max_tokens,
        has_drafter: model.has_drafter,
    })
}

/// Runs a job.
pub async fn generate(state: AppState, job: Job) -> Result<Response, ApiError> {
    let Job { shape, prompts, thinking, tools, plan } = job;
    let model = state.engine().model()?.clone();
    let permits = admit(&state, &prompts, plan.choices)?;
    let echo = |(_, prompt): &(_, Prompt)| match (prompt, plan.echo) {
        (_, false) => Ok(None),
        (Prompt::Text(text), true) => Ok(Some(text.clone())),
        (Prompt::Tokens(tokens), true) => model.tokenizer.decode(tokens).map(Some),
    };
    let echoes = prompts.iter().map(echo).collect::<canopy_e2e::Result<Vec<_>>>()?;
    let updates = submit(&state, &model, shape, &plan, prompts, permits).await?;
    let prefix = if shape == Shape::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{}", unique(&state));
    let streams = plan.stream;
    let reply =
        Reply::new(ReplyStart { shape, id, created: unix_now(), model, plan, thinking, tools, echoes });
    if streams { Ok(streamed(&state, reply, updates)) } else { whole(reply, updates).await }
}

/// Places for every answer to every prompt.
fn admit(state: &AppState, prompts: &PromptList, choices: usize) -> Result<Vec<Permit>, ApiError> {
    let capacity = state.queue().capacity();
    let places = prompts.len() * choices;
    if places > capacity {
        let expected = format!("at most {capacity} answers at once, the streams that run or wait here");
        let (field, got) = if prompts.len() > capacity {
            ("prompt", format!("{} prompts", prompts.len()))
        } else {
            ("n", format!("{choices} for each of {} prompts", prompts.len()))
        };
        return Err(ApiError::field(field, expected, got));
    }
    state.queue().admit_all(places)
}

/// Hands every answer to the engine: all of the first prompt, then those of the next.
async fn submit(
    state: &AppState,
    model: &ModelInfo,
    shape: Shape,
    plan: &Plan,
    prompts: PromptList,
    permits: Vec<Permit>,
) -> Result<Updates, ApiError> {
    let format = match plan.request.constraint {
        Constraint::Grammar(_) => "grammar",
        _ => "response_format",
    };
    let deadline = state.config().request_timeout.map(|limit| Instant::now() + limit);
    // Every prompt is checked before the engine hears of one.
    let mut requests = Vec::with_capacity(prompts.len());
    for (field, prompt) in prompts {
        let tokens = encode(state, prompt).await?;
        let mut request = with_prompt(plan.request.clone(), tokens, &field, model.context_len)?;
        request.deadline = deadline;
        requests.push((field, request));
    }
    let wire_name = |error, field: &str| wire_name(error, shape, (field, format));
    let compiled = state.compilations().grammars(model, &plan.request.constraint, permits.len());
    let compiled = match deadline {
        None => compiled.await,
        Some(deadline) => {
            tokio::time::timeout_at(deadline.into(), compiled).await.map_err(|_| ApiError::timed_out())?
        }
    };
    let grammars = compiled.map_err(|error| wire_name(error, "prompt"))?;
    let mut streams = Vec::with_capacity(permits.len());
    for (index, (permit, grammar)) in permits.into_iter().zip(grammars).enumerate() {
        let (field, request) = &requests[index / plan.choices];
        let request = plan.choice(request, index % plan.choices);
        let submitted = state.engine().submit(request, grammar, permit).await;
        let updates = submitted.map_err(|error| wire_name(error, field))?;
        let ended = stream::once(std::future::ready((index, None)));
        streams.push(ReceiverStream::new(updates).map(move |update| (index, Some(update))).chain(ended));
    }
    Ok(Box::pin(stream::select_all(streams)))
}

/// The engine's refusal under the name that the field has in the request.
fn wire_name(error: ApiError, shape: Shape, (prompt, format): (&str, &str)) -> ApiError {
    let logprobs = if shape == Shape::Chat { "top_logprobs" } else { "logprobs" };
    error
        .renamed("prompt", prompt)
        .renamed("budget", "speculation.budget")
        .renamed("mode", "speculation.mode")
        .renamed("stop_tokens", "stop_token_ids")
        .renamed("prompt_logprobs", "echo")
        .renamed("constraint", format)
        .renamed("json_schema", "response_format")
        .renamed("reasoning", "thinking_budget")
        .renamed("logprobs", logprobs)
}

/// A prompt's tokens.
pub async fn encode(state: &AppState, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let text = match prompt {
        Prompt::Tokens(tokens) => return Ok(tokens),
        Prompt::Text(text) => text,
    };
    let tokenizer = state.engine().model()?.tokenizer.clone();
    if text.len() < LONG_PROMPT {
        return Ok(tokenizer.encode(&text)?);
    }
    let encoded = tokio::task::spawn_blocking(move || tokenizer.encode(&text)).await;
    Ok(encoded.map_err(ApiError::internal)??)
}

async fn whole(mut reply: Reply, mut updates: Updates) -> Result<Response, ApiError> {
    while let Some((index, update)) = updates.next().await {
        match update {
            None if reply.choice_ended(index) => {}
            None => break,
            Some(mut update) => {
                let end = update.end.take();
                reply.keep(index, &update);
                match end {
                    None => {}
                    Some(End::Failed(error)) => return Err(error),
                    Some(End::Done { reason, stats }) => reply.keep_end(index, reason, &stats),
                }
            }
        }
        if reply.ended() {
            let json = HeaderValue::from_static("application/json");
            return Ok(([(header::CONTENT_TYPE, json)], reply.whole()).into_response());
        }
    }
    Err(ApiError::engine_down("has stopped"))
}

fn streamed(state: &AppState, reply: Reply, updates: Updates) -> Response {
    let opening = stream::iter(reply.opening().into_iter().map(event));
    let steps = stream::unfold(Some((reply, updates)), |open| async move {
        let (mut reply, mut updates) = open?;
        let (index, update) = updates.next().await?;
        let (events, ended) = events(&mut reply, index, update);
        Some((stream::iter(events), (!ended).then_some((reply, updates))))
    })
    .flatten();
    let events = opening.chain(steps).map(Ok::<SseEvent, Infallible>);
    let keep_alive = KeepAlive::new().interval(state.config().keep_alive);
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Proxies that buffer would hold the tokens back.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One update's events, and whether they are the last.
fn events(reply: &mut Reply, index: usize, update: Option<Update>) -> (Vec<SseEvent>, bool) {
    let Some(mut update) = update else {
        if reply.choice_ended(index) {
            return (Vec::new(), false);
        }
        return (vec![failed(&ApiError::engine_down("has stopped, or this reader was too slow"))], true);
    };
    let end = update.end.take();
    let mut events: Vec<SseEvent> = reply.step(index, &update).into_iter().map(event).collect();
    match end {
        None => return (events, false),
        Some(End::Failed(error)) => {
            if let Some(cause) = &error.cause {
                tracing::error!(cause, "a streamed answer failed");
            }
            events.push(failed(&error));
        }
        Some(End::Done { reason, stats }) => {
            events.extend(reply.end(index, reason, &stats).into_iter().map(event));
            if !reply.ended() {
                return (events, false);
            }
            events.extend(reply.closing().map(event));
            events.push(SseEvent::default().data("[DONE]"));
        }
    }
    (events, true)
}

fn event(piece: Piece) -> SseEvent {
    match piece {
        Piece::Chunk(json) => SseEvent::default().data(json),
        Piece::Round(json) => SseEvent::default().event("canopy").data(json),
    }
}

fn failed(error: &ApiError) -> SseEvent {
    SseEvent::default().data(serde_json::to_string(&error.body()).unwrap_or_default())
}
