//! Blocking helpers over `submit` and `step`.

use std::collections::{HashMap, VecDeque};

use super::{
    EmittedToken, Engine, Event, FinishReason, GenerateRequest, PromptToken, RoundReport, StreamStats,
};
use crate::{Error, Result};

/// One finished generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The text, cut before the stop string if one ended it.
    pub text: String,
    /// Every token of the prompt, when its log-probabilities were asked for.
    pub prompt: Vec<PromptToken>,
    /// Every emitted token.
    pub tokens: Vec<EmittedToken>,
    /// Every round, when asked for.
    pub rounds: Vec<RoundReport>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Counters.
    pub stats: StreamStats,
}

#[derive(Default)]
struct Partial {
    text: String,
    prompt: Vec<PromptToken>,
    tokens: Vec<EmittedToken>,
    rounds: Vec<RoundReport>,
}

impl Partial {
    /// The finished generation, when `event` ends it.
    fn take(&mut self, event: Event) -> Option<Result<Generation>> {
        match event {
            Event::Text { text, tokens } => {
                self.text.push_str(&text);
                self.tokens.extend(tokens);
            }
            Event::Prompt(tokens) => self.prompt = tokens,
            Event::Round(report) => self.rounds.push(report),
            Event::Failed(error) => return Some(Err(error)),
            Event::Done { reason, stats } => {
                let Self { text, prompt, tokens, rounds } = std::mem::take(self);
                return Some(Ok(Generation { text, prompt, tokens, rounds, reason, stats }));
            }
        }
        None
    }
}

impl Engine {
    /// Runs one request to its end. Other streams move on meanwhile; the next step reports their events.
    ///
    /// # Errors
    /// Those of [`Engine::submit`], or what ended the stream.
    pub fn run(&mut self, request: GenerateRequest) -> Result<Generation> {
        self.run_all(vec![request])?.pop().unwrap_or_else(|| Err(Error::Round("no stream was run".into())))
    }

    /// Runs requests to their ends, as many at once as there are slots. Results in the order of the requests.
    ///
    /// # Errors
    /// Those of [`Engine::step`]; what ends one request alone is its entry.
    pub fn run_all(&mut self, requests: Vec<GenerateRequest>) -> Result<Vec<Result<Generation>>> {
        let mut results: Vec<Option<Result<Generation>>> = requests.iter().map(|_| None).collect();
        let mut todo: VecDeque<_> = requests.into_iter().enumerate().collect();
        let (mut open, mut others) = (HashMap::new(), Vec::new());
        while !todo.is_empty() || !open.is_empty() {
            while let Some((index, request)) = todo.pop_front() {
                match self.submit(request.clone()) {
                    Ok(id) => _ = open.insert(id, (index, Partial::default())),
                    Err(Error::Full { .. }) if self.load() != (0, 0) => {
                        todo.push_front((index, request));
                        break;
                    }
                    Err(error) => results[index] = Some(Err(error)),
                }
            }
            for (id, event) in self.step()? {
                let Some((index, partial)) = open.get_mut(&id) else {
                    others.push((id, event));
                    continue;
                };
                if let Some(result) = partial.take(event) {
                    results[*index] = Some(result);
                    open.remove(&id);
                }
            }
        }
        self.events.splice(0..0, others);
        Ok(results.into_iter().flatten().collect())
    }
}
