//! The answers' wire format: whole bodies and stream chunks of both endpoints.

use canopy_e2e::engine::{EmittedToken, FinishReason, RoundReport, StreamStats, TokenOrigin};
use canopy_e2e::tokenizer::{Detokenizer, Tokenizer};
use serde::Serialize;
use serde_json::{Value, json};

use crate::engine_thread::{ModelInfo, Update};
use crate::openai::Plan;
use crate::reasoning::{Parts, ReasoningSplit};

const FINGERPRINT: &str = concat!("canopy-", env!("CARGO_PKG_VERSION"));

/// Which endpoint's shape an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// Turns one stream's updates into answer parts.
#[derive(Debug)]
pub struct Reply {
    shape: Shape,
    id: String,
    created: u64,
    model: ModelInfo,
    plan: Plan,
    split: ReasoningSplit,
    pieces: Detokenizer,
    counts: Counts,
    text_offset: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    drafted: usize,
    bonus: usize,
}

/// A token as the page shows it; a character that several tokens share stands at the last of them.
#[derive(Serialize)]
struct TokenPiece {
    id: u32,
    text: String,
    origin: &'static str,
}

impl Reply {
    /// An answer of `plan` that starts inside `<think>` or not.
    pub fn new(shape: Shape, id: String, created: u64, model: ModelInfo, plan: Plan, thinking: bool) -> Self {
        Self {
            shape,
            id,
            created,
            pieces: model.tokenizer.detokenizer(),
            model,
            plan,
            split: ReasoningSplit::new(thinking),
            counts: Counts::default(),
            text_offset: 0,
        }
    }

