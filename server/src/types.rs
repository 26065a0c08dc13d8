//! Wire types of the requests. Unknown fields are refused; `null` means "left out".

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Defines a request body: its own fields, then those that both endpoints share, and `split` to part them.
macro_rules! request_body {
    ($(#[$meta:meta])* $name:ident { $($(#[$own_meta:meta])* $own:ident: $own_type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$own_meta])* pub $own: $own_type,)*
            /// Name of the served model; the served one when left out.
            pub model: Option<String>,
            /// Most generated tokens, at least 1.
            pub max_tokens: Option<i64>,
            /// 0 (the default) is argmax; at most 2.
            pub temperature: Option<f32>,
            /// Above 0, at most 1.
            pub top_p: Option<f32>,
            /// Most likely tokens to draw from; 0 or -1 is off.
            pub top_k: Option<i64>,
            /// In [0, 1): least probability relative to the most likely token.
            pub min_p: Option<f32>,
            /// Seed of the draws; random when left out and the temperature is above 0.
            pub seed: Option<i64>,
            /// A stop string or a list of them.
            pub stop: Option<Value>,
            /// Token ids that end the generation besides the model's own.
            pub stop_token_ids: Option<Vec<u32>>,
            /// Go on past the model's own stop tokens.
            pub ignore_eos: Option<bool>,
            /// Answer with server-sent events.
            pub stream: Option<bool>,
            /// Options of a streamed answer.
            pub stream_options: Option<StreamOptions>,
            /// Number of answers; 1.
            pub n: Option<i64>,
            /// 0.
            pub frequency_penalty: Option<f32>,
            /// 0.
            pub presence_penalty: Option<f32>,
            /// Empty.
            pub logit_bias: Option<Map<String, Value>>,
            /// The caller's name for its user; not looked at.
            pub user: Option<String>,
            /// `false` decodes one token a round without a drafter; the text is the same.
            pub draft: Option<bool>,
            /// How the answer is decoded.
            pub speculation: Option<SpeculationBody>,
            /// Statistics and rounds in the answer.
            pub canopy: Option<Value>,
        }

        impl $name {
            /// Takes out the fields that both endpoints share.
            pub fn take_shared(&mut self) -> Shared {
                Shared {
                    model: self.model.take(),
                    max_tokens: self.max_tokens,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    seed: self.seed,
                    stop: self.stop.take(),
                    stop_token_ids: self.stop_token_ids.take(),
                    ignore_eos: self.ignore_eos,
                    stream: self.stream,
                    stream_options: self.stream_options.take(),
                    n: self.n,
                    frequency_penalty: self.frequency_penalty,
                    presence_penalty: self.presence_penalty,
                    logit_bias: self.logit_bias.take(),
                    draft: self.draft,
                    speculation: self.speculation.take(),
                    canopy: self.canopy.take(),
                }
            }
        }
    };
}

request_body! {
    /// Body of `POST /v1/completions`.
    CompletionRequest {
        /// A string, a list of one string, or token ids.
        prompt: Option<Value>,
        /// Log-probabilities of this many alternatives per token, at most 20.
        logprobs: Option<i64>,
        /// `false`.
        echo: Option<bool>,
        /// Empty.
        suffix: Option<String>,
        /// 1.
        best_of: Option<i64>,
    }
}

request_body! {
    /// Body of `POST /v1/chat/completions`.
    ChatRequest {
        /// The conversation, oldest message first.
        messages: Option<Vec<ChatMessageBody>>,
        /// Another name of `max_tokens`.
        max_completion_tokens: Option<i64>,
        /// Log-probabilities of the generated tokens.
        logprobs: Option<bool>,
        /// With `logprobs`: this many alternatives per token, at most 20.
        top_logprobs: Option<i64>,
        /// `false`: answers are not kept.
        store: Option<bool>,
        /// Not looked at.
        metadata: Option<Map<String, Value>>,
        /// `{"type": "text"}`.
        response_format: Option<Value>,
        /// Empty.
        tools: Option<Vec<Value>>,
        /// `none` or `auto`.
        tool_choice: Option<Value>,
        /// Not looked at: there are no tools.
        parallel_tool_calls: Option<bool>,
        /// `["text"]`.
        modalities: Option<Vec<String>>,
        /// `auto` or `default`.
        service_tier: Option<String>,
    }
}

/// The fields that both endpoints share; see [`CompletionRequest`].
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Shared {
    pub model: Option<String>,
    pub max_tokens: Option<i64>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub stop: Option<Value>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<i64>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub logit_bias: Option<Map<String, Value>>,
    pub draft: Option<bool>,
    pub speculation: Option<SpeculationBody>,
    pub canopy: Option<Value>,
}

/// Options of a streamed answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: Option<bool>,
    /// Not looked at.
    pub include_obfuscation: Option<bool>,
}

/// `"speculation": {"mode", "budget"}`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeculationBody {
    /// `ar`, `chain`, `tree` or `auto`.
    pub mode: Option<ModeBody>,
    /// Most non-root nodes of a round.
    pub budget: Option<i64>,
}

/// How an answer is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModeBody {
    /// One token a round, no drafter.
    Ar,
    /// The drafter's top-1 chain.
    Chain,
    /// A draft tree of `budget` nodes.
    Tree,
    /// Chosen from measured round cost and running acceptance.
    Auto,
}

/// One chat message. What assistants' own answers carry besides their text may come back empty.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessageBody {
    /// `system`, `developer`, `user` or `assistant`.
    pub role: Option<String>,
    /// A string or a list of text parts.
    pub content: Option<Value>,
    /// Not looked at.
    pub name: Option<String>,
    /// Not looked at: old reasoning is not put into the prompt.
    pub reasoning_content: Option<String>,
    /// `null`.
    pub refusal: Option<Value>,
    /// `null`.
    pub audio: Option<Value>,
    /// `null` or empty.
    pub annotations: Option<Value>,
    /// `null`.
    pub function_call: Option<Value>,
    /// `null` or empty.
    pub tool_calls: Option<Value>,
    /// `null`.
    pub tool_call_id: Option<Value>,
}
