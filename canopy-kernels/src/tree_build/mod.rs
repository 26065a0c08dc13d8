//! Draft trees built where their candidates are: from the best tokens of a draft's rows to the lists that a verify pass reads, without the
//! host between the two.
//!
//! Under the drafter's product of marginals the most probable set of prefixes is found by taking, again and again, the best entry among
//! every taken node's next child (DDTree, arXiv 2604.12989, algorithm 1; [`best_first`]). `ln p` of a candidate is
//! `min(x_i - x_best - ln_sum, 0)` in f64 ([`crate::top_tokens::Row::candidates`]) or the entry of `stated`; a node's joint log-probability
//! is the f64 sum in path order. Equal ones go by the tuple of ranks along the path, equal logits by token. These are IEEE sums without a
//! product, so every device builds the same tree.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `best` | `[R, 2 + 2 k]` | u32 | in | [`crate::top_tokens`] of the drafts' logits |
//! | `drafts` | `[B]` | [`Draft`] | in | the rows of `best` that a tree is built from; a tree without stays as it is |
//! | `stated` | `[D, k]` | f64 | in | `ln p` by depth and rank in place of the drafter's own |
//! | `cu_nodes` | `[B + 1]` | i32 | in | first row of every tree, whose budget is its rows but one |
//! | `lens` | `[B]` | i32 | in | position of every root |
//! | `tokens` | `[N]` | u32 | in and out | every node's token; the root's stays |
//! | `nodes` | `[N]` | u32 | out | [`crate::accept_walk::stated_node`] of every node |
//! | `positions` | `[N]` | i32 | out | `lens` plus depth |
//! | `parents` | `[N]` | i32 | out | tree-local parents, -1 for a root |
//! | `mask` | `[N, 8]` | u32 | out | ancestors and self |
//! | `plans` | from `plan_at` | u32 | out | [`crate::tree_gdn::Plan`] of every tree, 0 behind it |
//!
//! A row without a distribution ends its tree before that depth, tokens of probability 0 are no candidates. Where candidates run out before
//! the budget is spent the rows left over are roots of their own: they carry the root's token at its position, see themselves and the
//! committed rows alone, and no accept walk comes to them.
//!
//! A node has at most [`MOST_DEPTH`] ancestors, so that a plan is one step a level. Lists and launches are laid out for
//! [`crate::DraftTree::broom`], the tree of the same nodes and depths whose plan is longest.
//!
//! Invariants:
//! 1. Nodes and order are those of all prefixes sorted. (`tests::trees_are_the_sorted_prefixes`)
//! 2. Lists and plans are those of the tree that was built. (`tests::lists_are_those_of_the_tree`)
//! 3. A tree depends on its own rows alone. (`tests::trees_alone_equal_trees_together`)
//! 4. Rows without a distribution shorten their own tree; what is left over are roots. (`tests::what_is_left_over_are_roots`)
//! 5. A broom's plan is the longest. (`tests::no_plan_is_longer_than_a_brooms`)
//! 6. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA one launch, a CTA a tree (`tests/gpu/tree_build.rs`), whose planner also runs on the host:
//! `launch::tests::a_ctas_plans_are_those_of_the_host_word_for_word`.

pub mod cpu;
mod heap;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
mod order;
#[cfg(test)]
mod tests;

pub use order::{BestFirst, best_first};

use crate::error::expect_len;
use crate::top_tokens::{MOST_K_ON_CUDA, row_words};
use crate::{DraftTree, Error, Result};

const OP: &str = "tree-build";

/// Most depth of a built tree.
pub const MOST_DEPTH: usize = 15;

/// Words of one node's ancestor mask.
const MASK_WORDS: usize = DraftTree::MAX_NODES / 32;

/// The rows of `best` that a tree is built from: of its depths 1 to `depths`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The first one.
    pub first: usize,
    /// Their number, 1 to [`MOST_DEPTH`].
    pub depths: usize,
}

