//! `GET /info`: what runs here.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::config::Args;
use crate::error::ApiError;
use crate::plan::MAX_CHOICES;
use crate::routes::openapi::Errors;
use crate::state::AppState;

/// What runs here.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Info {
    /// The model.
    pub model: InfoModel,
    /// How requests are decoded that do not say.
    pub speculation: InfoSpeculation,
    /// What requests are held to.
    pub limits: InfoLimits,
    /// The server itself.
    pub build: InfoBuild,
    /// The resolved configuration; keys are left out.
    pub config: Args,
}

/// The served model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InfoModel {
    /// Its name in requests.
    pub name: String,
    /// Rows of the logits.
    pub vocab_size: usize,
    /// Tokens of prompt and answer together.
    pub context_len: usize,
    /// Whether a drafter is loaded.
    pub drafter: bool,
    /// Whether the model directory has a chat template.
    pub chat_template: bool,
    /// What the start-up self-check generated.
    pub self_check: String,
}

/// How requests are decoded that do not say.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InfoSpeculation {
    /// `auto`, or `ar` without a drafter.
    pub mode: &'static str,
    /// Node budget of tree mode.
    pub budget: usize,
}

/// What requests are held to.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InfoLimits {
    /// Streams that run at once.
    pub slots: usize,
    /// Streams that may wait.
    pub max_waiting: usize,
    /// Largest request body in bytes.
    pub body_bytes: usize,
    /// max_tokens of a request that names none.
    pub default_max_tokens: usize,
    /// Most choices of a request.
    pub choices: i64,
    /// Seconds that a request may take; null for no limit.
    pub request_seconds: Option<u64>,
}

/// The server itself.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InfoBuild {
    /// Version.
    pub version: &'static str,
    /// Instruction set and system.
    pub target: String,
    /// Whether it was built with optimisation.
    pub optimised: bool,
}

/// What runs here.
#[utoipa::path(get, path = "/info", tag = "operations", responses(
    (status = 200, description = "Model, limits, build, configuration", body = Info), Errors))]
pub async fn info(State(state): State<AppState>) -> Result<Json<Info>, ApiError> {
    let (model, config) = (state.engine().model()?, state.config());
    Ok(Json(Info {
        model: InfoModel {
            name: model.name.clone(),
            vocab_size: model.vocab_size,
            context_len: model.context_len,
            drafter: model.has_drafter,
            chat_template: model.tokenizer.has_chat_template(),
            self_check: model.self_check.clone(),
        },
        speculation: InfoSpeculation {
            mode: if model.has_drafter { "auto" } else { "ar" },
            budget: config.budget,
        },
        limits: InfoLimits {
            slots: config.slots,
            max_waiting: config.max_waiting,
            body_bytes: config.body_limit,
            default_max_tokens: config.default_max_tokens,
            choices: MAX_CHOICES,
            request_seconds: config.request_timeout.map(|limit| limit.as_secs()),
        },
        build: InfoBuild {
            version: env!("CARGO_PKG_VERSION"),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            optimised: !cfg!(debug_assertions),
        },
        config: config.typed.clone(),
    }))
}
