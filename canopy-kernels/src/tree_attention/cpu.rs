//! CPU forward.

use std::ops::Range;

use crate::attend::{Pools, Sight, attend};
use crate::error::{expect_len, expect_pool};
use crate::{AttnDims, DraftTree, Error, Result, TreeBatch};

/// Row i of sequence b sees rows `0..prefix_lens[b]` of its slot and then its own root-to-row path, whose keys
/// lie at `prefix_lens[b] + node`. `q`, `out` `[N, Hq, D]`; `k_cache`, `v_cache` `[slots, capacity, Hkv, D]`. f32.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// Queries, RoPE applied.
    pub q: &'a [f32],
    /// Key pool.
    pub k_cache: &'a [f32],
    /// Value pool.
    pub v_cache: &'a [f32],
    /// Rows per slot in the pools.
    pub capacity: usize,
}

impl<'a> AttentionInput<'a> {
    /// Checks every buffer against `rows` rows; returns the pools and their slots.
    pub(crate) fn check(
        self,
        op: &'static str,
        dims: AttnDims,
        rows: usize,
        out: &[f32],
    ) -> Result<(Pools<'a>, usize)> {
        let Self { q, k_cache: keys, v_cache: values, capacity } = self;
        expect_len(op, "q", &[rows, dims.q_heads, dims.head_dim], q.len())?;
        expect_len(op, "out", &[rows, dims.q_heads, dims.head_dim], out.len())?;
        if capacity == 0 {
            let expected = "at least 1".into();
            return Err(Error::Value { op, arg: "capacity", expected, got: "0".into() });
        }
        let slots = expect_pool(op, "k_cache", capacity * dims.kv_width(), keys.len())?;
        expect_len(op, "v_cache", &[slots, capacity, dims.kv_heads, dims.head_dim], values.len())?;
        Ok((Pools { dims, q, keys, values, capacity }, slots))
    }
}

/// Attention of every drafted row.
///
/// # Errors
/// When a buffer has another size, a slot lies outside the pool, a prefix length is negative, or a sequence's
/// committed rows and nodes do not fit into its slot.
pub fn verify(
    dims: AttnDims,
    batch: &TreeBatch,
    prefix_lens: &[i32],
    input: AttentionInput<'_>,
    out: &mut [f32],
) -> Result<()> {
    const OP: &str = "tree_attention verify";
    expect_len(OP, "prefix_lens", &[batch.sequences()], prefix_lens.len())?;
    let (pools, slots) = input.check(OP, dims, batch.rows(), out)?;
    batch.check_slots(OP, slots)?;
    for ((_, tree, slot), &prefix) in batch.iter().zip(prefix_lens) {
        let fits = prefix >= 0 && prefix as usize + tree.len() <= input.capacity;
        if slot.is_some() && !fits {
            let expected = format!("0 to capacity {} - {} nodes", input.capacity, tree.len());
            return Err(Error::Value { op: OP, arg: "prefix_lens", expected, got: prefix.to_string() });
        }
    }

    let plans: Vec<_> =
        batch.iter().zip(prefix_lens).map(|((_, tree, _), &prefix)| plan(tree, prefix)).collect();
    let mut rows = Vec::with_capacity(batch.rows());
    for ((_, tree, slot), (plan, pool_rows)) in batch.iter().zip(&plans) {
        let sight = |node: usize, slot| {
            let (direct, path) = &plan[node];
            let path = &pool_rows[path.clone()];
            Sight { slot, first: 0, end: direct + path.len(), direct: *direct, path }
        };
        rows.extend((0..tree.len()).map(|node| slot.map(|slot| sight(node, slot))));
    }
    attend(pools, &rows, out);
    Ok(())
}

/// For every node the position up to which its keys lie in position order, and the range of the second list that
/// has the pool rows of the rest of its path.
fn plan(tree: &DraftTree, prefix: i32) -> (Vec<(usize, Range<usize>)>, Vec<u32>) {
    let prefix = prefix.max(0) as usize;
    let mut pool_rows = Vec::new();
    let straight = straight(tree);
    let mut plan = Vec::with_capacity(tree.len());
    for (node, &straight) in straight.iter().enumerate() {
        let start = pool_rows.len();
        let mut next = Some(node);
        while let Some(node) = next.filter(|&node| node >= straight) {
            pool_rows.push((prefix + node) as u32);
            next = tree.parent(node);
        }
        pool_rows[start..].reverse();
        plan.push((prefix + straight, start..pool_rows.len()));
    }
    (plan, pool_rows)
}

/// How many nodes of each node's path, from the root on, are the nodes 0, 1, 2 ...: their keys lie in position
/// order already.
fn straight(tree: &DraftTree) -> Vec<usize> {
    let mut straight = vec![1; tree.len()];
    for node in 1..tree.len() {
        let parent = tree.parent(node).unwrap_or(0);
        let extends = parent + 1 == node && straight[parent] == node;
        straight[node] = if extends { node + 1 } else { straight[parent] };
    }
    straight
}
