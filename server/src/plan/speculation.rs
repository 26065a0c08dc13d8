//! canopy's extensions: how the answer is decoded and what it tells of it.

use canopy_e2e::engine::{Mode, Speculation};
use serde_json::Value;

use super::check::{ranged, shown, unknown};
use super::{CanopyOptions, Limits};
use crate::config::MAX_BUDGET;
use crate::error::ApiError;
use crate::types::{ModeBody, Shared};

pub(super) fn speculation(shared: &Shared, limits: &Limits<'_>) -> Result<Speculation, ApiError> {
    let asked = shared.speculation.as_ref().map(|speculation| &speculation.0);
    let mode = asked.and_then(|speculation| speculation.mode);
    let budget = asked.and_then(|speculation| speculation.budget);
    let budget = ranged("speculation.budget", budget, 0, MAX_BUDGET as i64)?.map(|budget| budget as usize);
    let named = mode.map(|mode| match mode {
        ModeBody::Auto => Mode::Auto,
        ModeBody::Ar => Mode::Ar,
        ModeBody::Chain => Mode::Chain,
        ModeBody::Tree => Mode::Tree,
    });
    let plain = shared.draft == Some(false);
    if let Some(mode) = named.filter(|mode| plain && *mode != Mode::Ar) {
        return Err(ApiError::field("speculation.mode", "ar with draft: false", mode.name()));
    }
    let mode = named.unwrap_or(if plain { Mode::Ar } else { Mode::Auto });
    if !limits.has_drafter && matches!(mode, Mode::Chain | Mode::Tree) {
        return Err(ApiError::field("speculation.mode", "ar or auto: no drafter is loaded", mode.name()));
    }
    Ok(Speculation { mode, budget })
}

pub(super) fn canopy_options(value: Option<&Value>) -> Result<CanopyOptions, ApiError> {
    let wrong = |name: String, value: &Value| Err(ApiError::field(name, "true or false", shown(value)));
    match value {
        None => Ok(CanopyOptions::default()),
        Some(&Value::Bool(on)) => Ok(CanopyOptions { stats: on, rounds: on }),
        Some(Value::Object(fields)) => {
            let mut options = CanopyOptions { stats: true, rounds: false };
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("stats", &Value::Bool(on)) => options.stats = on,
                    ("rounds", &Value::Bool(on)) => options.rounds = on,
                    ("stats" | "rounds", Value::Null) => {}
                    ("stats" | "rounds", value) => return wrong(format!("canopy.{name}"), value),
                    _ => return Err(unknown(format!("canopy.{name}"), "stats or rounds")),
                }
            }
            Ok(options)
        }
        Some(other) => Err(ApiError::field("canopy", r#"true, false or {"stats", "rounds"}"#, shown(other))),
    }
}
