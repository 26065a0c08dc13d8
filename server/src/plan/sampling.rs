//! How tokens are drawn, and what changes their logits.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use canopy_e2e::engine::{Penalties, Sampling};
use serde_json::{Map, Value};

use super::Limits;
use super::check::{ranged, shown};
use crate::error::ApiError;
use crate::types::Shared;

/// Most entries of a `logit_bias`.
const MAX_BIASES: usize = 1024;
/// The bias that forbids a token.
const FORBIDS: f64 = -100.0;

fn within(
    name: &'static str,
    value: Option<f32>,
    default: f32,
    expected: &str,
    holds: fn(f32) -> bool,
) -> Result<f32, ApiError> {
    let value = value.unwrap_or(default);
    if holds(value) { Ok(value) } else { Err(ApiError::field(name, expected, value)) }
}

pub(super) fn sampling(shared: &Shared) -> Result<Sampling, ApiError> {
    let temperature = within("temperature", shared.temperature, 0.0, "0 to 2", |t| (0.0..=2.0).contains(&t))?;
    let top_p = within("top_p", shared.top_p, 1.0, "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?;
    let min_p = within("min_p", shared.min_p, 0.0, "at least 0 and below 1", |p| (0.0..1.0).contains(&p))?;
    let top_k = ranged("top_k", shared.top_k, -1, i64::from(u32::MAX))?.unwrap_or(0).max(0);
    let seed = match shared.seed {
        Some(seed) => seed as u64,
        None if temperature > 0.0 => random_seed(),
        None => 0,
    };
    Ok(Sampling { temperature, top_p, top_k: top_k as usize, min_p, seed })
}

/// A seed that JSON carries exactly.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

pub(super) fn penalties(shared: &Shared) -> Result<Penalties, ApiError> {
    let two: fn(f32) -> bool = |penalty| (-2.0..=2.0).contains(&penalty);
    let repetition: fn(f32) -> bool = |penalty| (0.01..=10.0).contains(&penalty);
    Ok(Penalties {
        presence: within("presence_penalty", shared.presence_penalty, 0.0, "-2 to 2", two)?,
        frequency: within("frequency_penalty", shared.frequency_penalty, 0.0, "-2 to 2", two)?,
        repetition: within("repetition_penalty", shared.repetition_penalty, 1.0, "0.01 to 10", repetition)?,
    })
}

/// Token ids and what is added to their logits, by id; -100 forbids.
pub(super) fn logit_bias(
    biases: Option<&Map<String, Value>>,
    limits: &Limits<'_>,
) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = biases else { return Ok(Vec::new()) };
    if biases.len() > MAX_BIASES {
        return Err(ApiError::field("logit_bias", format!("at most {MAX_BIASES} tokens"), biases.len()));
    }
    let one = |(id, bias): (&String, &Value)| {
        let token = id.parse::<u32>().ok().filter(|&token| (token as usize) < limits.vocab_size);
        let Some(token) = token else {
            let expected = format!("token ids below {} as names", limits.vocab_size);
            return Err(ApiError::field("logit_bias", expected, shown(&Value::from(id.as_str()))));
        };
        match bias.as_f64() {
            Some(bias) if bias == FORBIDS => Ok((token, f32::NEG_INFINITY)),
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias as f32)),
            _ => Err(ApiError::field(format!("logit_bias.{token}"), "-100 to 100", shown(bias))),
        }
    };
    let mut biases = biases.iter().map(one).collect::<Result<Vec<_>, _>>()?;
    biases.sort_unstable_by_key(|&(token, _)| token);
    Ok(biases)
}
