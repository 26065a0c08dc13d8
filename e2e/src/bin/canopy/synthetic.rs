//! Flags of synthetic acceptance, and how it is told beside every figure.

use anyhow::{Context, Result};
use canopy_e2e::engine::SyntheticAcceptance;
use serde_json::{Value, json};

/// Acceptance by a stated model instead of the target's choice
#[derive(clap::Args, Debug, Default)]
pub struct SyntheticArgs {
    /// Accepts drafted nodes by a stated model, for timing random weights: the drafter's best token is the target's with the
    /// one probability per depth that gives whole chains this mean acceptance length, the bonus token included. All other
    /// work of a round stays real
    #[arg(long, value_name = "LENGTH", conflicts_with = "synthetic_curve")]
    pub synthetic_acceptance: Option<f64>,
    /// The same with a probability for every depth: that the drafter's best token is the target's once the tokens before it
    /// are; deeper ones have the last
    #[arg(long, value_delimiter = ',', value_name = "P,P,...")]
    pub synthetic_curve: Vec<f64>,
    /// Of the target's tokens that the drafter's best one misses, the shares that its second, third ... best one is
    #[arg(long, value_delimiter = ',', default_values_t = SyntheticAcceptance::SHARES, value_name = "P,P,...")]
    pub synthetic_siblings: Vec<f64>,
    /// Factor on all probabilities behind a node that was not the drafter's best
    #[arg(long, default_value_t = SyntheticAcceptance::OFF_SPINE, value_name = "P")]
    pub synthetic_off_spine: f64,
    /// Seed of the draws, which depend on it, the stream and the position alone
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub synthetic_seed: u64,
}

impl SyntheticArgs {
    /// True when a model is asked for.
    pub fn is_set(&self) -> bool {
        self.synthetic_acceptance.is_some() || !self.synthetic_curve.is_empty()
    }

    /// The model asked for, for a drafter of `horizon` drafted tokens.
    pub fn model(&self, horizon: Option<usize>) -> Result<Option<SyntheticAcceptance>> {
        if !self.is_set() {
            return Ok(None);
        }
        let horizon = horizon.context("--synthetic-acceptance: expected a drafter, got none")?;
        let model = match self.synthetic_acceptance {
            Some(length) => SyntheticAcceptance::from_length(length, horizon)?,
            None => SyntheticAcceptance::from_curve(self.synthetic_curve.clone())?,
        };
        let model = model.with_siblings(self.synthetic_siblings.clone(), self.synthetic_off_spine)?;
        Ok(Some(model.with_seed(self.synthetic_seed)))
    }

    /// The flags as a record; `null` without a model.
    pub fn json(&self) -> Value {
        match self.is_set() {
            false => Value::Null,
            true => json!({
                "acceptance": self.synthetic_acceptance,
                "curve": self.synthetic_curve,
                "siblings": self.synthetic_siblings,
                "off_spine": self.synthetic_off_spine,
                "seed": self.synthetic_seed,
            }),
        }
    }
}

/// The model in one line, for drafts of `horizon` tokens.
pub fn line(model: &SyntheticAcceptance, horizon: usize) -> String {
    let list = |values: &[f64]| values.iter().map(|p| format!("{p:.3}")).collect::<Vec<_>>().join(",");
    format!(
        "synthetic acceptance: {} a depth (chains of {horizon}: {:.2}), siblings {} of the misses, x{} behind a sibling, seed {}",
        list(model.curve()),
        model.chain_length(horizon),
        list(model.shares()),
        model.off_spine(),
        model.seed()
    )
}
