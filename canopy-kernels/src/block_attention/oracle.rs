//! The slow truth, frozen: every key of the slot tested against the mask, one softmax over what is left, float64.

use crate::AttnDims;

/// One block: `rows` rows after `context` rows of slot `slot`; `None` is padding.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The pool slot.
    pub slot: Option<usize>,
    /// Context rows.
    pub context: usize,
}

/// Pools `[slots, capacity, Hkv, D]`, and the mask's two parts.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// Keys.
    pub keys: &'a [f32],
    /// Values.
    pub values: &'a [f32],
    /// Rows per slot.
    pub capacity: usize,
    /// Keys at this distance or further are hidden.
    pub window: Option<usize>,
    /// Later keys are hidden.
    pub causal: bool,
}

/// What `cpu::forward` computes, `[B block_size, Hq, D]`.
pub fn forward(dims: AttnDims, blocks: &[Block], block_size: usize, q: &[f32], scene: Scene<'_>) -> Vec<f64> {
    let mut out = vec![0.0; q.len()];
    for (index, out) in out.chunks_mut(dims.head_dim).enumerate() {
        let (row, head) = (index / dims.q_heads, index % dims.q_heads);
        let block = blocks[row / block_size];
        let Some(slot) = block.slot else { continue };
        let position = block.context + row % block_size;
        let q = &q[index * dims.head_dim..][..dims.head_dim];
        let at =
            |key: usize| ((slot * scene.capacity + key) * dims.kv_heads + dims.kv_head(head)) * dims.head_dim;
        let seen: Vec<usize> = (0..block.context + block_size)
            .filter(|&key| !scene.causal || key <= position)
            .filter(|&key| scene.window.is_none_or(|window| key.abs_diff(position) < window))
            .collect();
        let score = |&key: &usize| {
            let terms = q.iter().enumerate().map(|(d, &q)| q as f64 * scene.keys[at(key) + d] as f64);
            terms.sum::<f64>() / (dims.head_dim as f64).sqrt()
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        for (d, out) in out.iter_mut().enumerate() {
            let terms = seen.iter().zip(&weights).map(|(&key, w)| w * scene.values[at(key) + d] as f64);
            *out = terms.sum::<f64>() / weights.iter().sum::<f64>();
        }
    }
    out
}