    /// The first chunk of a streamed chat answer: the role.
    pub fn opening(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.shape == Shape::Chat)
            .then(|| self.chunk(json!([choice("delta", delta, Value::Null, None)]), None))
    }

    /// The chunk of one step, or none when there is nothing to tell.
    pub fn step(&mut self, update: &Update) -> Option<Value> {
        let parts = self.split.push(&update.text);
        let logprobs = self.logprobs(&update.tokens);
        let canopy = self.canopy_step(update);
        let silent = parts == Parts::default() && logprobs.is_null() && canopy.is_none();
        (!silent).then(|| self.text_chunk(&parts, logprobs, None, canopy))
    }

    /// The chunks at the end: held-back text, the finish reason, the usage when asked for.
    pub fn closing(&mut self, reason: FinishReason, stats: &StreamStats) -> Vec<Value> {
        let rest = self.split.finish();
        let mut chunks = Vec::with_capacity(3);
        if rest != Parts::default() {
            chunks.push(self.text_chunk(&rest, Value::Null, None, None));
        }
        let canopy = self.plan.canopy.stats.then(|| self.canopy_stats(stats));
        chunks.push(self.text_chunk(&Parts::default(), Value::Null, Some(finish_reason(reason)), canopy));
        if self.plan.include_usage {
            let mut chunk = self.chunk(json!([]), None);
            chunk["usage"] = usage(stats);
            chunks.push(chunk);
        }
        chunks
    }

    /// The whole body of an answer that is not streamed.
    pub fn whole(mut self, updates: &[Update], reason: FinishReason, stats: &StreamStats) -> Value {
        let mut parts = Parts::default();
        let mut rounds = Vec::new();
        let mut tokens = Vec::new();
        for update in updates {
            let Parts { reasoning, content } = self.split.push(&update.text);
            parts.reasoning.push_str(&reasoning);
            parts.content.push_str(&content);
            rounds.extend(self.canopy_step(update));
            tokens.extend_from_slice(&update.tokens);
        }
        parts.reasoning.push_str(&self.split.finish().reasoning);
        let logprobs = self.logprobs(&tokens);
        let finish = Some(finish_reason(reason));
        let choice = match self.shape {
            Shape::Completion => choice("text", parts.content.into(), logprobs, finish),
            Shape::Chat => {
                let mut message = json!({"role": "assistant", "content": parts.content, "refusal": null});
                if !parts.reasoning.is_empty() {
                    message["reasoning_content"] = parts.reasoning.into();
                }
                choice("message", message, logprobs, finish)
            }
        };
        let mut body = self.envelope(json!([choice]), false);
        body["usage"] = usage(stats);
        let canopy = self.plan.canopy;
        if canopy.stats || canopy.rounds {
            body["canopy"] = if canopy.stats { self.canopy_stats(stats) } else { json!({}) };
        }
        if canopy.rounds {
            body["canopy"]["round_reports"] = rounds.into();
        }
        body
    }

    fn text_chunk(
        &self,
        parts: &Parts,
        logprobs: Value,
        finish: Option<&'static str>,
        canopy: Option<Value>,
    ) -> Value {
        let choice = match self.shape {
            Shape::Completion => choice("text", parts.content.clone().into(), logprobs, finish),
            Shape::Chat => {
                let mut delta = json!({});
                if !parts.reasoning.is_empty() {
                    delta["reasoning_content"] = parts.reasoning.clone().into();
                }
                if !parts.content.is_empty() {
                    delta["content"] = parts.content.clone().into();
                }
                choice("delta", delta, logprobs, finish)
            }
        };
        self.chunk(json!([choice]), canopy)
    }

    fn chunk(&self, choices: Value, canopy: Option<Value>) -> Value {
        let mut chunk = self.envelope(choices, true);
        if self.plan.include_usage {
            chunk["usage"] = Value::Null;
        }
        if let Some(canopy) = canopy {
            chunk["canopy"] = canopy;
        }
        chunk
    }

    fn envelope(&self, choices: Value, is_chunk: bool) -> Value {
        let object = match (self.shape, is_chunk) {
            (Shape::Completion, _) => "text_completion",
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        })
    }

    /// Counts the tokens and, when asked for, tells the round.
    fn canopy_step(&mut self, update: &Update) -> Option<Value> {
        let drafted = update.tokens.iter().filter(|token| token.origin == TokenOrigin::Drafted).count();
        self.counts.drafted += drafted;
        self.counts.bonus += update.tokens.len() - drafted;
        if !self.plan.canopy.rounds || (update.tokens.is_empty() && update.round.is_none()) {
            return None;
        }
        let tokenizer = &self.model.tokenizer;
        let pieces = &mut self.pieces;
        let piece = |token: &EmittedToken| TokenPiece {
            id: token.id,
            text: pieces.push(token.id),
            origin: match token.origin {
                TokenOrigin::Drafted => "drafted",
                TokenOrigin::Bonus => "bonus",
            },
        };
        let tokens: Vec<TokenPiece> = update.tokens.iter().map(piece).collect();
        let round = update.round.as_ref().map(|round| round_body(tokenizer, round));
        Some(json!({"tokens": tokens, "round": round}))
    }

    fn canopy_stats(&self, stats: &StreamStats) -> Value {
        let request = &self.plan.request;
        let stages = &stats.stages;
        let decode = stats.total - stats.first_token;
        let per_second =
            if decode > 0.0 { stats.completion_tokens.saturating_sub(1) as f64 / decode } else { 0.0 };
        json!({
            "mode": request.speculation.mode.name(),
            "budget": request.speculation.budget,
            "seed": request.sampling.seed,
            "rounds": stats.rounds,
            "nodes": stats.nodes,
            "committed": stats.committed,
            "acceptance_length": stats.acceptance_length(),
            "drafted_tokens": self.counts.drafted,
            "bonus_tokens": self.counts.bonus,
            "first_token_seconds": stats.first_token,
            "total_seconds": stats.total,
            "tokens_per_second": per_second,
            "stage_seconds": {
                "prefill": stages.prefill,
                "draft": stages.draft,
                "build": stages.build,
                "verify": stages.verify,
                "accept": stages.accept,
                "commit": stages.commit,
            },
        })
    }

    fn logprobs(&mut self, tokens: &[EmittedToken]) -> Value {
        if self.plan.request.logprobs.is_none() || tokens.is_empty() {
            return Value::Null;
        }
        let tokenizer = &self.model.tokenizer;
        match self.shape {
            Shape::Chat => {
                let content: Vec<Value> = tokens.iter().map(|token| chat_logprob(tokenizer, token)).collect();
                json!({"content": content, "refusal": null})
            }
            Shape::Completion => {
                let texts: Vec<String> = tokens.iter().map(|token| tokenizer.token_text(token.id)).collect();
                let mut offsets = Vec::with_capacity(texts.len());
                for text in &texts {
                    offsets.push(self.text_offset);
                    self.text_offset += text.chars().count();
                }
                let top = |token: &EmittedToken| -> Value {
                    token
                        .top
                        .iter()
                        .map(|&(id, logprob)| (tokenizer.token_text(id), json!(logprob)))
                        .collect()
                };
                json!({
                    "tokens": texts,
                    "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }
}

/// The usage of an answer.
fn usage(stats: &StreamStats) -> Value {
    json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    })
}

fn choice(key: &str, value: Value, logprobs: Value, finish: Option<&'static str>) -> Value {
    json!({"index": 0, key: value, "logprobs": logprobs, "finish_reason": finish})
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::TimedOut => "timeout",
    }
}

fn round_body(tokenizer: &Tokenizer, round: &RoundReport) -> Value {
    let nodes: Vec<Value> = round
        .nodes
        .iter()
        .map(|node| {
            let text = tokenizer.token_text(node.token);
            json!({"token": node.token, "text": text, "parent": node.parent, "prob": node.prob})
        })
        .collect();
    json!({
        "start": round.start,
        "nodes": nodes,
        "path": round.path,
        "bonus": {"token": round.bonus, "text": tokenizer.token_text(round.bonus)},
    })
}

fn chat_logprob(tokenizer: &Tokenizer, token: &EmittedToken) -> Value {
    let one = |id, logprob| {
        let text = tokenizer.token_text(id);
        let bytes = (!text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec());
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let mut body = one(token.id, token.logprob);
    body["top_logprobs"] = token.top.iter().map(|&(id, logprob)| one(id, Some(logprob))).collect();
    body
}
