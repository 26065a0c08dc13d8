//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::Result;
use crate::cuda::early::Launch;
use crate::error::expect_len;

/// An element type that the kernel is built for.
pub trait Element: DeviceRepr {
    /// The kernel's symbol.
    const SYMBOL: &'static str;
}

impl Element for f32 {
    const SYMBOL: &'static str = "gates_f32";
}

impl Element for half::bf16 {
    const SYMBOL: &'static str = "gates_bf16";
}

/// `ab` `[N, 2, Hv]`, `a_log`, `dt_bias` `[Hv]` f32 -> `out` `[N, 2, Hv]` f32.
///
/// # Errors
/// Any wrong length, before the launch.
pub fn forward<T: Element>(
    stream: &Arc<CudaStream>,
    v_heads: usize,
    ab: CudaView<'_, T>,
    a_log: CudaView<'_, f32>,
    dt_bias: CudaView<'_, f32>,
    mut out: CudaViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "gates";
    let rows = ab.len() / (2 * v_heads).max(1);
    expect_len(OP, "ab", &[rows, 2, v_heads], ab.len())?;
    expect_len(OP, "a_log", &[v_heads], a_log.len())?;
    expect_len(OP, "dt_bias", &[v_heads], dt_bias.len())?;
    expect_len(OP, "out", &[rows, 2, v_heads], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let (rows, heads) = (rows as u32, v_heads as u32);
    let config = LaunchConfig {
        grid_dim: ((rows * heads).div_ceil(128), 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = Launch::new(stream, OP, "gates/gates", T::SYMBOL)?;
    launch.value(&rows).value(&heads).read(&ab).read(&a_log).read(&dt_bias).write(&mut out);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(config) }
}
