//! CPU forward: the trees one after another, then their lists.

use super::{Draft, Input, Lens, MASK_WORDS, Output, best_first, check, value};
use crate::Result;
use crate::accept_walk::stated_node;
use crate::error::expect_len;
use crate::top_tokens::{Row, row_words};
use crate::tree_gdn::Plan;

/// A tree built from a draft, without rows that are left over.
#[derive(Clone, Debug, PartialEq)]
pub struct Built {
    /// -1 for the root.
    pub parents: Vec<i32>,
    /// Each node's place in its depth's order of candidates; 0 for the root.
    pub ranks: Vec<u32>,
    /// Each node's depth.
    pub depths: Vec<usize>,
    /// The tokens of all nodes but the root.
    pub tokens: Vec<u32>,
}

/// The tree of at most `budget` nodes besides the root that `draft` names rows of `best` for.
///
/// # Errors
/// When `best` has not these rows.
pub fn tree(
    (k, best): (usize, &[u32]),
    draft: Draft,
    stated: Option<&[f64]>,
    budget: usize,
) -> Result<Built> {
    let rows = best.chunks(row_words(k)).skip(draft.first).take(draft.depths);
    let rows = rows.map(Row::new).collect::<Result<Vec<_>>>()?;
    expect_len(super::OP, "best", &[draft.depths], rows.len())?;
    let depths = rows.iter().take_while(|row| row.is_distribution());
    let candidates: Vec<Vec<_>> = depths.map(|row| row.candidates().collect()).collect();
    let log_prob = |depth: usize, rank: usize, _| {
        let (_, log_prob) = *candidates.get(depth - 1)?.get(rank)?;
        Some(stated.map_or(log_prob, |stated| stated[(depth - 1) * k + rank]))
    };
    let taken = best_first(budget, f64::NEG_INFINITY, log_prob);
    let named = taken.depths().iter().zip(&taken.ranks).skip(1);
    let tokens = named.map(|(depth, &rank)| candidates[depth - 1][rank as usize].0).collect();
    let depths = taken.depths().to_vec();
    Ok(Built { parents: taken.parents, ranks: taken.ranks, depths, tokens })
}

/// Builds every tree that has a draft, and leaves the lists of the others as they are; see the room's page.
///
/// # Errors
/// A wrong length, k outside 1 to 64, trees without nodes or with too many, drafts outside `best` or of more than 15 depths, plans without
/// room.
pub fn forward(input: Input<'_>, out: Output<'_>) -> Result<()> {
    let Input { k, best, drafts, stated, cu_nodes, lens } = input;
    let counts = Lens {
        best: best.len(),
        stated: stated.map(<[f64]>::len),
        lens: lens.len(),
        tokens: out.tokens.len(),
        nodes: out.nodes.len(),
        positions: out.positions.len(),
        parents: out.parents.len(),
        mask: out.mask.len(),
    };
    check(k, drafts, cu_nodes, &counts)?;
    expect_len(super::OP, "plan_at", &[cu_nodes.len()], out.plan_at.len())?;
    for (b, draft) in drafts.iter().enumerate() {
        let Some(draft) = *draft else { continue };
        let rows = cu_nodes[b] as usize..cu_nodes[b + 1] as usize;
        let mut built = tree((k, best), draft, stated, rows.len() - 1)?;
        let taken = built.parents.len();
        built.parents.resize(rows.len(), -1);
        built.ranks.resize(rows.len(), 0);
        built.depths.resize(rows.len(), 0);
        let root = out.tokens[rows.start];
        out.tokens[rows.clone()].fill(root);
        out.tokens[rows.start + 1..rows.start + taken].copy_from_slice(&built.tokens);
        out.parents[rows.clone()].copy_from_slice(&built.parents);
        let mask = &mut out.mask[rows.start * MASK_WORDS..rows.end * MASK_WORDS];
        mask.fill(0);
        for (node, row) in rows.enumerate() {
            let depth = built.depths[node];
            out.nodes[row] = stated_node(built.ranks[node], depth as u32);
            out.positions[row] = lens[b] + depth as i32;
            let mut at = Some(node);
            while let Some(above) = at {
                mask[node * MASK_WORDS + above / 32] |= 1 << (above % 32);
                at = usize::try_from(built.parents[above]).ok();
            }
        }
        let room = out.plan_at[b] as usize..out.plan_at[b + 1] as usize;
        if room.is_empty() {
            continue;
        }
        let plan = Plan::levels(&built.parents);
        let Some(words) = out.plans.get_mut(room).filter(|words| words.len() >= plan.words().len()) else {
            let expected = format!("room for {} words of plan {b}", plan.words().len());
            return value("plans", expected, format!("{} from {}", out.plan_at[b + 1], out.plan_at[b]));
        };
        let (of_plan, behind) = words.split_at_mut(plan.words().len());
        of_plan.copy_from_slice(plan.words());
        behind.fill(0);
    }
    Ok(())
}
