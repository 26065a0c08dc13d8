//! From OpenAI's request bodies to the engine's request; every check that needs no engine is here.

mod check;
mod format;
mod messages;
mod prompt;
mod sampling;
mod speculation;
mod stops;
mod template;
mod tools;

use canopy_e2e::chat::ChatInput;
use canopy_e2e::engine::{Constraint, GenerateRequest};

use crate::error::ApiError;
use crate::types::{ChatRequest, CompletionRequest, Shared};
pub use check::missing;
use check::{neutral, only, ranged};
pub use messages::messages;
pub use prompt::{Prompt, PromptList, token_ids, with_prompt};
pub use template::variables;
pub use tools::tools;

/// Most alternatives per token.
const MAX_LOGPROBS: i64 = 20;
/// Most choices of one request.
pub const MAX_CHOICES: i64 = 16;

/// What the checks ask of the served model and the server.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Name of the served model.
    pub model: &'a str,
    /// Rows of the logits.
    pub vocab_size: usize,
    /// Tokens of prompt and answer together.
    pub context_len: usize,
    /// max_tokens of a request that names none.
    pub default_max_tokens: usize,
    /// Whether a drafter is loaded.
    pub has_drafter: bool,
}

impl Limits<'_> {
    /// 404 when another model than the served one is asked for.
    pub fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked != self.model => Err(ApiError::model_not_found(asked, self.model)),
            _ => Ok(()),
        }
    }
}

/// What an answer tells besides its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CanopyOptions {
    /// Statistics at the end.
    pub stats: bool,
    /// Every round's tree, accepted path and tokens.
    pub rounds: bool,
}

/// A checked request without its prompt.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The engine's request; its prompt is empty.
    pub request: GenerateRequest,
    /// Number of answers to a prompt.
    pub choices: usize,
    /// Answer with server-sent events.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// The text starts with the prompt.
    pub echo: bool,
    /// What the answer tells besides its text.
    pub canopy: CanopyOptions,
}

impl Plan {
    /// The request of one answer to a prompt: sampled ones draw with a seed of their own.
    pub fn choice(&self, request: &GenerateRequest, index: usize) -> GenerateRequest {
        let mut request = request.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(index as u64);
        request
    }
}

/// A checked conversation.
#[derive(Clone, Debug)]
pub struct ChatPlan {
    /// Messages, tools and variables of the chat template.
    pub input: ChatInput,
    /// Most tokens of a thought.
    pub thinking_budget: Option<usize>,
    /// Everything else.
    pub plan: Plan,
}

/// Checks a completion request.
pub fn completion(mut body: CompletionRequest, limits: &Limits<'_>) -> Result<(PromptList, Plan), ApiError> {
    let shared = body.take_shared();
    limits.check_model(shared.model.as_deref())?;
    neutral("suffix", body.suffix, String::is_empty, "an empty string")?;
    neutral("best_of", body.best_of, |&best_of| best_of == 1, "1")?;
    let prompts = prompt::prompts(body.prompt, limits)?;
    let logprobs = ranged("logprobs", body.logprobs, 0, MAX_LOGPROBS)?;
    let max_tokens = shared.max_tokens;
    let mut plan = plan(shared, ("max_tokens", max_tokens), logprobs.map(|n| n as usize), limits)?;
    plan.echo = body.echo.unwrap_or(false);
    if plan.echo {
        plan.request.prompt_logprobs = plan.request.logprobs;
    }
    Ok((prompts, plan))
}

