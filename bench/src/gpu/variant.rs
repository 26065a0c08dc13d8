//! Names of the kernels under test.

use canopy_kernels::tree_gdn::blocked::COLUMNS;
use canopy_kernels::tree_gdn::{Schedule, Solve};

/// Solves of the split design beside forward substitution.
pub const SERIES: [Solve; 3] = [Solve::Dense, Solve::Neumann, Solve::Squaring];

/// One kernel under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Gram matrices, then the blocked solve: two launches, f32 throughout.
    Split,
    /// The same with the explicit inverse (dense), or a series.
    Series(Solve),
    /// One launch, f32-class, with blocks of this many value columns.
    FusedA(usize, Schedule),
    /// One launch, f32-class, f32 rows, with blocks of this many value columns.
    Wide(usize),
    /// One launch, state rounded to bf16, bf16 outputs.
    FusedB(usize, Schedule),
    /// One launch, dense blocks on tensor cores, bf16 outputs, with blocks of this many value columns.
    Blocked(usize),
    /// Accepted path into the pool, with blocks of this many value columns.
    Commit(usize),
    /// Node by node, every node's state kept, with blocks of this many value columns.
    Snapshots(usize),
    /// Node by node along a chain, the state in registers, with blocks of this many value columns.
    Chain(usize),
    /// The accepted node's snapshot into the pool.
    SnapshotCommit,
    /// A round, f32-class, with blocks of this many value columns: the last round's path into the pool, then verify.
    Round(usize),
    /// The same in one launch.
    RoundInOne(usize),
}

impl Variant {
    /// Name in results.
    pub fn name(self) -> String {
        let schedule = |s| if s == Schedule::Levels { "levels" } else { "chains" };
        match self {
            Self::Split => "split-f32".into(),
            Self::Series(solve) => format!("split-{solve}"),
            Self::FusedA(columns, s) => format!("fused-a-v{columns}-{}", schedule(s)),
            Self::Wide(columns) => format!("fused-wide-v{columns}"),
            Self::FusedB(columns, s) => format!("fused-b-v{columns}-{}", schedule(s)),
            Self::Blocked(columns) => format!("blocked-b-v{columns}"),
            // what `launch::commit` launches
            Self::Commit(32) => "commit".into(),
            Self::Commit(columns) => format!("commit-v{columns}"),
            Self::Snapshots(columns) => format!("serial-snapshots-v{columns}"),
            Self::Chain(columns) => format!("serial-chain-v{columns}"),
            Self::SnapshotCommit => "serial-commit".into(),
            Self::Round(columns) => format!("commit-then-fused-a-v{columns}"),
            Self::RoundInOne(columns) => format!("commit-in-fused-a-v{columns}"),
        }
    }

    /// Case in results.
    pub fn case(self) -> &'static str {
        match self {
            Self::Split
            | Self::Series(_)
            | Self::FusedA(..)
            | Self::Wide(_)
            | Self::FusedB(..)
            | Self::Blocked(_) => "tree_gdn.verify",
            Self::Commit(_) => "tree_gdn.commit",
            Self::Snapshots(_) | Self::Chain(_) => "tree_gdn_serial.verify",
            Self::SnapshotCommit => "tree_gdn_serial.commit",
            Self::Round(_) | Self::RoundInOne(_) => "tree_gdn.round",
        }
    }

    /// Whether this writes a state pool, so that its outputs are not those of the other variants.
    pub fn commits(self) -> bool {
        matches!(self, Self::Commit(_) | Self::SnapshotCommit | Self::Round(_) | Self::RoundInOne(_))
    }

    /// Whether `o` is bf16 and the state is rounded.
    pub fn tier_b(self) -> bool {
        matches!(self, Self::FusedB(..) | Self::Blocked(_))
    }

    /// Every variant that a name stands for.
    pub fn all() -> Vec<Self> {
        Self::candidates(2, true)
    }

    /// Whether this is a commit by itself.
    pub fn is_commit(self) -> bool {
        matches!(self, Self::Commit(_) | Self::SnapshotCommit)
    }

    /// Type of the rows that it reads in a sweep.
    pub fn rows_dtype(self) -> &'static str {
        if matches!(self, Self::Wide(_)) { "f32" } else { "bf16" }
    }

    /// What may run on a tree: every verify, then both commits and whole rounds.
    pub fn candidates(depth: usize, is_chain: bool) -> Vec<Self> {
        let mut all = vec![Self::Split];
        all.extend(SERIES.map(Self::Series));
        all.extend(Self::fused(depth));
        all.extend(COLUMNS.map(Self::Blocked));
        all.extend([32, 64].map(Self::Wide));
        all.extend([32, 64].map(Self::Snapshots));
        if is_chain {
            all.extend([32, 64, 128].map(Self::Chain));
        }
        all.extend([32, 64, 128].map(Self::Commit));
        all.push(Self::SnapshotCommit);
        all.extend([32, 128].map(Self::Round));
        all.extend([32, 128].map(Self::RoundInOne));
        all
    }

    /// The one-launch solves of both tiers.
    pub fn fused(depth: usize) -> Vec<Self> {
        let schedules: &[Schedule] =
            if depth < 2 { &[Schedule::Levels] } else { &[Schedule::Levels, Schedule::Chains] };
        let of = |&schedule| {
            [32, 64, 128].map(|columns| [Self::FusedA(columns, schedule), Self::FusedB(columns, schedule)])
        };
        schedules.iter().flat_map(of).flatten().collect()
    }
}
