//! CPU forward.

use crate::error::{expect_len, expect_pool};
use crate::{AcceptedPaths, Error, Result};

/// Moves each accepted row of sequence b from `prefix_lens[b] + node` to `prefix_lens[b] + entry`, ascending, in
/// place. `cache` is `[slots, capacity, width]`.
///
/// # Errors
/// When `cache` or `prefix_lens` has another size, a slot lies outside the pool, a prefix length is negative, or a
/// sequence's committed rows and nodes do not fit into its slot. The cache is then untouched.
pub fn compact<T: Copy>(
    paths: &AcceptedPaths,
    prefix_lens: &[i32],
    width: usize,
    capacity: usize,
    cache: &mut [T],
) -> Result<()> {
    const OP: &str = "kv_compact";
    let value = |arg, expected: String, got: String| Err(Error::Value { op: OP, arg, expected, got });
    for (arg, size) in [("width", width), ("capacity", capacity)] {
        if size == 0 {
            return value(arg, "at least 1".into(), "0".into());
        }
    }
    let slots = expect_pool(OP, "cache", capacity * width, cache.len())?;
    expect_len(OP, "prefix_lens", &[paths.slots().len()], prefix_lens.len())?;
    paths.check_slots(OP, slots)?;
    for (b, (&slot, &prefix)) in paths.slots().iter().zip(prefix_lens).enumerate() {
        let nodes = paths.cu_nodes()[b + 1] - paths.cu_nodes()[b];
        if slot >= 0 && (prefix < 0 || prefix as usize + nodes as usize > capacity) {
            return value(
                "prefix_lens",
                format!("0 to capacity {capacity} - {nodes} nodes"),
                prefix.to_string(),
            );
        }
    }
    for (b, slot, path) in paths.iter() {
        let first = (slot * capacity + prefix_lens[b] as usize) * width;
        for (entry, row) in path.iter().enumerate() {
            let node = (row - paths.cu_nodes()[b]) as usize;
            // A path's nodes ascend, so node >= entry: no row is overwritten before it has moved.
            if node != entry {
                cache.copy_within(first + node * width..first + (node + 1) * width, first + entry * width);
            }
        }
    }
    Ok(())
}