/// Checks a chat request.
pub fn chat(mut body: ChatRequest, limits: &Limits<'_>) -> Result<ChatPlan, ApiError> {
    let shared = body.take_shared();
    limits.check_model(shared.model.as_deref())?;
    only("store", body.store, false)?;
    only("continue_final_message", body.continue_final_message, false)?;
    only("separate_reasoning", body.separate_reasoning, true)?;
    only("stream_reasoning", body.stream_reasoning, true)?;
    only("include_reasoning", body.include_reasoning, true)?;
    let tools = tools::tool_use(body.tools, body.tool_choice.as_ref(), body.parallel_tool_calls)?;
    neutral("modalities", body.modalities, |m| m.iter().all(|m| m == "text"), r#"["text"]"#)?;
    neutral("service_tier", body.service_tier, |t| t == "auto" || t == "default", "auto or default")?;
    let messages = messages(body.messages)?;
    let top = ranged("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)?;
    let logprobs = match (body.logprobs.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0) as usize),
        (false, None | Some(0)) => None,
        (false, Some(top)) => return Err(ApiError::field("top_logprobs", "0 without logprobs: true", top)),
    };
    let max_tokens = match (shared.max_tokens, body.max_completion_tokens) {
        (Some(one), Some(other)) if one != other => {
            return Err(ApiError::field("max_completion_tokens", format!("max_tokens, {one}"), other));
        }
        (_, Some(max)) => ("max_completion_tokens", Some(max)),
        (max, None) => ("max_tokens", max),
    };
    let variables = variables(body.chat_template_kwargs, body.enable_thinking)?;
    let thinking_budget = ranged("thinking_budget", body.thinking_budget, 0, i64::MAX)?;
    let mut plan = plan(shared, max_tokens, logprobs, limits)?;
    if tools.constraint != Constraint::None {
        if plan.request.constraint != Constraint::None {
            return Err(ApiError::field(
                "tool_choice",
                "none or auto beside a format or grammar",
                "a demand",
            ));
        }
        plan.request.constraint = tools.constraint;
    }
    let input = ChatInput { messages, tools: tools.tools, variables };
    Ok(ChatPlan { input, thinking_budget: thinking_budget.map(|most| most as usize), plan })
}

fn plan(
    shared: Shared,
    (max_name, max_tokens): (&'static str, Option<i64>),
    logprobs: Option<usize>,
    limits: &Limits<'_>,
) -> Result<Plan, ApiError> {
    only("no_stop_trim", shared.no_stop_trim, false)?;
    only("skip_special_tokens", shared.skip_special_tokens, true)?;
    only("return_hidden_states", shared.return_hidden_states, false)?;
    let choices = ranged("n", shared.n, 1, MAX_CHOICES)?.unwrap_or(1) as usize;
    let stream = shared.stream.unwrap_or(false);
    if shared.stream_options.is_some() && !stream {
        return Err(ApiError::field("stream_options", "null without stream: true", "an object"));
    }
    let canopy = speculation::canopy_options(shared.canopy.as_ref())?;
    let max_tokens = ranged(max_name, max_tokens, 1, i64::MAX)?
        .map_or(limits.default_max_tokens, |max| max as usize)
        .min(limits.context_len);
    let min_tokens = ranged("min_tokens", shared.min_tokens, 0, max_tokens as i64)?;
    Ok(Plan {
        stream,
        choices,
        include_usage: shared.stream_options.as_ref().and_then(|o| o.0.include_usage).unwrap_or(false),
        echo: false,
        canopy,
        request: GenerateRequest {
            stop: stops::stops(shared.stop.as_ref())?,
            stop_tokens: stops::stop_tokens(shared.stop_token_ids.as_deref(), limits)?,
            min_tokens: min_tokens.unwrap_or(0) as usize,
            ignore_eos: shared.ignore_eos.unwrap_or(false),
            sampling: sampling::sampling(&shared)?,
            penalties: sampling::penalties(&shared)?,
            logit_bias: sampling::logit_bias(shared.logit_bias.as_ref(), limits)?,
            constraint: format::constraint(shared.response_format.as_ref(), shared.grammar.as_deref())?,
            speculation: speculation::speculation(&shared, limits)?,
            logprobs,
            report_rounds: canopy.rounds,
            ..GenerateRequest::new(Vec::new(), max_tokens)
        },
    })
}
