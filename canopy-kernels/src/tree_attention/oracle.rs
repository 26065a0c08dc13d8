//! The slow truth, frozen: each row's keys listed by following its path, one softmax over the list, float64.

use crate::{AttnDims, TreeBatch};

/// The pools and how many rows a slot has.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// `[slots, capacity, Hkv, D]`.
    pub keys: &'a [f32],
    /// `[slots, capacity, Hkv, D]`.
    pub values: &'a [f32],
    /// Rows per slot.
    pub capacity: usize,
}

/// What `cpu::verify` computes, `[N, Hq, D]`.
pub fn verify(
    dims: AttnDims,
    batch: &TreeBatch,
    prefix_lens: &[i32],
    q: &[f32],
    cache: Cache<'_>,
) -> Vec<f64> {
    let mut out = vec![0.0; batch.rows() * dims.q_width()];
    for ((first, tree, slot), &prefix) in batch.iter().zip(prefix_lens) {
        let Some(slot) = slot else { continue };
        for node in 0..tree.len() {
            let mut seen: Vec<usize> = (0..prefix as usize).collect();
            seen.extend(tree.path(node).iter().map(|node| prefix as usize + node));
            for head in 0..dims.q_heads {
                let at = ((first + node) * dims.q_heads + head) * dims.head_dim;
                let row = |pool_row: &usize| {
                    ((slot * cache.capacity + pool_row) * dims.kv_heads + dims.kv_head(head)) * dims.head_dim
                };
                let score = |pool_row: &usize| {
                    let terms =
                        (0..dims.head_dim).map(|d| q[at + d] as f64 * cache.keys[row(pool_row) + d] as f64);
                    terms.sum::<f64>() / (dims.head_dim as f64).sqrt()
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                for d in 0..dims.head_dim {
                    let terms = seen.iter().zip(&weights).map(|(s, w)| w * cache.values[row(s) + d] as f64);
                    out[at + d] = terms.sum::<f64>() / weights.iter().sum::<f64>();
                }
            }
        }
    }
    out
}
