//! What is asked of the engine, and every check it must pass before it is queued.

use std::fmt::{self, Display};
use std::time::Instant;

use canopy_kernels::DraftTree;

use super::rules::{Constraint, Penalties, Reasoning};
pub use crate::sampling::Sampling;
use crate::{Error, Result};

/// How a stream is decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One token a round, no drafter.
    Ar,
    /// The drafter's top-1 chain.
    Chain,
    /// A DDTree of `budget` nodes.
    Tree,
    /// Budget and shape chosen from measured round cost and running acceptance; may be 0. Without a drafter: `Ar`.
    #[default]
    Auto,
}

impl Mode {
    /// Every mode, in the order in which they are compared.
    pub const ALL: [Self; 4] = [Self::Ar, Self::Chain, Self::Tree, Self::Auto];

    /// The name in command lines, requests and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ar => "ar",
            Self::Chain => "chain",
            Self::Tree => "tree",
            Self::Auto => "auto",
        }
    }
}

impl Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Mode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| refuse("mode", "ar, chain, tree or auto", name))
    }
}

/// Speculation of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// How the stream is decoded.
    pub mode: Mode,
    /// Most non-root nodes of a round; `None` takes the mode's default. 0 drafts nothing.
    pub budget: Option<usize>,
}

/// One generation.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Most generated tokens, at least 1. The context's end may come first.
    pub max_tokens: usize,
    /// Stop strings; the one that completes earliest in the text wins and is cut from it.
    pub stop: Vec<String>,
    /// Tokens that end the generation besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// No stop token may be chosen before this many tokens.
    pub min_tokens: usize,
    /// Go on past the model's own stop tokens.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Penalties on tokens that the text already has.
    pub penalties: Penalties,
    /// Added to these tokens' logits, after the penalties. Negative infinity forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// What the text must look like.
    pub constraint: Constraint,
    /// Set when the prompt ends inside a thought.
    pub reasoning: Option<Reasoning>,
    /// How the stream is decoded.
    pub speculation: Speculation,
    /// Log-probabilities of this many alternatives per emitted token; `None` = no log-probabilities. They are the
    /// target's own, before penalties, bias and constraint.
    pub logprobs: Option<usize>,
    /// The same for the prompt's tokens, told in [`Event::Prompt`](super::Event::Prompt) before the first token. Such a
    /// prompt is read whole.
    pub prompt_logprobs: Option<usize>,
    /// Report every round's tree and accepted path.
    pub report_rounds: bool,
    /// When the stream is ended with [`FinishReason::TimedOut`](super::FinishReason::TimedOut), between two rounds.
    pub deadline: Option<Instant>,
    /// Start from the longest saved prefix of the prompt, and save this prompt's.
    pub reuse_prefix: bool,
    /// A prefix of the prompt worth saving besides whole pages and the prompt's end: the number of tokens up to
    /// where the next turn of a conversation will start.
    pub save_at: Option<usize>,
}

impl GenerateRequest {
    /// A greedy generation of at most `max_tokens` tokens after `prompt`, everything else at its default.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            min_tokens: 0,
            ignore_eos: false,
            sampling: Sampling::default(),
            penalties: Penalties::default(),
            logit_bias: Vec::new(),
            constraint: Constraint::None,
            reasoning: None,
            speculation: Speculation::default(),
            logprobs: None,
            prompt_logprobs: None,
            report_rounds: false,
            deadline: None,
            reuse_prefix: true,
            save_at: None,
        }
    }

    /// True when something changes the target's rows before a token is drawn.
    pub(super) fn changes_rows(&self) -> bool {
        !self.penalties.is_off()
            || !self.logit_bias.is_empty()
            || self.constraint != Constraint::None
            || self.reasoning.is_some()
            || self.min_tokens > 0
    }
}

/// What requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub vocab: usize,
    pub context: usize,
    pub drafter: bool,
}

