//! The slow truth, frozen: each node's path written out as one sequence of rows behind the conv state, float64.

use crate::{AcceptedPaths, ConvDims, TreeBatch};

/// What `cpu::verify` computes, `[N, C]`.
pub fn verify(dims: ConvDims, batch: &TreeBatch, x: &[f32], weight: &[f32], conv_state: &[f32]) -> Vec<f64> {
    let mut out = Vec::new();
    for (first, tree, slot) in batch.iter() {
        for node in 0..tree.len() {
            for c in 0..dims.channels {
                let Some(slot) = slot else {
                    out.push(0.0);
                    continue;
                };
                let old = (0..3).map(|row| conv_state[(slot * 3 + row) * dims.channels + c]);
                let path = tree.path(node);
                let new = path.iter().map(|node| x[(first + node) * dims.channels + c]);
                let sequence: Vec<f32> = old.chain(new).collect();
                let last_four = &sequence[sequence.len() - 4..];
                let sum: f64 = (0..4).map(|tap| weight[4 * c + tap] as f64 * last_four[tap] as f64).sum();
                out.push(sum / (1.0 + (-sum).exp()));
            }
        }
    }
    out
}

/// The pool that `cpu::commit` leaves, `[slots, 3, C]`.
pub fn commit(dims: ConvDims, paths: &AcceptedPaths, x: &[f32], conv_state: &[f32]) -> Vec<f32> {
    let mut pool = conv_state.to_vec();
    for (_, slot, path) in paths.iter() {
        for c in 0..dims.channels {
            let at = |row: usize| (slot * 3 + row) * dims.channels + c;
            let mut sequence: Vec<f32> = (0..3).map(|row| conv_state[at(row)]).collect();
            sequence.extend(path.iter().map(|&row| x[row as usize * dims.channels + c]));
            for row in 0..3 {
                pool[at(row)] = sequence[sequence.len() - 3 + row];
            }
        }
    }
    pool
}
