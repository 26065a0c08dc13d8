//! The best tokens of rows of logits as an op.

#[cfg(feature = "cuda")]
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, cuda_backend::cudarc::driver::CudaSlice};
use canopy_kernels::top_tokens as kernel;

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::slices::{row_major, values};
use crate::wrap::WrapKernelErr;

const OP: &str = "top-tokens";

/// The k best logits of every row, their tokens and the row's log-sum-exp: what a tree builder or an argmax needs of a vocabulary,
/// without the logits leaving their device.
///
/// `logits` `[N, vocab]`, f32, bf16 or f16 in any layout (on CUDA f32). Gives u32 `[N, 2 + 2 k]`; [`TopRow`](crate::TopRow)
/// reads a row of it. Equal logits rank by token, lowest first. k is at most [`most_top_tokens`] of the device.
///
/// ```
/// use canopy_candle::{TopRow, top_tokens};
/// use candle_core::{Device, Tensor};
/// let rows = top_tokens(&Tensor::new(&[[1f32, 3., 3., 2.]], &Device::Cpu)?, 3)?.to_vec2::<u32>()?;
/// let row = TopRow::new(&rows[0]).unwrap();
/// assert_eq!(row.best().collect::<Vec<_>>(), [(1, 3.), (2, 3.), (3, 2.)]);
/// assert!((row.ln_sum() - (2. + (-1f32).exp() + (-2f32).exp()).ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Logits that are no matrix or no floats, and a k outside 1 to `vocab` or the device's limit.
pub fn top_tokens(logits: &Tensor, k: usize) -> Result<Tensor> {
    row_major(logits)?.apply_op1_no_bwd(&TopTokens { k })
}

/// The largest k of [`top_tokens`] on a device.
///
/// ```
/// use canopy_candle::{most_top_tokens, top_tokens};
/// use candle_core::{Device, Tensor};
/// let (dev, vocab) = (Device::Cpu, 3);
/// let k = most_top_tokens(&dev).min(vocab);
/// let rows = top_tokens(&Tensor::new(&[[1f32, 3., 2.]], &dev)?, k)?;
/// assert_eq!(rows.dims(), [1, 2 + 2 * vocab]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn most_top_tokens(device: &Device) -> usize {
    if device.is_cpu() { usize::MAX } else { kernel::MOST_K_ON_CUDA }
}

struct TopTokens {
    k: usize,
}

impl TopTokens {
    /// Both devices' check of the shape; returns (N, vocab).
    fn check(logits: &Layout) -> Result<(usize, usize)> {
        match logits.dims() {
            &[rows, vocab] => Ok((rows, vocab)),
            got => arg(OP, "logits").refuse(format_args!("[N, vocab]"), format_args!("{got:?}")),
        }
    }
}

impl CustomOp1 for TopTokens {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, vocab) = Self::check(layout)?;
        let logits = values(arg(OP, "logits"), logits, layout)?;
        let words = kernel::row_words(self.k);
        let mut out = vec![0u32; rows * words];
        kernel::cpu::forward(vocab, self.k, &logits, &mut out).wrap()?;
        Ok((CpuStorage::U32(out), (rows, words).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (rows, vocab) = Self::check(layout)?;
        let (device, words) = (logits.device(), kernel::row_words(self.k));
        let view = cuda::glue::whole(arg(OP, "logits"), logits, layout)?;
        let (len, segments) = (rows * words, rows * kernel::launch::segments(vocab));
        let mut bests: CudaSlice<u64> = cuda::output(device, segments)?;
        let mut sums: CudaSlice<f32> = cuda::output(device, segments)?;
        let mut out: CudaSlice<u32> = cuda::output(device, len)?;
        let scratch =
            kernel::launch::Scratch { bests: bests.slice_mut(..segments), sums: sums.slice_mut(..segments) };
        let (stream, size) = (device.cuda_stream(), (vocab, self.k));
        kernel::launch::forward(&stream, size, &view, scratch, &mut out.slice_mut(..len)).wrap()?;
        Ok(cuda::storage(device, out, (rows, words)))
    }
}
