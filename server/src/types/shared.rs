//! The fields that both endpoints share, listed once.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Calls `$then` with the shared fields, then with its own arguments.
macro_rules! with_shared_fields {
    ($then:ident! { $($args:tt)* }) => {
        $then! {
            [
                /// Name of the served model; the served one when left out.
                model: Option<String>,
                /// Most generated tokens, at least 1.
                #[schema(minimum = 1)]
                max_tokens: Option<i64>,
                /// The model's own stop tokens are not chosen before this many tokens.
                #[schema(minimum = 0)]
                min_tokens: Option<i64>,
                /// 0 (the default) is argmax; at most 2.
                #[schema(minimum = 0, maximum = 2)]
                temperature: Option<f32>,
                /// Above 0, at most 1.
                #[schema(exclusive_minimum = 0, maximum = 1)]
                top_p: Option<f32>,
                /// Most likely tokens to draw from; 0 or -1 is off.
                #[schema(minimum = -1, maximum = 4294967295i64)]
                top_k: Option<i64>,
                /// In [0, 1): least probability relative to the most likely token.
                #[schema(minimum = 0, exclusive_maximum = 1)]
                min_p: Option<f32>,
                /// Seed of the draws; random when left out and the temperature is above 0.
                seed: Option<i64>,
                /// Subtracted once from the logit of every token that was generated before, -2 to 2.
                #[schema(minimum = -2, maximum = 2)]
                presence_penalty: Option<f32>,
                /// Subtracted from a token's logit once for each time that it was generated before, -2 to 2.
                #[schema(minimum = -2, maximum = 2)]
                frequency_penalty: Option<f32>,
                /// Divides positive and multiplies negative logits of tokens in prompt and answer; 1 is off.
                #[schema(minimum = 0.01, maximum = 10)]
                repetition_penalty: Option<f32>,
                /// Added to the logits of these token ids, -100 to 100; -100 forbids the token.
                #[schema(value_type = Option<Object>)]
                logit_bias: Option<serde_json::Map<String, serde_json::Value>>,
                /// A stop string or a list of at most 16.
                #[schema(value_type = Option<crate::types::StopShape>)]
                stop: Option<Value>,
                /// Token ids that end the generation besides the model's own, at most 256.
                #[schema(max_items = 256)]
                stop_token_ids: Option<Vec<u32>>,
                /// Go on past the model's own stop tokens.
                ignore_eos: Option<bool>,
                /// Answer with server-sent events.
                stream: Option<bool>,
                /// Options of a streamed answer.
                #[schema(value_type = Option<crate::types::StreamOptions>)]
                stream_options: Option<crate::types::Object<crate::types::StreamOptions>>,
                /// Number of answers to a prompt, 1 to 16. Answer i is drawn with seed + i.
                #[schema(minimum = 1, maximum = 16)]
                n: Option<i64>,
                /// What the text must look like.
                #[schema(value_type = Option<crate::types::FormatShape>)]
                response_format: Option<Value>,
                /// A grammar in llguidance's dialect of Lark that the text must belong to.
                grammar: Option<String>,
                /// `false`; routers send it.
                no_stop_trim: Option<bool>,
                /// `true`; routers send it.
                skip_special_tokens: Option<bool>,
                /// `false`; routers send it.
                return_hidden_states: Option<bool>,
                /// The caller's name for its user; not looked at.
                user: Option<String>,
                /// `false` decodes one token a round without a drafter; the text is the same.
                draft: Option<bool>,
                /// How the answer is decoded.
                #[schema(value_type = Option<crate::types::SpeculationBody>)]
                speculation: Option<crate::types::Object<crate::types::SpeculationBody>>,
                /// Statistics and rounds in the answer.
                #[schema(value_type = Option<crate::types::CanopyBody>)]
                canopy: Option<Value>,
            ]
            $($args)*
        }
    };
}

/// Defines a request body: its own fields, the shared ones, and `take_shared` to part them.
macro_rules! request_body {
    (
        [$($(#[$meta:meta])* $field:ident: $type:ty,)*]
        $(#[$body_meta:meta])*
        $name:ident { $($(#[$own_meta:meta])* $own:ident: $own_type:ty,)* }
    ) => {
        $(#[$body_meta])*
        #[derive(Clone, Debug, Default, serde::Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$own_meta])* pub $own: $own_type,)*
            $($(#[$meta])* pub $field: $type,)*
        }

        impl $name {
            /// Takes out the fields that both endpoints share.
            pub fn take_shared(&mut self) -> crate::types::Shared {
                crate::types::Shared { $($field: self.$field.take(),)* }
            }
        }
    };
}

macro_rules! shared_fields {
    ([$($(#[$meta:meta])* $field:ident: $type:ty,)*]) => {
        /// The fields that both endpoints share; see [`CompletionRequest`](crate::types::CompletionRequest).
        #[derive(Clone, Debug, Default)]
        #[allow(missing_docs)]
        pub struct Shared { $(pub $field: $type,)* }
    };
}

with_shared_fields!(shared_fields! {});

pub(super) use {request_body, with_shared_fields};

/// Options of a streamed answer.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: Option<bool>,
    /// Not looked at.
    pub include_obfuscation: Option<bool>,
}

/// `"speculation": {"mode", "budget"}`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SpeculationBody {
    /// `ar`, `chain`, `tree` or `auto`.
    pub mode: Option<ModeBody>,
    /// Most non-root nodes of a round.
    #[schema(minimum = 0, maximum = 255)]
    pub budget: Option<i64>,
}

/// How an answer is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
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

/// `"canopy"`: all, nothing, or by name.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum CanopyBody {
    /// Both or neither.
    All(bool),
    /// By name.
    Options(CanopyOptionsBody),
}

/// `"canopy": {"stats", "rounds"}`.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CanopyOptionsBody {
    /// Statistics at the end; `true` when left out.
    pub stats: Option<bool>,
    /// Every round's tree, accepted path and tokens; `false` when left out.
    pub rounds: Option<bool>,
}
