//! Tokens of one run beside another's, of another device or build.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// What a prompt brought.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Kept {
    pub kind: String,
    pub text: String,
    pub tokens: Vec<u32>,
}

/// A prompt whose tokens leave the other run's.
pub struct Difference<'a> {
    now: &'a Kept,
    /// The first token that differs, counted from 0.
    at: usize,
    /// Of the two best tokens there, in ln p; none where the text is shorter.
    pub gap: Option<f64>,
}

impl Difference<'_> {
    /// The fields of its line that say what differs.
    pub fn json(&self) -> Map<String, Value> {
        let Self { now, at, gap } = self;
        let line = json!({"case": "e2e.difference", "kind": now.kind, "prompt": now.text, "at": at, "top2_gap": gap});
        line.as_object().cloned().unwrap_or_default()
    }
}

pub fn read(path: &Path) -> Result<Vec<Kept>> {
    let shown = || format!("--against {}", path.display());
    let json = fs::read_to_string(path).with_context(shown)?;
    serde_json::from_str(&json).context("expected what --keep-tokens wrote").with_context(shown)
}

pub fn write(path: &Path, kept: &[Kept]) -> Result<()> {
    let json = serde_json::to_string(kept)?;
    fs::write(path, json + "\n").with_context(|| format!("--keep-tokens {}", path.display()))
}

/// Where two texts' tokens first differ; the end of the shorter one where it is the other's beginning.
pub fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let at = a.iter().zip(b).position(|(a, b)| a != b);
    at.or((a.len() != b.len()).then_some(a.len().min(b.len())))
}

/// Every difference, printed with `gap_of` its prompt and place.
///
/// # Errors
/// A prompt that `known` lacks, or from `gap_of`.
pub fn differences<'a>(
    known: &[Kept],
    now: &'a [Kept],
    mut gap_of: impl FnMut(&str, usize) -> Result<Option<f64>>,
) -> Result<Vec<Difference<'a>>> {
    let mut found = Vec::new();
    for now in now {
        let other = known.iter().find(|known| known.kind == now.kind && known.text == now.text);
        let other =
            other.with_context(|| format!("--against: expected the {} prompt {:?}", now.kind, now.text))?;
        let Some(at) = first_difference(&other.tokens, &now.tokens) else { continue };
        let gap = gap_of(&now.text, at)?;
        let apart =
            gap.map_or("no second token".into(), |gap| format!("the best two {gap:.4} apart in ln p"));
        canopy_e2e::say!("{}: token {at} differs, {apart}: {:?}", now.kind, short(&now.text));
        found.push(Difference { now, at, gap });
    }
    canopy_e2e::say!(
        "against the file: {} of {} prompts have the same tokens",
        now.len() - found.len(),
        now.len()
    );
    Ok(found)
}

fn short(text: &str) -> String {
    text.chars().take(40).collect()
}
