//! KV cache ops, in place.

use candle_core::{Result, Tensor};

use crate::DevicePaths;

/// Writes packed rows into a pool: rows `cu_rows[b]..cu_rows[b + 1]` of `rows` `[N, Hkv, D]` go to
/// `cache[slots[b], starts[b]..]`; `cache` is `[slots, capacity, Hkv, D]`. Slot -1 is skipped.
pub fn kv_append(
    cache: &Tensor,
    rows: &Tensor,
    cu_rows: &[i32],
    slots: &[i32],
    starts: &[i32],
) -> Result<()> {
    let _ = (cache, rows, cu_rows, slots, starts);
    unimplemented!()
}

/// Moves the accepted rows to the front of the window that starts at `prefix_lens[b]`.
pub fn kv_compact(cache: &Tensor, paths: &DevicePaths, prefix_lens: &[i32]) -> Result<()> {
    let _ = (cache, paths, prefix_lens);
    unimplemented!()
}
