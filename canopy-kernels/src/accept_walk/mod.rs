//! The greedy accept walk of packed draft trees, where their logits are: no row of logits, and no best token, has to reach the host before
//! the accepted paths can be committed.
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `parents` | `[N]` | i32 | in | tree-local parents, below 0 for a root |
//! | `tokens` | `[N]` | u32 | in | every node's token |
//! | `cu_nodes` | `[B + 1]` | i32 | in | first row of every tree |
//! | `best` | `[N, 4]` | u32 | in | [`crate::top_tokens`] of the rows' logits for k = 1 |
//! | `nodes`, `wanted` | `[N]`, `[B, 2, most]` | u32, i32 | in | [`Stated`], where a model says what is accepted |
//! | `words` | `[B, 2 + 2 most]` | u32 | out | per tree [`Row`] as words, 0 behind its end |
//! | `rows` | `[N]` | i32 | out | packed rows of the accepted paths, one tree after another, -1 behind them |
//! | `cu_rows` | `[B + 1]` | i32 | out | where each path starts in `rows` |
//!
//! The walk starts at node 0, goes on to the child that carries the best token of the row it stands on, and ends where there is none
//! (children of one node carry different tokens). It visits at most `most` nodes. A visited row that is not finite fails its tree: its path is empty, so that nothing is committed.
//!
//! Invariants:
//! 1. Paths and tokens are those of the oracle's walk. (`tests::walks_equal_the_oracle`)
//! 2. A tree's words depend on its own rows alone. (`tests::trees_alone_equal_trees_together`)
//! 3. Rows off the path are not looked at; a visited one that is not finite fails its own tree. (`tests::only_visited_rows_can_fail`)
//! 4. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA one CTA walks up to 1,024 trees of at most 256 nodes. (`tests/gpu/accept_walk.rs`)

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;

use crate::error::expect_len;
use crate::{DraftTree, Error, Result, top_tokens};

const OP: &str = "accept-walk";

/// Words of one tree before its nodes.
const HEAD: usize = 2;

/// Words of a row of `best`.
pub const BEST_WORDS: usize = top_tokens::row_words(1);

/// Words of one tree of which at most `most` nodes are visited.
pub const fn row_words(most: usize) -> usize {
    HEAD + 2 * most
}

/// A model that says which child is accepted, in place of the rows' best tokens: the one whose rank is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Stated<'a> {
    /// `[N]`: [`stated_node`] of every node.
    pub nodes: &'a [u32],
    /// `[B, 2, most]`: the rank wanted at depth d (entry d - 1) behind nodes of rank 0 alone, and behind others; -1 for none.
    pub wanted: &'a [i32],
}

/// A node's rank and depth in one word.
pub const fn stated_node(rank: u32, depth: u32) -> u32 {
    rank | depth << 16
}

/// A node's rank and depth, of one word.
pub const fn stated_parts(node: u32) -> (u32, u32) {
    (node & 0xffff, node >> 16)
}

/// What the walk of one tree gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The nodes it stood on, root first.
    pub path: Vec<usize>,
    /// Its token behind each of them, of a failed tree one fewer.
    pub tokens: Vec<u32>,
    /// The last node's row is not finite: nothing is accepted.
    pub failed: bool,
}

impl Row {
    /// Reads the words of one tree.
    ///
    /// # Errors
    /// When there are not `2 + 2 most` words, or more nodes than that.
    pub fn new(words: &[u32]) -> Result<Self> {
        let most = words.len().saturating_sub(HEAD) / 2;
        let visited = words.first().map_or(0, |&visited| visited as usize);
        if words.len() != row_words(most) || !(1..=most).contains(&visited) {
            let (expected, got) = (
                "2 + 2 most words of 1 to most nodes".into(),
                format!("{} words of {visited} nodes", words.len()),
            );
            return Err(Error::Value { op: OP, arg: "row", expected, got });
        }
        let failed = words[1] != 0;
        let (nodes, tokens) = words[HEAD..].split_at(most);
        Ok(Self {
            path: nodes[..visited].iter().map(|&node| node as usize).collect(),
            tokens: tokens[..visited - usize::from(failed)].to_vec(),
            failed,
        })
    }
}

/// What is walked.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// `[N]`.
    pub parents: &'a [i32],
    /// `[N]`.
    pub tokens: &'a [u32],
    /// `[B + 1]`.
    pub cu_nodes: &'a [i32],
    /// `[N, 4]`.
    pub best: &'a [u32],
    /// Who says what is accepted, if not the best tokens.
    pub stated: Option<Stated<'a>>,
    /// Most nodes of a path.
    pub most: usize,
}

/// What a walk gives.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[B, 2 + 2 most]`.
    pub words: &'a mut [u32],
    /// `[N]`.
    pub rows: &'a mut [i32],
    /// `[B + 1]`.
    pub cu_rows: &'a mut [i32],
}

/// Element counts of the arguments, in the order of the room's page.
struct Lens {
    parents: usize,
    tokens: usize,
    best: usize,
    stated: Option<(usize, usize)>,
    words: usize,
    rows: usize,
    cu_rows: usize,
}

/// Checks the arguments of both devices; returns B.
fn check(cu_nodes: &[i32], most: usize, lens: &Lens) -> Result<usize> {
    let value = |arg, expected: String, got: String| Err(Error::Value { op: OP, arg, expected, got });
    if !(1..=DraftTree::MAX_NODES).contains(&most) {
        return value("most", format!("1 to {}", DraftTree::MAX_NODES), most.to_string());
    }
    let (Some(&first), Some(&last)) = (cu_nodes.first(), cu_nodes.last()) else {
        return value("cu_nodes", "at least one entry".into(), "none".into());
    };
    let of_a_tree = |pair: &[i32]| (1..=DraftTree::MAX_NODES as i32).contains(&(pair[1] - pair[0]));
    if first != 0 || !cu_nodes.windows(2).all(of_a_tree) {
        let expected = format!("rising from 0 by 1 to {} nodes a tree", DraftTree::MAX_NODES);
        return value("cu_nodes", expected, format!("{cu_nodes:?}"));
    }
    let (rows, trees) = (last as usize, cu_nodes.len() - 1);
    expect_len(OP, "parents", &[rows], lens.parents)?;
    expect_len(OP, "tokens", &[rows], lens.tokens)?;
    expect_len(OP, "best", &[rows, BEST_WORDS], lens.best)?;
    if let Some((nodes, wanted)) = lens.stated {
        expect_len(OP, "stated nodes", &[rows], nodes)?;
        expect_len(OP, "wanted ranks", &[trees, 2, most], wanted)?;
    }
    expect_len(OP, "words", &[trees, row_words(most)], lens.words)?;
    expect_len(OP, "rows", &[rows], lens.rows)?;
    expect_len(OP, "cu_rows", &[trees + 1], lens.cu_rows)?;
    Ok(trees)
}
