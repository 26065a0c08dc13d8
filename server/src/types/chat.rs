//! Body of `POST /v1/chat/completions`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::Object;
use super::shared::{request_body, with_shared_fields};

with_shared_fields!(request_body! {
    /// Body of `POST /v1/chat/completions`.
    ChatRequest {
        /// The conversation, oldest message first.
        #[schema(required = true, nullable = false, min_items = 1, value_type = Vec<ChatMessageBody>)]
        messages: Option<Vec<Object<ChatMessageBody>>>,
        /// Another name of `max_tokens`.
        #[schema(minimum = 1)]
        max_completion_tokens: Option<i64>,
        /// Log-probabilities of the generated tokens.
        logprobs: Option<bool>,
        /// With `logprobs`: this many alternatives per token, at most 20.
        #[schema(minimum = 0, maximum = 20)]
        top_logprobs: Option<i64>,
        /// Whether the model thinks before it answers, for templates that ask; theirs when left out.
        enable_thinking: Option<bool>,
        /// Most tokens of a thought; then it is ended.
        #[schema(minimum = 0)]
        thinking_budget: Option<i64>,
        /// Variables that the model's chat template takes, such as `enable_thinking`.
        #[schema(value_type = Option<Object>)]
        chat_template_kwargs: Option<Map<String, Value>>,
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<ToolBody>>)]
        tools: Option<Vec<Object<ToolBody>>>,
        /// `none`, `auto`, `required` or one of the tools.
        #[schema(value_type = Option<crate::types::ToolChoiceShape>)]
        tool_choice: Option<Value>,
        /// `false` only with a `tool_choice` that demands one call.
        parallel_tool_calls: Option<bool>,
        /// `false`; routers send it.
        continue_final_message: Option<bool>,
        /// `true`; routers send it.
        separate_reasoning: Option<bool>,
        /// `true`; routers send it.
        stream_reasoning: Option<bool>,
        /// `true`; routers send it.
        include_reasoning: Option<bool>,
        /// `false`: answers are not kept.
        store: Option<bool>,
        /// Not looked at.
        #[schema(value_type = Option<Object>)]
        metadata: Option<Map<String, Value>>,
        /// `["text"]`.
        modalities: Option<Vec<String>>,
        /// `auto` or `default`.
        service_tier: Option<String>,
    }
});

/// One function that the model may call.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolBody {
    /// `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The function.
    #[schema(value_type = ToolFunctionBody)]
    pub function: Object<ToolFunctionBody>,
}

/// A function's name and arguments.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolFunctionBody {
    /// 1 to 64 letters, digits, underscores and dashes.
    #[schema(min_length = 1, max_length = 64)]
    pub name: String,
    /// What it is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON Schema of its arguments.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Map<String, Value>>,
    /// `false` or left out.
    #[serde(skip_serializing)]
    pub strict: Option<bool>,
}

/// One chat message. What assistants' own answers carry besides their text may come back empty.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatMessageBody {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    #[schema(required = true, nullable = false)]
    pub role: Option<String>,
    /// A string or a list of text parts.
    #[schema(value_type = Option<crate::types::ContentShape>)]
    pub content: Option<Value>,
    /// Who speaks; given to the model's chat template, which may leave it out.
    pub name: Option<String>,
    /// What an assistant thought before it answered; the template decides whether it is told again.
    pub reasoning_content: Option<String>,
    /// `null`.
    pub refusal: Option<Value>,
    /// `null`.
    pub audio: Option<Value>,
    /// `null` or empty.
    pub annotations: Option<Value>,
    /// `null`.
    pub function_call: Option<Value>,
    /// The calls that an assistant made.
    #[schema(value_type = Option<Vec<crate::types::ToolCallShape>>)]
    pub tool_calls: Option<Value>,
    /// Which call a `tool` message answers.
    pub tool_call_id: Option<String>,
}
