//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, DeviceSlice, LaunchConfig};

use super::{OP, check};
use crate::Result;
use crate::cuda::DeviceList;
use crate::cuda::early::Launch;
use crate::error::expect_len;

const THREADS: u32 = 128;

/// Puts every drafted node's token into the list `tokens`, in place and in the stream's order, as
/// [`Words::replace`](crate::cuda::Words::replace) does. `sources` are on the device too.
///
/// # Errors
/// A wrong length, no candidates, or a source outside them, before the launch.
pub fn forward(
    stream: &Arc<CudaStream>,
    k: usize,
    best: &CudaView<'_, u32>,
    (sources, on_device): (&[i32], &DeviceList<i32>),
    tokens: &DeviceList<i32>,
) -> Result<()> {
    check(k, best.len(), sources, tokens.len())?;
    expect_len(OP, "sources on the device", &[sources.len()], on_device.len())?;
    if sources.is_empty() {
        return Ok(());
    }
    let (nodes, candidates) = (sources.len() as u32, k as u32);
    let mut launch = Launch::new(stream, OP, "drafted_tokens/tokens", "drafted_tokens")?;
    launch.value(&nodes).value(&candidates).read(best).read(on_device).read(tokens);
    let config = LaunchConfig {
        grid_dim: (nodes.div_ceil(THREADS), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: lengths and sources checked above; nothing but kernels of this stream reads the lists, before or after this launch.
    unsafe { launch.launch(config) }
}
