//! Log-probabilities in both endpoints' shapes.

use std::fmt::Write as _;

use canopy_e2e::constrain::TokenBytes;
use canopy_e2e::engine::{EmittedToken, PromptToken};
use canopy_e2e::tokenizer::{Detokenizer, Tokenizer};
use serde_json::{Map, Value};

use crate::types::answer::{ChatLogprob, ChatLogprobs, CompletionLogprobs, TokenLogprob};

/// Where in a completion's text the next token starts.
#[derive(Debug)]
pub(super) struct Place {
    characters: usize,
    /// Holds the bytes of a character that several tokens share, which all start where it does.
    pieces: Detokenizer,
}

impl Place {
    /// The start of a text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { characters: 0, pieces: tokenizer.detokenizer() }
    }

    /// Moves on past a token; `written` is its name where the text has that, as an echoed prompt may.
    fn pass(&mut self, id: u32, written: Option<&str>) {
        let text = self.pieces.push(id);
        self.characters += written.unwrap_or(&text).chars().count();
    }
}

/// A completion's, prompt first, whose text is `echo` where the answer starts with it. `place` is where the first token
/// starts, and is moved on.
pub(super) fn completion(
    tokenizer: &Tokenizer,
    echo: &str,
    prompt: &[PromptToken],
    tokens: &[EmittedToken],
    place: &mut Place,
) -> CompletionLogprobs {
    let prompt = prompt.iter().map(|token| (token.id, token.logprob, &token.top));
    let told = prompt.len();
    let tokens = tokens.iter().map(|token| (token.id, token.logprob, &token.top));
    let mut all = CompletionLogprobs::default();
    let mut rest = echo.chars();
    for (at, (id, logprob, top)) in prompt.chain(tokens).enumerate() {
        let start = place.characters;
        let special = match tokenizer.bytes_of(id) {
            TokenBytes::Special(name) if at < told && rest.as_str().starts_with(&name) => Some(name),
            _ => None,
        };
        place.pass(id, special.as_deref());
        if place.characters > start {
            rest.nth(place.characters - start - 1);
        }
        all.text_offset.push(start);
        all.tokens.push(name(tokenizer, id));
        all.token_logprobs.push(logprob);
        // Nothing predicts a prompt's first token.
        all.top_logprobs.push(logprob.map(|_| top_of(tokenizer, top)));
    }
    all
}

/// A token's text, or where that is no whole character its bytes, as OpenAI spells them: other tokens have other names.
fn name(tokenizer: &Tokenizer, id: u32) -> String {
    match tokenizer.bytes_of(id) {
        TokenBytes::Text(bytes) => String::from_utf8(bytes).unwrap_or_else(|error| {
            let mut name = String::from("bytes:");
            for byte in error.as_bytes() {
                // Writing to a string does not fail.
                let _ = write!(name, "\\x{byte:02x}");
            }
            name
        }),
        _ => tokenizer.token_text(id),
    }
}

fn top_of(tokenizer: &Tokenizer, top: &[(u32, f32)]) -> Map<String, Value> {
    top.iter().map(|&(id, logprob)| (name(tokenizer, id), Value::from(logprob))).collect()
}

/// A chat answer's.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[EmittedToken]) -> ChatLogprobs {
    let one = |id, logprob| {
        let token = tokenizer.token_text(id);
        let bytes = match tokenizer.bytes_of(id) {
            TokenBytes::Text(bytes) => bytes,
            _ => token.as_bytes().to_vec(),
        };
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
