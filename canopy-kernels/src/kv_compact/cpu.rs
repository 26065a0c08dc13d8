//! CPU forward.

use crate::{AcceptedPaths, Result};

/// Moves each accepted row of sequence b from `prefix_lens[b] + node` to `prefix_lens[b] + entry`, ascending, in
/// place. `cache` is `[slots, capacity, width]`.
pub fn compact<T: Copy>(
    paths: &AcceptedPaths,
    prefix_lens: &[i32],
    width: usize,
    capacity: usize,
    cache: &mut [T],
) -> Result<()> {
    let _ = (paths, prefix_lens, width, capacity, cache);
    unimplemented!()
}
