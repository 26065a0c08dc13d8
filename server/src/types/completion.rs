//! Body of `POST /v1/completions`.

use serde_json::Value;

use super::shared::{request_body, with_shared_fields};

with_shared_fields!(request_body! {
    /// Body of `POST /v1/completions`.
    CompletionRequest {
        /// A string, token ids, or a list of either: several prompts, answered in order.
        #[schema(value_type = crate::types::PromptShape, required = true)]
        prompt: Option<Value>,
        /// Log-probabilities of this many alternatives per token, at most 20.
        #[schema(minimum = 0, maximum = 20)]
        logprobs: Option<i64>,
        /// The text starts with the prompt.
        echo: Option<bool>,
        /// Empty.
        suffix: Option<String>,
        /// 1.
        best_of: Option<i64>,
    }
});
