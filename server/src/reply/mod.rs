//! The answers' wire format: whole bodies and stream events of both endpoints.

mod choice;
mod logprobs;
mod rounds;

use canopy_e2e::engine::{FinishReason, StreamStats};
use serde::Serialize;
use serde_json::Value;

use crate::engine_thread::{ModelInfo, Update};
use crate::plan::Plan;
use crate::types::answer::{
    Answer, ChatChoice, ChatDelta, CompletionChoice, CompletionDetails, Delta, Message, PromptDetails, Usage,
};
use crate::types::canopy::{Canopy, CanopyEnd};
use choice::{Choice, Step};
use logprobs::Place;

const FINGERPRINT: &str = concat!("canopy-", env!("CARGO_PKG_VERSION"));

/// Which endpoint's shape an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// One server-sent event's JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A chunk as OpenAI has it.
    Chunk(String),
    /// A chunk without choices that tells a round, sent as event `canopy`.
    Round(String),
}

/// What an answer is made from.
#[derive(Clone, Debug)]
pub struct ReplyStart {
    /// Which endpoint.
    pub shape: Shape,
    /// Names the answer.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The served model.
    pub model: ModelInfo,
    /// What was asked for.
    pub plan: Plan,
    /// Whether the prompt opened `<think>`.
    pub thinking: bool,
    /// Tools whose calls are read out of the text.
    pub tools: Vec<Value>,
    /// Of every prompt: its text, when the answers start with it.
    pub echoes: Vec<Option<String>>,
}

/// Turns the updates of a request's streams into its answer.
#[derive(Debug)]
pub struct Reply {
    start: ReplyStart,
    choices: Vec<Choice>,
}

impl Reply {
    /// An answer without text.
    pub fn new(start: ReplyStart) -> Self {
        let choice = |index| Choice::new(index, &start);
        Self { choices: (0..start.echoes.len() * start.plan.choices).map(choice).collect(), start }
    }

    /// The first chunks of a streamed chat answer: the roles.
    pub fn opening(&self) -> Vec<Piece> {
        let role = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
        let choices = if self.start.shape == Shape::Chat { self.choices.len() } else { 0 };
        (0..choices).map(|index| self.chat_chunk(index, role.clone(), None, None, None)).collect()
    }

    /// The events of one update of one choice.
    pub fn step(&mut self, index: usize, update: &Update) -> Vec<Piece> {
        let step = self.choices[index].take(&self.start, update);
        let mut pieces = Vec::with_capacity(2);
        if let Some(round) = self.choices[index].steps.pop() {
            pieces.push(Piece::Round(json(
                &self.answer::<CompletionChoice>(Vec::new(), Some(Canopy::Step(round))),
            )));
        }
        if !step.is_silent() {
            pieces.push(self.chunk(index, step, None, None));
        }
        pieces
    }

    /// The chunks at a choice's end: held-back text, the finish reason, statistics.
    pub fn end(&mut self, index: usize, reason: FinishReason, stats: &StreamStats) -> Vec<Piece> {
        let rest = self.choices[index].finish(reason, stats);
        let mut pieces = Vec::with_capacity(2);
        if !rest.is_silent() {
            pieces.push(self.chunk(index, rest, None, None));
        }
        let stats = self.start.plan.canopy.stats.then(|| {
            let stats = Some(rounds::stats(&self.start.plan, &self.choices[index..=index]));
            Canopy::End(CanopyEnd { stats, round_reports: None })
        });
        let finish = Some(self.choices[index].finish_reason());
        pieces.push(self.chunk(index, Step::default(), finish, stats));
        pieces
    }

    /// True when this choice has ended.
    pub fn choice_ended(&self, index: usize) -> bool {
        self.choices[index].ended()
    }

    /// True when every choice has ended.
    pub fn ended(&self) -> bool {
        self.choices.iter().all(Choice::ended)
    }

    /// The chunk after the last choice's end: the usage, when asked for.
    pub fn closing(&self) -> Option<Piece> {
        self.start.plan.include_usage.then(|| {
            let mut chunk = self.answer::<CompletionChoice>(Vec::new(), None);
            chunk.usage = Some(Some(self.usage()));
            Piece::Chunk(json(&chunk))
        })
    }

    /// Keeps one update of one choice for the whole body.
    pub fn keep(&mut self, index: usize, update: &Update) {
        let step = self.choices[index].take(&self.start, update);
        self.choices[index].keep(step);
    }

    /// Keeps a choice's end for the whole body.
    pub fn keep_end(&mut self, index: usize, reason: FinishReason, stats: &StreamStats) {
        let rest = self.choices[index].finish(reason, stats);
        self.choices[index].keep(rest);
    }

