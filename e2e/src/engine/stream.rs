//! One running stream: its place in the text, what it has emitted, what its drafter still has to take in.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use super::accept::Picker;
use super::auto::{History, StreamTuning};
use super::prefix::PrefixKey;
use super::stop::StopMatcher;
use super::text::{TextDecoder, TokenText};
use super::{EmittedToken, FinishReason, GenerateRequest, PromptToken, Speculation, StreamId, StreamStats};
use crate::Result;
use crate::draft::Drafter;

/// Turns emitted tokens into text and finds the end of the generation.
pub(super) struct Output {
    decoder: Box<dyn TextDecoder>,
    stops: StopMatcher,
    stop_tokens: HashSet<u32>,
    /// Tokens that may still be emitted.
    left: usize,
}

/// What becomes visible of a round's tokens.
pub(super) struct Emission {
    pub text: String,
    /// The tokens that count: those up to the one that ended the generation, it included.
    pub tokens: Vec<EmittedToken>,
    pub finish: Option<FinishReason>,
}

/// The tokens that end a request's text.
pub(super) fn ends(text: &dyn TokenText, request: &GenerateRequest) -> Vec<u32> {
    let own = if request.ignore_eos { &[] } else { text.stop_tokens() };
    own.iter().chain(&request.stop_tokens).copied().collect()
}

impl Output {
    pub fn new(text: &Arc<dyn TokenText>, request: &GenerateRequest, limit: usize) -> Self {
        Self {
            decoder: Arc::clone(text).decoder(),
            stops: StopMatcher::new(request.stop.clone()),
            stop_tokens: ends(text.as_ref(), request).into_iter().collect(),
            left: limit,
        }
    }

    /// Takes in a round's tokens. A stop token's own text is not part of the text.
    pub fn push(&mut self, mut tokens: Vec<EmittedToken>) -> Emission {
        let (mut text, mut finish, mut kept) = (String::new(), None, 0);
        for token in &tokens {
            if self.left == 0 {
                break;
            }
            kept += 1;
            self.left -= 1;
            let ends = self.stop_tokens.contains(&token.id);
            if !ends {
                text.push_str(&self.stops.push(&self.decoder.push(token.id)));
            }
            if ends || self.stops.matched() {
                finish = Some(FinishReason::Stop);
                break;
            }
        }
        if finish.is_none() && self.left == 0 {
            finish = Some(FinishReason::Length);
        }
        if finish.is_some() {
            text.push_str(&self.stops.push(&self.decoder.finish()));
            text.push_str(&self.stops.finish());
            if self.stops.matched() {
                finish = Some(FinishReason::Stop);
            }
        }
        tokens.truncate(kept);
        Emission { text, tokens, finish }
    }
}

/// Target features of committed tokens that the drafter has not taken in yet. They wait until a draft is wanted, so
/// that a stream whose rounds are plain pays one call for many rows.
#[derive(Default)]
pub(super) struct PendingFeatures {
    rows: Vec<Tensor>,
    count: usize,
}

/// Rows that wait at most.
const MOST_PENDING: usize = 256;

impl PendingFeatures {
    /// Adds rows `[n, taps * hidden]` of just committed tokens.
    pub fn push(&mut self, rows: Tensor, slot: usize, drafter: &mut dyn Drafter) -> Result<()> {
        self.count += rows.dim(0)?;
        self.rows.push(rows);
        if self.count < MOST_PENDING { Ok(()) } else { self.flush(slot, drafter) }
    }

    /// Gives the drafter all waiting rows.
    pub fn flush(&mut self, slot: usize, drafter: &mut dyn Drafter) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        self.count = 0;
        drafter.extend(slot, &joined(std::mem::take(&mut self.rows))?)
    }

    /// Moves all waiting rows to the end of `rows`; the drafter is about to take them in.
    pub fn take(&mut self, rows: &mut Vec<Tensor>) -> usize {
        rows.append(&mut self.rows);
        std::mem::take(&mut self.count)
    }
}

/// Tensors of feature rows as one.
pub(super) fn joined(mut rows: Vec<Tensor>) -> Result<Tensor> {
    match rows.len() {
        1 => Ok(rows.remove(0)),
        _ => Ok(Tensor::cat(&rows, 0)?),
    }
}

/// Log-probabilities of a prompt's tokens.
pub(super) struct PromptLogprobs {
    /// Alternatives per token.
    pub top: usize,
    pub tokens: Vec<PromptToken>,
}

/// A stream that owns a slot.
pub(super) struct Stream {
    pub id: StreamId,
    pub slot: usize,
    pub prompt: Vec<u32>,
    /// Prompt tokens committed.
    pub prefilled: usize,
    /// Prompt tokens up to which it is read by passes of their own.
    pub long_until: usize,
    /// Lengths at which the prompt is still to be saved, rising.
    pub saves: Vec<usize>,
    /// Prefixes that it saved, to be forgotten when it fails.
    pub saved: Vec<PrefixKey>,
    /// Last emitted token, in no state yet; `None` until the prompt is committed.
    pub root: Option<u32>,
    /// Most tokens to emit: `max_tokens`, or what the context leaves.
    pub limit: usize,
    pub picker: Picker,
    /// The prompt's log-probabilities so far, until they are told.
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub speculation: Speculation,
    pub report_rounds: bool,
    pub deadline: Option<Instant>,
    pub output: Output,
    /// `None` when the stream never drafts.
    pub features: Option<PendingFeatures>,
    pub tuning: StreamTuning,
    /// Prompt and emitted tokens, where `auto` looks drafts up.
    pub history: History,
    pub stats: StreamStats,
    pub submitted: Instant,
}

impl Stream {
    /// Position of the root: the number of committed tokens.
    pub fn start(&self) -> usize {
        self.prompt.len() + self.stats.completion_tokens - 1
    }

    /// True when nothing but the best token of every row of the target is looked at.
    pub fn only_best(&self) -> bool {
        self.picker.only_best() && self.prompt_logprobs.is_none()
    }

    /// Tokens that may still be emitted.
    pub fn left(&self) -> usize {
        self.limit - self.stats.completion_tokens
    }

    /// Prompt tokens not committed yet.
    pub fn unread(&self) -> usize {
        self.prompt.len() - self.prefilled
    }

    /// Prompt tokens that a round may read: none beyond the next length to save.
    pub fn readable(&self) -> usize {
        self.saves.first().map_or(self.unread(), |point| point - self.prefilled)
    }

    /// Deepest useful draft: a round emits one token more than its depth.
    pub fn useful_depth(&self, block_size: usize) -> usize {
        block_size.saturating_sub(1).min(self.left().saturating_sub(1))
    }

    /// Counters at the end.
    pub fn final_stats(&mut self) -> StreamStats {
        self.stats.total = self.submitted.elapsed().as_secs_f64();
        std::mem::take(&mut self.stats)
    }
}
