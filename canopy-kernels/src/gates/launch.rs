//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, LaunchConfig};

use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

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

/// Device buffers of one call; as many heads as `a_log` has.
#[derive(Debug)]
pub struct GateBuffers<'a, T> {
    /// `[N, 2, Hv]` (plane 0 = a, plane 1 = b).
    pub ab: CudaView<'a, T>,
    /// `[Hv]`.
    pub a_log: CudaView<'a, f32>,
    /// `[Hv]`.
    pub dt_bias: CudaView<'a, f32>,
    /// `[N, 2, Hv]` (plane 0 = g, plane 1 = beta).
    pub out: CudaViewMut<'a, f32>,
}

impl<T> GateBuffers<'_, T> {
    /// Checks every length for so many rows; returns Hv.
    pub(crate) fn check(&self, op: &'static str, rows: usize) -> Result<usize> {
        let heads = self.a_log.len();
        if heads == 0 {
            return Err(Error::Value { op, arg: "v_heads", expected: "at least 1".into(), got: "0".into() });
        }
        expect_len(op, "ab", &[rows, 2, heads], self.ab.len())?;
        expect_len(op, "dt_bias", &[heads], self.dt_bias.len())?;
        expect_len(op, "gates", &[rows, 2, heads], self.out.len())?;
        Ok(heads)
    }
}

/// Both gates of every row. The convolution's launch takes the same buffers along
/// ([`ConvBuffers`](crate::tree_conv::launch::ConvBuffers)) and gives the same bits.
///
/// # Errors
/// Any wrong length, or no heads, before the launch.
pub fn forward<T: Element>(stream: &Arc<CudaStream>, mut buffers: GateBuffers<'_, T>) -> Result<()> {
    const OP: &str = "gates";
    let rows = buffers.ab.len() / (2 * buffers.a_log.len()).max(1);
    let heads = buffers.check(OP, rows)?;
    if rows == 0 {
        return Ok(());
    }
    let (rows, heads) = (rows as u32, heads as u32);
    let config = LaunchConfig {
        grid_dim: ((rows * heads).div_ceil(128), 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = Launch::new(stream, OP, "gates/gates", T::SYMBOL)?;
    launch.value(&rows).value(&heads).read(&buffers.ab).read(&buffers.a_log).read(&buffers.dt_bias);
    launch.write(&mut buffers.out);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(config) }
}
