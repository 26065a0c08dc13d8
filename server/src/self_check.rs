//! The start-up self-check: one short generation in the mode that requests get by default, every value finite.

use canopy_e2e::engine::{Engine, GenerateRequest, Mode, Speculation};
use canopy_e2e::{Error, Result};

use crate::engine_thread::ModelInfo;

/// Generated tokens: more than one round.
const TOKENS: usize = 4;
const PROMPT: &str = "The quick brown fox";

/// Generates after a fixed prompt and returns the text.
///
/// # Errors
/// What ended the generation; [`Error::NonFinite`] when a log-probability is no number, as it is with broken weights.
pub fn run(engine: &mut Engine, model: &ModelInfo) -> Result<String> {
    let mut prompt = model.tokenizer.encode(PROMPT)?;
    prompt.truncate(model.context_len.saturating_sub(TOKENS).max(1));
    let position = prompt.len();
    let mode = if model.has_drafter { Mode::Tree } else { Mode::Ar };
    let request = GenerateRequest {
        ignore_eos: true,
        logprobs: Some(1),
        speculation: Speculation { mode, budget: None },
        reuse_prefix: false,
        ..GenerateRequest::new(prompt, TOKENS)
    };
    let generation = engine.run(request)?;
    let is_finite = |logprob: Option<f32>| logprob.is_some_and(|logprob| logprob.is_finite());
    match generation.tokens.iter().position(|token| !is_finite(token.logprob)) {
        None => Ok(generation.text),
        Some(at) => Err(Error::NonFinite { stream: 0, position: position + at }),
    }
}
