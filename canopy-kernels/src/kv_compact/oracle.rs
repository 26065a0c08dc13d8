//! The slow truth, frozen: every accepted row gathered from an untouched copy of the cache.

use crate::AcceptedPaths;

/// The cache that `cpu::compact` leaves, `[slots, capacity, width]`.
pub fn compact<T: Copy>(
    paths: &AcceptedPaths,
    prefix_lens: &[i32],
    width: usize,
    capacity: usize,
    cache: &[T],
) -> Vec<T> {
    let mut moved = cache.to_vec();
    for (b, slot, rows) in paths.iter() {
        for (entry, &row) in rows.iter().enumerate() {
            let node = (row - paths.cu_nodes()[b]) as usize;
            for i in 0..width {
                let at = |offset: usize| (slot * capacity + prefix_lens[b] as usize + offset) * width + i;
                moved[at(entry)] = cache[at(node)];
            }
        }
    }
    moved
}