impl Limits {
    /// Checks everything a request can get wrong.
    ///
    /// # Errors
    /// [`Error::Request`] naming the field.
    pub fn check(&self, request: &GenerateRequest) -> Result<()> {
        self.check_prompt(&request.prompt)?;
        if request.max_tokens == 0 {
            return Err(refuse("max_tokens", "at least 1", 0));
        }
        self.check_sampling(&request.sampling)?;
        self.check_rules(request)?;
        self.check_speculation(&request.speculation)?;
        if request.stop.iter().any(String::is_empty) {
            return Err(refuse("stop", "strings of at least one character", "an empty string"));
        }
        if let Some(id) = request.stop_tokens.iter().find(|&&id| id as usize >= self.vocab) {
            return Err(refuse("stop_tokens", format!("ids below {}", self.vocab), id));
        }
        for (field, top) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            if let Some(top) = top.filter(|&top| top > self.vocab) {
                return Err(refuse(field, format!("at most {}", self.vocab), top));
            }
        }
        Ok(())
    }

    fn check_rules(&self, request: &GenerateRequest) -> Result<()> {
        let Penalties { repetition, presence, frequency } = request.penalties;
        if !(0.01..=100.0).contains(&repetition) {
            return Err(refuse("repetition_penalty", "0.01 to 100", repetition));
        }
        for (field, penalty) in [("presence_penalty", presence), ("frequency_penalty", frequency)] {
            if !(-2.0..=2.0).contains(&penalty) {
                return Err(refuse(field, "-2 to 2", penalty));
            }
        }
        for &(id, bias) in &request.logit_bias {
            if id as usize >= self.vocab {
                return Err(refuse("logit_bias", format!("ids below {}", self.vocab), id));
            }
            if !(-100.0..=100.0).contains(&bias) && bias != f32::NEG_INFINITY {
                return Err(refuse("logit_bias", "-100 to 100, or negative infinity", bias));
            }
        }
        if request.min_tokens > request.max_tokens {
            return Err(refuse(
                "min_tokens",
                format!("at most max_tokens = {}", request.max_tokens),
                request.min_tokens,
            ));
        }
        if request.ignore_eos && request.constraint != Constraint::None {
            return Err(refuse("ignore_eos", "false with a constraint, whose text ends", true));
        }
        match &request.reasoning {
            Some(Reasoning { end, .. }) if end.is_empty() => {
                Err(refuse("reasoning", "at least one token that ends the thought", "none"))
            }
            Some(Reasoning { end, .. }) => match end.iter().find(|&&id| id as usize >= self.vocab) {
                Some(id) => Err(refuse("reasoning", format!("token ids below {}", self.vocab), id)),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        let most = self.context.saturating_sub(1);
        if prompt.is_empty() {
            return Err(refuse("prompt", "at least one token", "none"));
        }
        if prompt.len() > most {
            let expected = format!("at most {most} tokens (a context of {}, one generated)", self.context);
            return Err(refuse("prompt", expected, format!("{} tokens", prompt.len())));
        }
        match prompt.iter().find(|&&id| id as usize >= self.vocab) {
            Some(id) => Err(refuse("prompt", format!("token ids below {}", self.vocab), id)),
            None => Ok(()),
        }
    }

    fn check_sampling(&self, sampling: &Sampling) -> Result<()> {
        let Sampling { temperature, top_p, min_p, .. } = *sampling;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(refuse("temperature", "a finite number of 0 or above", temperature));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(refuse("top_p", "above 0, at most 1", top_p));
        }
        if !(0.0..1.0).contains(&min_p) {
            return Err(refuse("min_p", "at least 0, below 1", min_p));
        }
        Ok(())
    }

    /// Checks a mode and its budget.
    pub fn check_speculation(&self, speculation: &Speculation) -> Result<()> {
        const MOST: usize = DraftTree::MAX_NODES - 1;
        if let Some(budget) = speculation.budget.filter(|&budget| budget > MOST) {
            return Err(refuse("budget", format!("at most {MOST}"), budget));
        }
        match speculation.mode {
            Mode::Chain | Mode::Tree if !self.drafter => {
                Err(refuse("mode", "ar or auto (no drafter is loaded)", speculation.mode))
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn refuse(field: &'static str, expected: impl Display, got: impl Display) -> Error {
    Error::Request { field, expected: expected.to_string(), got: got.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field that a request changed by `change` is refused for.
    fn refused(drafter: bool, change: impl FnOnce(&mut GenerateRequest)) -> Option<&'static str> {
        let mut request = GenerateRequest::new(vec![1, 2, 3], 4);
        change(&mut request);
        match (Limits { vocab: 10, context: 8, drafter }).check(&request) {
            Ok(()) => None,
            Err(Error::Request { field, .. }) => Some(field),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn every_bad_field_is_named() {
        assert_eq!(refused(true, |_| ()), None);
        assert_eq!(refused(true, |r| r.prompt.clear()), Some("prompt"));
        assert_eq!(refused(true, |r| r.prompt = vec![0; 7]), None);
        assert_eq!(refused(true, |r| r.prompt = vec![0; 8]), Some("prompt"));
        assert_eq!(refused(true, |r| r.prompt[1] = 10), Some("prompt"));
        assert_eq!(refused(true, |r| r.max_tokens = 0), Some("max_tokens"));
        for bad in [-0.1, f32::NAN, f32::INFINITY] {
            assert_eq!(refused(true, |r| r.sampling.temperature = bad), Some("temperature"));
        }
        for bad in [0.0, 1.1, -1.0, f32::NAN] {
            assert_eq!(refused(true, |r| r.sampling.top_p = bad), Some("top_p"));
        }
        for bad in [1.0, -0.1, f32::NAN] {
            assert_eq!(refused(true, |r| r.sampling.min_p = bad), Some("min_p"));
        }
        assert_eq!(refused(true, |r| r.speculation.budget = Some(255)), None);
        assert_eq!(refused(true, |r| r.speculation.budget = Some(256)), Some("budget"));
        assert_eq!(refused(true, |r| r.stop = vec!["a".into(), String::new()]), Some("stop"));
        assert_eq!(refused(true, |r| r.stop_tokens = vec![10]), Some("stop_tokens"));
        assert_eq!(refused(true, |r| r.logprobs = Some(11)), Some("logprobs"));
        assert_eq!(refused(true, |r| r.prompt_logprobs = Some(11)), Some("prompt_logprobs"));
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(refused(true, |r| r.penalties.repetition = bad), Some("repetition_penalty"));
        }
        assert_eq!(refused(true, |r| r.penalties.presence = 2.1), Some("presence_penalty"));
        assert_eq!(refused(true, |r| r.penalties.frequency = f32::NAN), Some("frequency_penalty"));
        for bad in [(10, 0.0), (1, 101.0), (1, f32::NAN), (1, f32::INFINITY)] {
            assert_eq!(refused(true, |r| r.logit_bias = vec![bad]), Some("logit_bias"));
        }
        assert_eq!(refused(true, |r| r.logit_bias = vec![(1, f32::NEG_INFINITY)]), None);
        assert_eq!(refused(true, |r| r.min_tokens = 5), Some("min_tokens"));
        assert_eq!(refused(true, |r| r.constraint = Constraint::JsonObject), None);
        let both = |r: &mut GenerateRequest| (r.constraint, r.ignore_eos) = (Constraint::JsonObject, true);
        assert_eq!(refused(true, both), Some("ignore_eos"));
        for end in [vec![], vec![10]] {
            let reasoning = Reasoning { end, budget: None };
            assert_eq!(refused(true, |r| r.reasoning = Some(reasoning)), Some("reasoning"));
        }
    }

    #[test]
    fn modes_that_need_a_drafter_are_refused_without_one() {
        for (mode, field) in
            [(Mode::Ar, None), (Mode::Auto, None), (Mode::Chain, Some("mode")), (Mode::Tree, Some("mode"))]
        {
            assert_eq!(refused(false, |r| r.speculation.mode = mode), field, "{mode}");
        }
    }

    #[test]
    fn mode_names_read_back() {
        for mode in Mode::ALL {
            assert_eq!(mode.name().parse::<Mode>().unwrap(), mode);
        }
        assert!("Tree".parse::<Mode>().is_err());
    }
}
