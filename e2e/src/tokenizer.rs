//! Tokens, chat template, incremental detokenisation.

mod chat;
mod detokenizer;

use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::decoders::DecoderWrapper;

use crate::chat::ChatInput;
use crate::constrain::TokenBytes;
use crate::files::ModelFiles;
use crate::{Error, Result};
use chat::ChatTemplate;
pub use detokenizer::Detokenizer;
use detokenizer::Vocabulary;

/// One chat turn.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Text.
    pub content: String,
}

#[derive(Debug)]
struct Inner {
    tokenizer: tokenizers::Tokenizer,
    vocabulary: Arc<Vocabulary>,
    template: Option<ChatTemplate>,
    stop_tokens: Vec<u32>,
}

/// A model's tokenizer with its chat template and stop tokens. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and where present `tokenizer_config.json` and `chat_template.jinja`. Generation
    /// stops on `eos_token_ids` and on the tokenizer's own `eos_token`.
    ///
    /// # Errors
    /// [`Error::Io`] without a `tokenizer.json`; [`Error::Tokenizer`] naming what is wrong.
    pub fn load(files: &ModelFiles, eos_token_ids: &[u32]) -> Result<Self> {
        let wrong = |file: &str, message: String| {
            Error::Tokenizer(format!("{}: {message}", files.path(file).display()))
        };
        let tokenizer = tokenizers::Tokenizer::from_bytes(files.require("tokenizer.json")?)
            .map_err(|source| wrong("tokenizer.json", source.to_string()))?;
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(wrong(
                "tokenizer.json",
                "decoder: expected ByteLevel (Qwen3.5's), got another".into(),
            ));
        }
        let config = match files.read("tokenizer_config.json")? {
            None => Map::new(),
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|source| {
                wrong("tokenizer_config.json", format!("expected an object, got {source}"))
            })?,
        };
        let template = match files.read("chat_template.jinja")? {
            Some(bytes) => Some(
                String::from_utf8(bytes.into_owned())
                    .map_err(|_| wrong("chat_template.jinja", "expected UTF-8".into()))?,
            ),
            None => chat::template_of(&config).map(str::to_owned),
        };
        let template = template.map(|source| ChatTemplate::new(source, &config)).transpose()?;
        let mut stop_tokens = eos_token_ids.to_vec();
        if let Some(eos) = special_token(&config, "eos_token") {
            let id = tokenizer.token_to_id(eos);
            stop_tokens.push(id.ok_or_else(|| {
                wrong(
                    "tokenizer_config.json",
                    format!("eos_token: expected a token of the vocabulary, got {eos}"),
                )
            })?);
        }
        crate::config::target::dedup(&mut stop_tokens);
        let vocabulary = Arc::new(Vocabulary::new(&tokenizer));
        Ok(Self { inner: Arc::new(Inner { tokenizer, vocabulary, template, stop_tokens }) })
    }

    /// Token ids of `text`; special tokens in the text are recognised, none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.tokenizer.encode_fast(text, false);
        Ok(encoding.map_err(|source| Error::Tokenizer(source.to_string()))?.get_ids().to_vec())
    }

    /// Text of `ids`, special tokens and unknown ids left out, a character cut short at the end too. Bytes that
    /// no character has become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut detokenizer = self.detokenizer();
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        Ok(text)
    }

    /// The text that `id` stands for in a list of tokens: special tokens by their names, others lossily.
    pub fn token_text(&self, id: u32) -> String {
        self.inner.vocabulary.name(id)
    }

    /// Renders the chat template with the generation prompt added.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when there is no template or the template refuses the messages.
    pub fn chat_prompt(&self, messages: &[ChatMessage]) -> Result<String> {
        self.chat_prompt_with(messages, &Map::new())
    }

    /// As [`Self::chat_prompt`], with further template variables such as `enable_thinking`.
    pub fn chat_prompt_with(
        &self,
        messages: &[ChatMessage],
        variables: &Map<String, Value>,
    ) -> Result<String> {
        let messages = messages.iter().map(|message| serde_json::json!(message)).collect();
        let input = ChatInput { messages, tools: Vec::new(), variables: variables.clone() };
        self.render_chat(&input, true)
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when there is no template or the template refuses the conversation.
    pub fn render_chat(&self, input: &ChatInput, add_generation_prompt: bool) -> Result<String> {
        match &self.inner.template {
            Some(template) => template.render(input, add_generation_prompt),
            None => Err(Error::Tokenizer("the model has no chat template".into())),
        }
    }

    /// True when the chat template takes `name` from outside. False without a template.
    pub fn template_takes(&self, name: &str) -> bool {
        self.inner.template.as_ref().is_some_and(|template| template.variables().contains(name))
    }

    /// True when there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.inner.template.is_some()
    }

    /// Tokens that end a generation.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.inner.stop_tokens
    }

    /// One past the highest token id, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocabulary.len()
    }

    /// What one token stands for.
    pub fn bytes_of(&self, id: u32) -> TokenBytes {
        self.inner.vocabulary.token_bytes(id)
    }

    /// What every token stands for, by id.
    pub fn token_bytes(&self) -> Vec<TokenBytes> {
        (0..self.vocab_size() as u32).map(|id| self.inner.vocabulary.token_bytes(id)).collect()
    }

    /// A detokeniser for one stream.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(self.inner.vocabulary.clone())
    }
}

/// A special token of `tokenizer_config.json`, given as a string or as an object with `content`.
fn special_token<'c>(config: &'c Map<String, Value>, key: &str) -> Option<&'c str> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}
