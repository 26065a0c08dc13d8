//! Where the engine gets text from: a trait, so that a toy vocabulary can drive it in tests.

use std::sync::Arc;

use crate::constrain::TokenBytes;
use crate::tokenizer::{Detokenizer, Tokenizer};

/// Text of one stream's tokens, whole characters at a time.
pub trait TextDecoder: Send {
    /// The characters that `token` completes; empty while one is open.
    fn push(&mut self, token: u32) -> String;
    /// Ends the text and gives what is left of it; an open character is dropped.
    fn finish(&mut self) -> String;
}

/// A vocabulary as the engine needs it.
pub trait TokenText: Send + Sync {
    /// Tokens that end a generation.
    fn stop_tokens(&self) -> &[u32];
    /// A decoder for one stream.
    fn decoder(self: Arc<Self>) -> Box<dyn TextDecoder>;
    /// What every token stands for, by id; constrained decoding needs it.
    fn token_bytes(&self) -> Option<Vec<TokenBytes>> {
        None
    }
}

impl TextDecoder for Detokenizer {
    fn push(&mut self, token: u32) -> String {
        Detokenizer::push(self, token)
    }

    fn finish(&mut self) -> String {
        Detokenizer::finish(self)
    }
}

impl TokenText for Tokenizer {
    fn stop_tokens(&self) -> &[u32] {
        Tokenizer::stop_tokens(self)
    }

    fn decoder(self: Arc<Self>) -> Box<dyn TextDecoder> {
        Box::new(self.detokenizer())
    }

    fn token_bytes(&self) -> Option<Vec<TokenBytes>> {
        Some(Tokenizer::token_bytes(self))
    }
}

/// A vocabulary without words: token ids as numbers, a space before each. No token ends a text.
#[derive(Clone, Copy, Debug)]
pub struct TokenIds;

impl TokenText for TokenIds {
    fn stop_tokens(&self) -> &[u32] {
        &[]
    }

    fn decoder(self: Arc<Self>) -> Box<dyn TextDecoder> {
        Box::new(Self)
    }
}

impl TextDecoder for TokenIds {
    fn push(&mut self, token: u32) -> String {
        format!(" {token}")
    }

    fn finish(&mut self) -> String {
        String::new()
    }
}
