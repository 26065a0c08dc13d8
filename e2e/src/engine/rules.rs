//! What a request may change about the target's choice of tokens.

use serde_json::Value;

/// Penalties on tokens that the text already has, applied to a row of logits before anything is drawn from it.
///
/// `repetition` looks at prompt and generated tokens: a positive logit is divided by it, a negative one multiplied.
/// `presence` is then subtracted once, `frequency` once per occurrence, for generated tokens only. At a drafted node
/// the counts are those of its own root path, so that a drafted text is the undrafted one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Above 0, 1 = off.
    pub repetition: f32,
    /// From -2 to 2, 0 = off.
    pub presence: f32,
    /// From -2 to 2, 0 = off.
    pub frequency: f32,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

impl Penalties {
    /// True when they change nothing.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }
}

/// The language that a generation's text must belong to.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Constraint {
    /// Any text.
    #[default]
    None,
    /// One JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema(Value),
    /// A grammar in llguidance's dialect of Lark.
    Grammar(String),
}

/// A generation that starts inside a thought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// The tokens that end the thought, at least one; a constraint and `min_tokens` hold from behind them on.
    pub end: Vec<u32>,
    /// Most tokens of the thought, `end` not counted; then `end` is all that the target may choose. `None` = no limit.
    pub budget: Option<usize>,
}
