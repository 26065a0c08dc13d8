//! OpenAI's answers and chunks.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::canopy::Canopy;

/// An answer or a chunk of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Answer<C> {
    /// Names the answer; the same in all its chunks.
    pub id: String,
    /// `text_completion`, `chat.completion` or `chat.completion.chunk`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The served model.
    pub model: String,
    /// The server's version.
    pub system_fingerprint: &'static str,
    /// One per answer asked for; none in a chunk that carries only `usage` or `canopy`.
    pub choices: Vec<C>,
    /// Tokens counted; in a stream only in its last chunk, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// Rounds and statistics, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canopy: Option<Canopy>,
}

/// One choice of a completion.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// Which of the `n`.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; null before the end.
    pub finish_reason: Option<&'static str>,
}

/// One choice of a chat answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Which of the `n`.
    pub index: usize,
    /// The answer.
    pub message: Message,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: Option<&'static str>,
}

/// One choice of a chat chunk.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatDelta {
    /// Which of the `n`.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`; null before the end.
    pub finish_reason: Option<&'static str>,
}

/// A whole message.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Message {
    /// `assistant`.
    pub role: &'static str,
    /// The answer; null when there are only calls.
    pub content: Option<String>,
    /// null.
    #[schema(value_type = Option<String>)]
    pub refusal: (),
    /// What was thought before it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reasoning_content: String,
    /// Functions to call.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// What a chunk adds to a message.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Delta {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// More of the thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Functions to call, each whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A function to call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ToolCall {
    /// Its place among the message's calls.
    pub index: usize,
    /// Names the call.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Which function, with which arguments.
    pub function: ToolFunction,
}

/// A function's name and arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ToolFunction {
    /// Name.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// Log-probabilities of a completion.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// Each token's text, `bytes:\xf0\x9f` for one that is no whole character.
    pub tokens: Vec<String>,
    /// ln p; null for a prompt's first token.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens and their ln p.
    #[schema(value_type = Vec<Option<Object>>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token starts in the text, in characters; a character's tokens all start where it does.
    pub text_offset: Vec<usize>,
}

/// Log-probabilities of a chat answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// One per token.
    pub content: Vec<ChatLogprob>,
    /// null.
    #[schema(value_type = Option<String>)]
    pub refusal: (),
}

/// Log-probability of one token.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatLogprob {
    /// The token and its ln p.
    #[serde(flatten)]
    pub token: TokenLogprob,
    /// The most likely tokens.
    pub top_logprobs: Vec<TokenLogprob>,
}

/// A token and its ln p.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenLogprob {
    /// Text.
    pub token: String,
    /// ln p.
    pub logprob: Option<f32>,
    /// The token's bytes in UTF-8, also where they are no whole character.
    pub bytes: Vec<u8>,
}

/// Tokens counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of all choices.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompt.
    pub prompt_tokens_details: PromptDetails,
    /// Of all choices.
    pub completion_tokens_details: CompletionDetails,
}

/// What is known of a prompt's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Tokens that a saved prefix stood in for.
    pub cached_tokens: usize,
}

/// What became of all choices' tokens and of their drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionDetails {
    /// Tokens of thoughts, the closing `</think>` included.
    pub reasoning_tokens: usize,
    /// Tokens of the answer that were drafted and accepted.
    pub accepted_prediction_tokens: usize,
    /// Drafted tokens that were verified and are not in the answer; `completion_tokens` does not count them.
    pub rejected_prediction_tokens: usize,
}

/// The body of every answer that is not 2xx.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What is wrong.
    pub error: ErrorDetail,
}

/// What is wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// For a person.
    pub message: String,
    /// Class, stable.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The request's field, where there is one.
    pub param: Option<String>,
    /// Case, stable.
    pub code: Option<&'static str>,
}
