//! One choice of an answer: what its stream has told so far.

use canopy_e2e::chat::{AnswerPart, ToolCallParser};
use canopy_e2e::engine::{EmittedToken, FinishReason, PromptToken, StreamStats, TokenOrigin};
use canopy_e2e::tokenizer::Detokenizer;

use super::logprobs::Place;
use super::{ReplyStart, Shape, logprobs, rounds};
use crate::engine_thread::Update;
use crate::reasoning::{ReasoningSplit, ThoughtTokens};
use crate::types::answer::{CompletionLogprobs, ToolCall, ToolFunction};
use crate::types::canopy::CanopyStep;

/// One of a request's answers: those to the first prompt come first.
#[derive(Debug)]
pub(super) struct Choice {
    pub index: usize,
    split: ReasoningSplit,
    pub thought: ThoughtTokens,
    /// Reads calls out of the content, when there are tools.
    parser: Option<ToolCallParser>,
    called: usize,
    id: String,
    pieces: Detokenizer,
    /// The prompt, until it is told.
    echo: Option<String>,
    place: Place,
    pub drafted: usize,
    pub bonus: usize,
    /// Rounds that are not told yet.
    pub steps: Vec<CanopyStep>,
    finish: Option<FinishReason>,
    pub stats: StreamStats,
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<ToolCall>,
    pub kept_prompt: Vec<PromptToken>,
    pub kept_tokens: Vec<EmittedToken>,
}

/// What one update adds.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<ToolCall>,
    pub prompt: Vec<PromptToken>,
    /// The tokens, when their log-probabilities were asked for.
    pub tokens: Option<Vec<EmittedToken>>,
    /// The same as a completion's chunk has them.
    pub logprobs: Option<CompletionLogprobs>,
}

impl Step {
    /// True when there is nothing to tell.
    pub fn is_silent(&self) -> bool {
        self.reasoning.is_empty()
            && self.content.is_empty()
            && self.calls.is_empty()
            && self.tokens.is_none()
            && self.logprobs.is_none()
    }
}

impl Choice {
    pub fn new(index: usize, start: &ReplyStart) -> Self {
        Self {
            index,
            split: ReasoningSplit::new(start.thinking),
            thought: ThoughtTokens::new(start.thinking),
            parser: (!start.tools.is_empty()).then(|| ToolCallParser::new(&start.tools)),
            called: 0,
            id: format!("{}-{index}", start.id),
            pieces: start.model.tokenizer.detokenizer(),
            echo: start.echoes.get(index / start.plan.choices).cloned().flatten(),
            place: Place::new(&start.model.tokenizer),
            drafted: 0,
            bonus: 0,
            steps: Vec::new(),
            finish: None,
            stats: StreamStats::default(),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
            kept_prompt: Vec::new(),
            kept_tokens: Vec::new(),
        }
    }

    /// Takes an update in.
    pub fn take(&mut self, start: &ReplyStart, update: &Update) -> Step {
        let parts = self.split.push(&update.text);
        let drafted = update.tokens.iter().filter(|token| token.origin == TokenOrigin::Drafted).count();
        self.drafted += drafted;
        self.bonus += update.tokens.len() - drafted;
        for token in &update.tokens {
            self.thought.push(|| start.model.tokenizer.token_text(token.id));
        }
        if start.plan.canopy.rounds && (!update.tokens.is_empty() || update.round.is_some()) {
            let step = rounds::step(self.index, &start.model.tokenizer, &mut self.pieces, update);
            self.steps.push(step);
        }
        let (content, calls) = self.parted(parts.content, false);
        let mut step = Step { reasoning: parts.reasoning, content, calls, ..Step::default() };
        let told = !update.tokens.is_empty() || !update.prompt.is_empty();
        if let Some(echo) = self.echo.take_if(|_| told) {
            step.content.insert_str(0, &echo);
        }
        if start.plan.request.logprobs.is_some() && told {
            if start.plan.stream && start.shape == Shape::Completion {
                let (tokenizer, place) = (&start.model.tokenizer, &mut self.place);
                let (prompt, tokens) = (&update.prompt, &update.tokens);
                step.logprobs = Some(logprobs::completion(tokenizer, &step.content, prompt, tokens, place));
            } else {
                step.prompt.clone_from(&update.prompt);
                step.tokens = Some(update.tokens.clone());
            }
        }
        step
    }

    /// Ends the choice and releases what was held back.
    pub fn finish(&mut self, reason: FinishReason, stats: &StreamStats) -> Step {
        self.finish = Some(reason);
        self.stats = stats.clone();
        let rest = self.split.finish();
        let (content, calls) = self.parted(rest.content, true);
        let content = self.echo.take().unwrap_or_default() + &content;
        Step { reasoning: rest.reasoning, content, calls, ..Step::default() }
    }

    /// The calls taken out of the content.
    fn parted(&mut self, content: String, is_end: bool) -> (String, Vec<ToolCall>) {
        let Some(parser) = &mut self.parser else { return (content, Vec::new()) };
        let mut parts = parser.push(&content);
        if is_end {
            parts.extend(parser.finish());
        }
        let (mut content, mut calls) = (String::new(), Vec::new());
        for part in parts {
            match part {
                AnswerPart::Content(text) => content.push_str(&text),
                AnswerPart::Call { name, arguments } => {
                    let (index, function) = (self.called, ToolFunction { name, arguments });
                    let id = format!("call-{}-{index}", self.id);
                    calls.push(ToolCall { index, id, kind: "function", function });
                    self.called += 1;
                }
            }
        }
        (content, calls)
    }

    /// Keeps what a step added for the whole body.
    pub fn keep(&mut self, step: Step) {
        self.reasoning.push_str(&step.reasoning);
        self.content.push_str(&step.content);
        self.calls.extend(step.calls);
        self.kept_prompt.extend(step.prompt);
        self.kept_tokens.extend(step.tokens.unwrap_or_default());
    }

    /// Drafted tokens that the target verified: the nodes of every round but its root.
    pub fn verified_drafts(&self) -> usize {
        self.stats.nodes.saturating_sub(self.stats.rounds)
    }

    pub fn ended(&self) -> bool {
        self.finish.is_some()
    }

    pub fn finish_reason(&self) -> &'static str {
        match self.finish {
            Some(FinishReason::Length) => "length",
            Some(FinishReason::Cancelled) => "cancelled",
            Some(FinishReason::TimedOut) => "timeout",
            Some(FinishReason::Stop) | None if self.called > 0 => "tool_calls",
            Some(FinishReason::Stop) | None => "stop",
        }
    }
}
