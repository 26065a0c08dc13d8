//! What canopy tells besides OpenAI's answers: rounds and statistics.

use serde::Serialize;
use utoipa::ToSchema;

/// `canopy` in an answer or a chunk.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Canopy {
    /// One round, in a `canopy` event.
    Step(CanopyStep),
    /// Statistics, in the chunk with the finish reason and in a whole answer.
    End(CanopyEnd),
}

/// One round of one choice, or the step that follows the prompt.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CanopyStep {
    /// Which of the `n` choices.
    pub index: usize,
    /// What was emitted.
    pub tokens: Vec<TokenPiece>,
    /// The draft tree and what became of it; null for the token that follows the prompt.
    pub round: Option<Round>,
}

/// One emitted token. A character that several tokens share stands at the last of them.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenPiece {
    /// Id.
    pub id: u32,
    /// Text.
    pub text: String,
    /// `drafted`: a node of the tree that the target accepted; `bonus`: the target's own token after the path.
    pub origin: &'static str,
}

/// One round's draft tree and accepted path.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Round {
    /// Position of the root in prompt and answer.
    pub start: usize,
    /// The tree; parents come before children, node 0 is the root (the last round's bonus).
    pub nodes: Vec<RoundNode>,
    /// Accepted nodes, root first.
    pub path: Vec<usize>,
    /// The target's token after the path: the next round's root.
    pub bonus: RoundToken,
}

/// One node of a draft tree.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RoundNode {
    /// Token id.
    pub token: u32,
    /// The token's text.
    pub text: String,
    /// Parent node, -1 for the root.
    pub parent: i32,
    /// Depth below the root.
    pub depth: u32,
    /// The drafter's probability of the token at its position; 1 for the root.
    pub prob: f32,
    /// ln of the drafter's probability of the node's whole path; 0 for the root.
    pub log_prob: f32,
}

/// A token and its text.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RoundToken {
    /// Id.
    pub token: u32,
    /// Text.
    pub text: String,
}

/// Statistics and rounds of a whole answer.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CanopyEnd {
    /// Statistics, over all choices.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub stats: Option<CanopyStats>,
    /// Every step of every choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_reports: Option<Vec<CanopyStep>>,
}

/// Statistics of an answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CanopyStats {
    /// `ar`, `chain`, `tree` or `auto`.
    pub mode: &'static str,
    /// The budget that was asked for.
    pub budget: Option<usize>,
    /// The seed that the draws used, as a request takes it.
    pub seed: i64,
    /// Decode rounds.
    pub rounds: usize,
    /// Verified nodes, roots included.
    pub nodes: usize,
    /// Accepted path lengths, summed, roots included.
    pub committed: usize,
    /// Tokens gained per round.
    pub acceptance_length: f64,
    /// Emitted tokens that were drafted.
    pub drafted_tokens: usize,
    /// Emitted tokens that were the target's own.
    pub bonus_tokens: usize,
    /// Seconds from submission to the first token.
    pub first_token_seconds: f64,
    /// Seconds from submission to the end.
    pub total_seconds: f64,
    /// Tokens per second after the first one.
    pub tokens_per_second: f64,
    /// Seconds per stage.
    pub stage_seconds: StageSeconds,
    /// Rounds by what was verified, and why.
    pub node_choices: Vec<NodeChoice>,
}

/// Rounds that verified the same.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct NodeChoice {
    /// `plain`, `lookup` (of the text itself), `chain` or `tree`.
    pub shape: &'static str,
    /// Nodes besides the root.
    pub nodes: usize,
    /// `asked` by the request's mode and budget; in `auto` the `best` that is known, or a `trial`.
    pub reason: &'static str,
    /// How many.
    pub rounds: usize,
}

/// Seconds that the stream waited for each stage.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct StageSeconds {
    /// Prompt.
    pub prefill: f64,
    /// Drafter.
    pub draft: f64,
    /// Tree builder.
    pub build: f64,
    /// Target.
    pub verify: f64,
    /// Accept walk and sampling.
    pub accept: f64,
    /// States and caches.
    pub commit: f64,
}