    /// The whole body of an answer that is not streamed.
    pub fn whole(mut self) -> String {
        let options = self.start.plan.canopy;
        let canopy = (options.stats || options.rounds).then(|| {
            let stats = options.stats.then(|| rounds::stats(&self.start.plan, &self.choices));
            let reports =
                self.choices.iter_mut().flat_map(|choice| std::mem::take(&mut choice.steps)).collect();
            Canopy::End(CanopyEnd { stats, round_reports: options.rounds.then_some(reports) })
        });
        let usage = Some(Some(self.usage()));
        let choices = std::mem::take(&mut self.choices);
        match self.start.shape {
            Shape::Completion => {
                let choices = choices.into_iter().map(|choice| choice.completion(&self.start)).collect();
                json(&Answer { usage, ..self.answer::<CompletionChoice>(choices, canopy) })
            }
            Shape::Chat => {
                let choices = choices.into_iter().map(|choice| choice.message(&self.start)).collect();
                json(&Answer { usage, ..self.answer::<ChatChoice>(choices, canopy) })
            }
        }
    }

    fn usage(&self) -> Usage {
        let sum = |choices: &mut dyn Iterator<Item = &Choice>, count: fn(&StreamStats) -> usize| {
            choices.map(|choice| count(&choice.stats)).sum::<usize>()
        };
        // A prompt counts once, however many answers it gets.
        let firsts = || self.choices.iter().step_by(self.start.plan.choices);
        let prompt_tokens = sum(&mut firsts(), |stats| stats.prompt_tokens);
        let completion_tokens = sum(&mut self.choices.iter(), |stats| stats.completion_tokens);
        let cached_tokens = sum(&mut firsts(), |stats| stats.cached_tokens);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
            completion_tokens_details: self.completion_details(),
        }
    }

    fn completion_details(&self) -> CompletionDetails {
        let sum = |count: fn(&Choice) -> usize| self.choices.iter().map(count).sum::<usize>();
        let accepted = sum(|choice| choice.drafted);
        CompletionDetails {
            reasoning_tokens: sum(|choice| choice.thought.count()),
            accepted_prediction_tokens: accepted,
            rejected_prediction_tokens: sum(Choice::verified_drafts).saturating_sub(accepted),
        }
    }

    fn object(&self, is_chunk: bool) -> &'static str {
        match (self.start.shape, is_chunk) {
            (Shape::Completion, _) => "text_completion",
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
        }
    }

    fn answer<C>(&self, choices: Vec<C>, canopy: Option<Canopy>) -> Answer<C> {
        let ReplyStart { id, created, model, plan, .. } = &self.start;
        Answer {
            id: id.clone(),
            object: self.object(plan.stream),
            created: *created,
            model: model.name.clone(),
            system_fingerprint: FINGERPRINT,
            choices,
            usage: plan.include_usage.then_some(None),
            canopy,
        }
    }

    fn chunk(
        &self,
        index: usize,
        step: Step,
        finish_reason: Option<&'static str>,
        canopy: Option<Canopy>,
    ) -> Piece {
        if self.start.shape == Shape::Chat {
            let some = |text: String| (!text.is_empty()).then_some(text);
            let delta = Delta {
                role: None,
                content: some(step.content),
                reasoning_content: some(step.reasoning),
                tool_calls: step.calls,
            };
            let logprobs = step.tokens.map(|tokens| logprobs::chat(&self.start.model.tokenizer, &tokens));
            return self.chat_chunk(index, delta, logprobs, finish_reason, canopy);
        }
        let choice = CompletionChoice { index, text: step.content, logprobs: step.logprobs, finish_reason };
        Piece::Chunk(json(&self.answer(vec![choice], canopy)))
    }

    fn chat_chunk(
        &self,
        index: usize,
        delta: Delta,
        logprobs: Option<crate::types::answer::ChatLogprobs>,
        finish_reason: Option<&'static str>,
        canopy: Option<Canopy>,
    ) -> Piece {
        Piece::Chunk(json(&self.answer(vec![ChatDelta { index, delta, logprobs, finish_reason }], canopy)))
    }
}

impl Choice {
    fn completion(self, start: &ReplyStart) -> CompletionChoice {
        let finish_reason = Some(self.finish_reason());
        let logprobs = start.plan.request.logprobs.map(|_| {
            let tokenizer = &start.model.tokenizer;
            let mut place = Place::new(tokenizer);
            logprobs::completion(tokenizer, &self.content, &self.kept_prompt, &self.kept_tokens, &mut place)
        });
        let text = self.content;
        CompletionChoice { index: self.index, text, logprobs, finish_reason }
    }

    fn message(self, start: &ReplyStart) -> ChatChoice {
        let finish_reason = Some(self.finish_reason());
        let tokenizer = &start.model.tokenizer;
        let logprobs = start.plan.request.logprobs.map(|_| logprobs::chat(tokenizer, &self.kept_tokens));
        let message = Message {
            role: "assistant",
            content: (self.calls.is_empty() || !self.content.is_empty()).then_some(self.content),
            refusal: (),
            reasoning_content: self.reasoning,
            tool_calls: self.calls,
        };
        ChatChoice { index: self.index, message, logprobs, finish_reason }
    }
}

/// JSON text of a wire type, which has no map with other keys than strings and so cannot fail.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
