//! A conversation as the model's chat template takes it.

use serde_json::{Map, Value};

use crate::Result;
use crate::tokenizer::Tokenizer;

/// What opens a thought that a prompt leaves open.
const THINK: &str = "<think>";

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatInput {
    /// Messages as objects: `role`, `content`, and what the template knows besides, such as `tool_calls` and
    /// `reasoning_content`.
    pub messages: Vec<Value>,
    /// Tools as objects, in OpenAI's form; the template shows them to the model.
    pub tools: Vec<Value>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatPrompt {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Tokens up to where the template asks for the answer: what the next turn's prompt starts with too. For
    /// [`GenerateRequest::save_at`](crate::engine::GenerateRequest::save_at).
    pub save_at: Option<usize>,
    /// The prompt ends inside a thought.
    pub thinking: bool,
}

impl Tokenizer {
    /// Renders and encodes a conversation with the generation prompt added.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::Error::Tokenizer) when there is no template or it refuses the conversation.
    pub fn chat(&self, input: &ChatInput) -> Result<ChatPrompt> {
        let text = self.render_chat(input, true)?;
        let tokens = self.encode(&text)?;
        let turns = self.encode(&self.render_chat(input, false)?)?;
        let common = turns.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let save_at = (0 < common && common < tokens.len()).then_some(common);
        let thinking = text.trim_end().ends_with(THINK);
        Ok(ChatPrompt { text, tokens, save_at, thinking })
    }
}
