//! Bodies of `/tokenize` and `/detokenize`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{ChatMessageBody, Object, ToolBody};

/// Body of `POST /tokenize`: a prompt or a conversation.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenizeRequest {
    /// Name of the served model; the served one when left out.
    pub model: Option<String>,
    /// Text.
    pub prompt: Option<String>,
    /// A conversation, put through the chat template.
    #[schema(value_type = Option<Vec<ChatMessageBody>>)]
    pub messages: Option<Vec<Object<ChatMessageBody>>>,
    /// With `messages`: functions that the model may call.
    #[schema(value_type = Option<Vec<ToolBody>>)]
    pub tools: Option<Vec<Object<ToolBody>>>,
    /// With `messages`: variables that the model's chat template takes, such as `enable_thinking`.
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// Answer of `POST /tokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenizeAnswer {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Each token's text.
    pub token_strs: Vec<String>,
    /// How many there are.
    pub count: usize,
    /// Tokens of prompt and answer together that the model takes.
    pub max_model_len: usize,
}

/// Body of `POST /detokenize`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DetokenizeRequest {
    /// Name of the served model; the served one when left out.
    pub model: Option<String>,
    /// Token ids.
    #[schema(required = true, nullable = false)]
    pub tokens: Option<Vec<u32>>,
}

/// Answer of `POST /detokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DetokenizeAnswer {
    /// The tokens' text, special tokens left out.
    pub prompt: String,
}
