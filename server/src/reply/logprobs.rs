//! Log-probabilities in both endpoints' shapes.

use canopy_e2e::engine::{EmittedToken, PromptToken};
use canopy_e2e::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::types::answer::{ChatLogprob, ChatLogprobs, CompletionLogprobs, TokenLogprob};

/// A completion's, prompt first. `offset` is where the first token starts, and is moved on.
pub(super) fn completion(
    tokenizer: &Tokenizer,
    prompt: &[PromptToken],
    tokens: &[EmittedToken],
    offset: &mut usize,
) -> CompletionLogprobs {
    let prompt = prompt.iter().map(|token| (token.id, token.logprob, &token.top));
    let tokens = tokens.iter().map(|token| (token.id, token.logprob, &token.top));
    let mut all = CompletionLogprobs::default();
    for (id, logprob, top) in prompt.chain(tokens) {
        let text = tokenizer.token_text(id);
        all.text_offset.push(*offset);
        *offset += text.chars().count();
        all.tokens.push(text);
        all.token_logprobs.push(logprob);
        // Nothing predicts a prompt's first token.
        all.top_logprobs.push(logprob.map(|_| top_of(tokenizer, top)));
    }
    all
}

fn top_of(tokenizer: &Tokenizer, top: &[(u32, f32)]) -> Map<String, Value> {
    top.iter().map(|&(id, logprob)| (tokenizer.token_text(id), Value::from(logprob))).collect()
}

/// A chat answer's.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[EmittedToken]) -> ChatLogprobs {
    let one = |id, logprob| {
        let token = tokenizer.token_text(id);
        let bytes = (!token.contains('\u{fffd}')).then(|| token.as_bytes().to_vec());
        TokenLogprob { token, logprob, bytes }
    };
    let content = tokens
        .iter()
        .map(|token| ChatLogprob {
            token: one(token.id, token.logprob),
            top_logprobs: token.top.iter().map(|&(id, logprob)| one(id, Some(logprob))).collect(),
        })
        .collect();
    ChatLogprobs { content, refusal: () }
}
