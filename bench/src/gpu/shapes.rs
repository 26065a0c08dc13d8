//! Trees by the name of their shape.

use anyhow::{Result, bail};
use canopy_kernels::DraftTree;

/// Seed of the seeded shapes.
const SEED: u64 = 3;

/// The tree of a shape with at most `nodes` nodes; `None` where the shape has no tree of about that size.
///
/// # Errors
/// For an unknown shape, or too many nodes.
pub fn tree(shape: &str, nodes: usize) -> Result<Option<DraftTree>> {
    let balanced = |k: usize| {
        let size = |depth: u32| (0..=depth).map(|level| k.pow(level)).sum::<usize>();
        let depth = (0..8).take_while(|&depth| size(depth) <= nodes).last();
        depth.filter(|&depth| depth > 0).map(|depth| DraftTree::balanced(k, depth as usize)).transpose()
    };
    Ok(match shape {
        "chain" => Some(DraftTree::chain(nodes)?),
        "top2" => balanced(2)?,
        "top4" => balanced(4)?,
        "skewed" if nodes >= 3 => Some(DraftTree::skewed(2, (nodes - 1) / 2)?),
        "bole" if nodes >= 8 => Some(DraftTree::bole(nodes, SEED)?),
        "specla" if nodes == 16 || nodes == 32 => {
            Some(DraftTree::specla(4, if nodes == 16 { 12 } else { 24 }, nodes, SEED)?)
        }
        "skewed" | "bole" | "specla" => None,
        other => bail!("--shapes: expected chain, top2, top4, skewed, bole or specla, got: {other:?}"),
    })
}

/// A spine down to `depth` whose every node has `width` children, depth first: a chain for width 1. `None` outside 3 to 256 nodes.
///
/// # Errors
/// Those of [`DraftTree::skewed`].
pub fn comb(depth: usize, width: usize) -> Result<Option<DraftTree>> {
    if !(3..=DraftTree::MAX_NODES).contains(&(1 + width * depth)) {
        return Ok(None);
    }
    let tree = DraftTree::skewed(width, depth)?;
    Ok(Some(tree.reorder(&tree.dfs_preorder())?.0))
}