impl Draft {
    /// What a device reads of every tree: `[B, 2]`, -1 and 0 without a draft.
    pub fn words(drafts: &[Option<Self>]) -> Vec<i32> {
        let words =
            |draft: &Option<Self>| draft.map_or([-1, 0], |draft| [draft.first as i32, draft.depths as i32]);
        drafts.iter().flat_map(words).collect()
    }
}

/// What trees are built from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Candidates of a row.
    pub k: usize,
    /// `[R, 2 + 2 k]`.
    pub best: &'a [u32],
    /// `[B]`.
    pub drafts: &'a [Option<Draft>],
    /// `[D, k]`, D at least the depths of every draft.
    pub stated: Option<&'a [f64]>,
    /// `[B + 1]`.
    pub cu_nodes: &'a [i32],
    /// `[B]`.
    pub lens: &'a [i32],
}

/// The lists of built trees.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[N]`.
    pub tokens: &'a mut [u32],
    /// `[N]`.
    pub nodes: &'a mut [u32],
    /// `[N]`.
    pub positions: &'a mut [i32],
    /// `[N]`.
    pub parents: &'a mut [i32],
    /// `[N, 8]`.
    pub mask: &'a mut [u32],
    /// All plans.
    pub plans: &'a mut [u32],
    /// `[B + 1]`: the first word of every plan; a tree without words for one gets none.
    pub plan_at: &'a [i32],
}

/// Element counts of the arguments that both devices have, in the order of the room's page.
struct Lens {
    best: usize,
    stated: Option<usize>,
    lens: usize,
    tokens: usize,
    nodes: usize,
    positions: usize,
    parents: usize,
    mask: usize,
}

fn value<T>(arg: &'static str, expected: String, got: String) -> Result<T> {
    Err(Error::Value { op: OP, arg, expected, got })
}

/// Checks the arguments of both devices.
fn check(k: usize, drafts: &[Option<Draft>], cu_nodes: &[i32], lens: &Lens) -> Result<()> {
    if !(1..=MOST_K_ON_CUDA).contains(&k) {
        return value("k", format!("1 to {MOST_K_ON_CUDA}"), k.to_string());
    }
    let of_a_tree = |pair: &[i32]| (1..=DraftTree::MAX_NODES as i32).contains(&(pair[1] - pair[0]));
    if cu_nodes.first() != Some(&0) || !cu_nodes.windows(2).all(of_a_tree) {
        let expected = format!("rising from 0 by 1 to {} nodes a tree", DraftTree::MAX_NODES);
        return value("cu_nodes", expected, format!("{cu_nodes:?}"));
    }
    let (trees, rows) = (cu_nodes.len() - 1, cu_nodes[cu_nodes.len() - 1] as usize);
    expect_len(OP, "drafts", &[trees], drafts.len())?;
    let candidates = lens.best / row_words(k);
    expect_len(OP, "best", &[candidates, row_words(k)], lens.best)?;
    for draft in drafts.iter().flatten() {
        if !(1..=MOST_DEPTH).contains(&draft.depths) || draft.first + draft.depths > candidates {
            let expected = format!("1 to {MOST_DEPTH} of {candidates} rows");
            return value("drafts", expected, format!("{} from {}", draft.depths, draft.first));
        }
    }
    if let Some(stated) = lens.stated {
        let depths = drafts.iter().flatten().map(|draft| draft.depths).max().unwrap_or(0);
        expect_len(OP, "stated", &[depths.max(stated / k), k], stated)?;
    }
    expect_len(OP, "lens", &[trees], lens.lens)?;
    expect_len(OP, "tokens", &[rows], lens.tokens)?;
    expect_len(OP, "nodes", &[rows], lens.nodes)?;
    expect_len(OP, "positions", &[rows], lens.positions)?;
    expect_len(OP, "parents", &[rows], lens.parents)?;
    expect_len(OP, "mask", &[rows, MASK_WORDS], lens.mask)
}
