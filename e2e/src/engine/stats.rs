//! A stream's counters and stage times.

use std::collections::BTreeMap;
use std::ops::AddAssign;

pub use canopy_candle::PassCounts;

/// Wall seconds in each stage. A stream counts the whole stage of every round it took part in, the other streams'
/// share included: it is the time that the stream waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// Prompt.
    pub prefill: f64,
    /// Drafter: features taken in, blocks drafted; on the CPU with the commit of the round before going on beside it.
    pub draft: f64,
    /// Tree builder.
    pub build: f64,
    /// Target.
    pub verify: f64,
    /// Accept walk and sampling.
    pub accept: f64,
    /// States and caches, unless they go on beside the next draft.
    pub commit: f64,
}

impl StageTimes {
    /// Sum of all stages.
    pub fn total(&self) -> f64 {
        self.prefill + self.draft + self.build + self.verify + self.accept + self.commit
    }
}

impl AddAssign for StageTimes {
    fn add_assign(&mut self, other: Self) {
        self.prefill += other.prefill;
        self.draft += other.draft;
        self.build += other.build;
        self.verify += other.verify;
        self.accept += other.accept;
        self.commit += other.commit;
    }
}

/// What a stream's nodes of a round were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeShape {
    /// None but the root.
    Plain,
    /// A chain looked up in the stream's own text.
    Lookup,
    /// The drafter's best tokens.
    Chain,
    /// A tree of the drafter's.
    Tree,
}

impl NodeShape {
    /// The name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Lookup => "lookup",
            Self::Chain => "chain",
            Self::Tree => "tree",
        }
    }
}

/// Why a stream's nodes of a round were what they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The request's mode and budget say so.
    Asked,
    /// `auto` expects most tokens a second of it.
    Best,
    /// `auto` tries it to learn what it brings.
    Trial,
}

impl Reason {
    /// The name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Best => "best",
            Self::Trial => "trial",
        }
    }
}

/// What a stream verified in a round, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chosen {
    /// What the nodes were.
    pub shape: NodeShape,
    /// Nodes besides the root.
    pub nodes: usize,
    /// Why.
    pub reason: Reason,
}

/// A stream's counters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamStats {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that a saved prefix stood in for.
    pub cached_tokens: usize,
    /// Emitted tokens, the one that ended the generation (stop token, or last of a stop string) included.
    pub completion_tokens: usize,
    /// Decode rounds. The first token comes from the prompt's last chunk, which is none.
    pub rounds: usize,
    /// Verified nodes, roots included.
    pub nodes: usize,
    /// Sum of accepted path lengths, roots included.
    pub committed: usize,
    /// Rounds in which the drafter ran.
    pub drafted_rounds: usize,
    /// Accepted nodes of those rounds, roots not counted.
    pub drafted_tokens: usize,
    /// Rounds whose draft was looked up in the stream's own text (`auto` only).
    pub lookup_rounds: usize,
    /// Accepted nodes of those rounds, roots not counted.
    pub lookup_tokens: usize,
    /// Rounds by the number of drafted nodes verified: what `auto` chose, what a fixed budget came to.
    pub budgets: BTreeMap<usize, usize>,
    /// Rounds by what was verified, and why.
    pub choices: BTreeMap<Chosen, usize>,
    /// Seconds from submission to the first token.
    pub first_token: f64,
    /// Seconds from submission to the end.
    pub total: f64,
    /// Seconds per stage.
    pub stages: StageTimes,
}

impl StreamStats {
    /// Mean accepted path length, root included: tokens gained per round.
    pub fn acceptance_length(&self) -> f64 {
        self.committed as f64 / self.rounds.max(1) as f64
    }

    /// Mean number of drafted nodes per round.
    pub fn mean_budget(&self) -> f64 {
        (self.nodes - self.rounds) as f64 / self.rounds.max(1) as f64
    }

    /// Tokens per second after the first one.
    pub fn decode_rate(&self) -> f64 {
        let seconds = self.total - self.first_token;
        if seconds > 0.0 { self.completion_tokens.saturating_sub(1) as f64 / seconds } else { 0.0 }
    }
}

/// Counters of saved prefixes since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Saved prefixes held.
    pub entries: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Bytes that they may take.
    pub budget: usize,
    /// Prompts that started from a saved prefix.
    pub hits: u64,
    /// Prompts that could have and did not.
    pub misses: u64,
    /// Prompt tokens that were not read again.
    pub reused_tokens: u64,
    /// Prefixes dropped to make room.
    pub evictions: u64,
}

/// An engine's counters since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Slots of the target.
    pub slots: usize,
    /// Slots that no stream has.
    pub free_slots: usize,
    /// Streams in slots.
    pub running: usize,
    /// Streams that wait for one.
    pub waiting: usize,
    /// Rounds run.
    pub rounds: u64,
    /// Rounds whose drafts stayed with their device: the host waited for nothing between draft and verify.
    pub unseen_rounds: u64,
    /// Rounds that failed as a whole, panics included.
    pub failed_rounds: u64,
    /// Streams that ended because a value was not finite.
    pub non_finite: u64,
    /// Saved prefixes.
    pub cache: CacheStats,
    /// How the target's and the drafter's passes ran.
    pub passes: PassCounts,
}
