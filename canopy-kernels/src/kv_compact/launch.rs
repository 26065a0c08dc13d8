//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtrMut, DeviceRepr, LaunchConfig};

use crate::cuda::PathsOnDevice;
use crate::cuda::early::Launch;
use crate::error::{expect_len, expect_pool};
use crate::{AcceptedPaths, Error, Result};

/// Pools that one launch moves rows in.
const MOST_POOLS: usize = 64;
const WORD_BYTES: usize = 16;
const THREADS: usize = 128;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CompactArgs {
    words: u32,
    capacity: u32,
    pools: [u64; MOST_POOLS],
}
// SAFETY: repr(C) without padding; compact.cu asserts the size.
unsafe impl DeviceRepr for CompactArgs {}

/// The room's move in every pool of `pools`, each `[slots, capacity, width]`: one launch for up to 64 pools. `lens` `[B]` are the
/// committed rows of every sequence; a sequence whose rows do not fit into its slot is left alone.
///
/// # Errors
/// Any wrong length, rows that are not whole 16-byte words, or a slot outside a pool, before anything is launched.
pub fn compact<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    paths: &AcceptedPaths,
    on_device: &PathsOnDevice,
    lens: CudaView<'_, i32>,
    (width, capacity): (usize, usize),
    pools: &mut [CudaViewMut<'_, T>],
) -> Result<()> {
    const OP: &str = "kv_compact";
    let value = |arg, expected: String, got: String| Err(Error::Value { op: OP, arg, expected, got });
    let bytes = width * size_of::<T>();
    if width == 0 || !bytes.is_multiple_of(WORD_BYTES) {
        return value("width", "whole 16-byte words".into(), format!("{bytes} bytes"));
    }
    if capacity == 0 || capacity > i32::MAX as usize {
        return value("capacity", "1 to 2147483647".into(), capacity.to_string());
    }
    expect_len(OP, "lens", &[paths.slots().len()], lens.len())?;
    for pool in pools.iter() {
        paths.check_slots(OP, expect_pool(OP, "pools", capacity * width, pool.len())?)?;
    }
    if paths.rows().is_empty() {
        return Ok(());
    }
    let words = bytes / WORD_BYTES;
    for some in pools.chunks_mut(MOST_POOLS) {
        let mut args = CompactArgs { words: words as u32, capacity: capacity as u32, pools: [0; MOST_POOLS] };
        let config = LaunchConfig {
            grid_dim: (words.div_ceil(THREADS) as u32, some.len() as u32, paths.slots().len() as u32),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut in_use = Vec::with_capacity(some.len());
        for (at, pool) in args.pools.iter_mut().zip(some) {
            let (pointer, used) = pool.device_ptr_mut(stream);
            *at = pointer;
            in_use.push(used);
        }
        let mut launch = Launch::new(stream, OP, "kv_compact/compact", "kv_compact")?;
        launch.value(&args).read(&lens).read(&on_device.slots).read(&on_device.rows);
        launch.read(&on_device.cu_rows).read(&on_device.cu_nodes);
        // SAFETY: lengths and slots checked above; a row that does not fit is left out by the kernel; the pools stay borrowed meanwhile.
        unsafe { launch.launch(config) }?;
    }
    Ok(())
}
