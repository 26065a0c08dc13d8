//! Tokens, chat template, incremental detokenisation.

use crate::{Error, Result};

/// One chat turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Text.
    pub content: String,
}

/// A model's tokenizer with its chat template and stop tokens.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    _private: (),
}

impl Tokenizer {
    /// Token ids of `text`; special tokens in the text are recognised, none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let _ = text;
        unimplemented!()
    }

    /// Text of `ids`, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let _ = ids;
        unimplemented!()
    }

    /// Renders the chat template with the generation prompt added.
    pub fn chat_prompt(&self, messages: &[ChatMessage]) -> Result<String> {
        let _ = messages;
        Err(Error::Tokenizer("the model has no chat template".into()))
    }

    /// Tokens that end a generation.
    pub fn stop_tokens(&self) -> &[u32] {
        unimplemented!()
    }

    /// A detokeniser for one stream.
    pub fn detokenizer(&self) -> Detokenizer<'_> {
        Detokenizer { tokenizer: self }
    }
}

/// Turns a stream of tokens into text, whole characters at a time.
#[derive(Debug)]
pub struct Detokenizer<'a> {
    #[allow(dead_code)]
    tokenizer: &'a Tokenizer,
}
