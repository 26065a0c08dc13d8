//! What both endpoints do with a checked request: hand it to the engine and answer, whole or streamed.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, StreamExt as _};
use serde_json::Value;
use tokio::sync::mpsc::Receiver;

use crate::engine_thread::{End, Update};
use crate::error::ApiError;
use crate::openai::{Limits, Plan, Prompt, with_prompt};
use crate::reply::{Reply, Shape};
use crate::routes::{unique, unix_now};
use crate::state::AppState;

/// Comments that keep an idle connection open come this often.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Longer prompts are encoded off the async threads.
const LONG_PROMPT: usize = 16 * 1024;

/// What is to be generated and how it is told.
#[derive(Debug)]
pub struct Job {
    /// The answer's shape.
    pub shape: Shape,
    /// The prompt.
    pub prompt: Prompt,
    /// The request's field that the prompt came from.
    pub field: &'static str,
    /// Whether the prompt opened `<think>`.
    pub thinking: bool,
    /// Everything else.
    pub plan: Plan,
}

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
    let Job { shape, prompt, field, thinking, plan } = job;
    let model = state.engine().model()?.clone();
    let permit = state.queue().admit()?;
    let tokens = encode(&state, prompt).await?;
    let request = with_prompt(plan.request.clone(), tokens, field, model.context_len)?;
    let updates =
        state.engine().submit(request, permit).await.map_err(|error| wire_name(error, shape, field))?;
    let prefix = if shape == Shape::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{}", unique(&state));
    let stream = plan.stream;
    let reply = Reply::new(shape, id, unix_now(), model, plan, thinking);
    if stream { Ok(streamed(reply, updates)) } else { whole(reply, updates).await }
}

/// The engine's refusal under the name that the field has in the request.
fn wire_name(error: ApiError, shape: Shape, prompt: &'static str) -> ApiError {
    let logprobs = if shape == Shape::Chat { "top_logprobs" } else { "logprobs" };
    error
        .renamed("prompt", prompt)
        .renamed("budget", "speculation.budget")
        .renamed("mode", "speculation.mode")
        .renamed("stop_tokens", "stop_token_ids")
        .renamed("logprobs", logprobs)
}

async fn encode(state: &AppState, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
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

async fn whole(reply: Reply, mut updates: Receiver<Update>) -> Result<Response, ApiError> {
    let mut all = Vec::new();
    while let Some(mut update) = updates.recv().await {
        let end = update.end.take();
        all.push(update);
        match end {
            None => {}
            Some(End::Done { reason, stats }) => {
                return Ok(Json(reply.whole(&all, reason, &stats)).into_response());
            }
            Some(End::Failed(error)) => return Err(error),
        }
    }
    Err(ApiError::engine_down("has stopped"))
}

fn streamed(reply: Reply, updates: Receiver<Update>) -> Response {
    let opening = stream::iter(reply.opening().map(data));
    let steps = stream::unfold(Some((reply, updates)), |open| async move {
        let (mut reply, mut updates) = open?;
        let update = updates.recv().await;
        let (events, ended) = step_events(&mut reply, update);
        Some((stream::iter(events), (!ended).then_some((reply, updates))))
    })
    .flatten();
    let events = opening.chain(steps).map(Ok::<SseEvent, Infallible>);
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Proxies that buffer would hold the tokens back.
    response.headers_mut().insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    response
}

/// One update's events, and whether they are the last.
fn step_events(reply: &mut Reply, update: Option<Update>) -> (Vec<SseEvent>, bool) {
    let Some(mut update) = update else {
        let error = ApiError::engine_down("has stopped, or this reader was too slow");
        return (vec![data(error.body())], true);
    };
    let end = update.end.take();
    let mut events: Vec<SseEvent> = reply.step(&update).map(data).into_iter().collect();
    match end {
        None => return (events, false),
        Some(End::Failed(error)) => {
            if let Some(cause) = &error.cause {
                tracing::error!(cause, "a streamed answer failed");
            }
            events.push(data(error.body()));
        }
        Some(End::Done { reason, stats }) => {
            events.extend(reply.closing(reason, &stats).into_iter().map(data));
            events.push(SseEvent::default().data("[DONE]"));
        }
    }
    (events, true)
}

fn data(value: Value) -> SseEvent {
    SseEvent::default().data(value.to_string())
}
