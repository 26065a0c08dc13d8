//! Byte-level BPE tokens to text, whole characters at a time.

use std::collections::HashMap;
use std::sync::Arc;

use crate::constrain::TokenBytes;

/// The bytes of every token.
#[derive(Debug)]
pub(super) struct Vocabulary {
    tokens: Vec<Token>,
}

#[derive(Clone, Debug)]
enum Token {
    /// No token has this id.
    Unknown,
    /// A special token: recognised in prompts, left out of text.
    Special(String),
    Bytes(Box<[u8]>),
}

impl Vocabulary {
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Self {
        let bytes = byte_of_char();
        let mut tokens = Vec::new();
        let mut put = |id: u32, token: Token| {
            let index = id as usize;
            if tokens.len() <= index {
                tokens.resize(index + 1, Token::Unknown);
            }
            tokens[index] = token;
        };
        for (text, id) in tokenizer.get_vocab(false) {
            let mapped: Option<Box<[u8]>> = text.chars().map(|c| bytes.get(&c).copied()).collect();
            put(id, Token::Bytes(mapped.unwrap_or_else(|| text.as_bytes().into())));
        }
        for (id, added) in tokenizer.get_added_tokens_decoder() {
            put(
                id,
                match added.special {
                    true => Token::Special(added.content),
                    false => Token::Bytes(added.content.into_bytes().into()),
                },
            );
        }
        Self { tokens }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn name(&self, id: u32) -> String {
        match self.tokens.get(id as usize) {
            Some(Token::Special(name)) => name.clone(),
            Some(Token::Bytes(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            Some(Token::Unknown) | None => String::new(),
        }
    }

    pub(super) fn token_bytes(&self, id: u32) -> TokenBytes {
        match self.tokens.get(id as usize) {
            Some(Token::Special(name)) => TokenBytes::Special(name.clone()),
            Some(Token::Bytes(bytes)) => TokenBytes::Text(bytes.to_vec()),
            Some(Token::Unknown) | None => TokenBytes::Unknown,
        }
    }

    fn text_bytes(&self, id: u32) -> &[u8] {
        match self.tokens.get(id as usize) {
            Some(Token::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }
}

/// The byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters for
/// themselves, the other bytes for the characters from U+0100 on.
fn byte_of_char() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..=255u8).filter(|byte| !printable(byte)).zip('\u{100}'..);
    (0..=255u8)
        .filter(printable)
        .map(|byte| (char::from(byte), byte))
        .chain(shifted.map(|(b, c)| (c, b)))
        .collect()
}

/// Turns a stream of tokens into text, whole characters at a time: the bytes of an unfinished character wait for
/// the tokens that complete it.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    waiting: Vec<u8>,
}

impl Detokenizer {
    pub(super) fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, waiting: Vec::new() }
    }

    /// The text that `token` completes, possibly none. Special tokens have no text. Bytes that cannot become a
    /// character any more give U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.waiting.extend_from_slice(self.vocabulary.text_bytes(token));
        let mut text = String::new();
        let mut done = 0;
        loop {
            let rest = &self.waiting[done..];
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    done = self.waiting.len();
                    break;
                }
                Err(error) => {
                    let (valid, _) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    done += valid.len();
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += invalid;
                }
            }
        }
        self.waiting.drain(..done);
        text
    }

    /// Ends the stream: a character that was cut short is dropped, so there is never anything left to say.
    pub fn finish(&mut self) -> String {
        self.waiting.clear();
        String::new()
    }
}
