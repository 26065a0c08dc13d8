//! What a step tells about its streams.

use super::StreamStats;

/// Names a submitted request until its `Done` or `Failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// Where an emitted token came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenOrigin {
    /// A drafted node that the target accepted.
    Drafted,
    /// The target's own choice after the accepted path.
    Bonus,
}

/// One emitted token.
#[derive(Clone, Debug, PartialEq)]
pub struct EmittedToken {
    /// Id.
    pub id: u32,
    /// Where it came from.
    pub origin: TokenOrigin,
    /// ln p under the target's own distribution at temperature 1, when log-probabilities were asked for.
    pub logprob: Option<f32>,
    /// The most likely alternatives, best first.
    pub top: Vec<(u32, f32)>,
}

/// One node of a reported tree.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedNode {
    /// Token id.
    pub token: u32,
    /// Parent node, -1 for the root.
    pub parent: i32,
    /// Depth below the root.
    pub depth: u32,
    /// The drafter's probability at this position; 1 for the root.
    pub prob: f32,
    /// ln of the drafter's probability of the node's whole path; 0 for the root.
    pub log_prob: f32,
}

/// One round as the page shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundReport {
    /// Position of the root.
    pub start: usize,
    /// The tree.
    pub nodes: Vec<ReportedNode>,
    /// Accepted nodes, root first.
    pub path: Vec<usize>,
    /// The token after the path.
    pub bonus: u32,
}

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// max_tokens or the context's end.
    Length,
    /// Cancelled.
    Cancelled,
    /// The request's deadline passed.
    TimedOut,
}

/// One token of a prompt with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptToken {
    /// Id.
    pub id: u32,
    /// ln p under the target's own distribution at temperature 1; `None` for the first token, which nothing predicts.
    pub logprob: Option<f32>,
    /// The most likely tokens there, best first.
    pub top: Vec<(u32, f32)>,
}

/// What a step tells about a stream.
#[derive(Debug)]
pub enum Event {
    /// Every token of the prompt, once, before the first `Text`; when its log-probabilities were asked for.
    Prompt(Vec<PromptToken>),
    /// New tokens and the text they complete (whole characters; may be empty while a stop string may be forming).
    Text {
        /// Text.
        text: String,
        /// Tokens.
        tokens: Vec<EmittedToken>,
    },
    /// One round, when asked for.
    Round(RoundReport),
    /// The end.
    Done {
        /// Why.
        reason: FinishReason,
        /// Counters.
        stats: StreamStats,
    },
    /// The end, by an error of this stream alone.
    Failed(crate::Error),
}
