//! Compacting a KV cache after a commit, in place.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDType, cudarc::driver::DeviceRepr};
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
use canopy_kernels::kv_compact as kernel;

use crate::DevicePaths;
use crate::check::arg;
use crate::wrap::WrapKernelErr;

const COMPACT: &str = "kv-compact";

/// Moves each sequence's accepted rows to the front of the window that starts at `prefix_lens[b]`, ascending, in
/// place; slots that no path names keep every bit.
///
/// `cache` is contiguous `[slots, capacity, Hkv, D]`, f32, bf16 or f16.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, TreeBatch, kv_compact};
/// use candle_core::{Device, Tensor};
///
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap(), &Device::Cpu)?;
/// let cache = Tensor::new(&[7f32, 0., 1., 2.], &Device::Cpu)?.reshape((1, 4, 1, 1))?; // one committed row
/// kv_compact(&cache, &paths, &[1])?;
/// assert_eq!(cache.flatten_all()?.to_vec1::<f32>()?[..3], [7., 0., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or a window beyond its
/// capacity.
pub fn kv_compact(cache: &Tensor, paths: &DevicePaths, prefix_lens: &[i32]) -> Result<()> {
    paths.check_devices(COMPACT, &[("cache", cache)])?;
    cache.inplace_op1(&KvCompact { paths, prefix_lens })
}

struct KvCompact<'a> {
    paths: &'a DevicePaths,
    prefix_lens: &'a [i32],
}

impl KvCompact<'_> {
    /// Both devices' checks; returns (capacity, row width).
    fn check(&self, dtype: DType, layout: &Layout) -> Result<(usize, usize)> {
        arg(COMPACT, "cache").float(dtype)?;
        arg(COMPACT, "cache").contiguous(layout)?;
        let &[slots, capacity, kv_heads, head_dim] = layout.dims() else {
            let got = layout.dims();
            return arg(COMPACT, "cache")
                .refuse(format_args!("[slots, capacity, Hkv, D]"), format_args!("{got:?}"));
        };
        self.paths.check_slots(COMPACT, slots)?;
        arg(COMPACT, "prefix_lens").count(self.prefix_lens.len(), self.paths.host().slots().len())?;
        Ok((capacity, kv_heads * head_dim))
    }

    fn compact<T: Copy>(
        &self,
        cache: &mut [T],
        layout: &Layout,
        capacity: usize,
        width: usize,
    ) -> Result<()> {
        let start = layout.start_offset();
        let cache = &mut cache[start..start + layout.shape().elem_count()];
        kernel::cpu::compact(self.paths.host(), self.prefix_lens, width, capacity, cache).wrap()
    }
}

impl InplaceOp1 for KvCompact<'_> {
    fn name(&self) -> &'static str {
        COMPACT
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (capacity, width) = self.check(cache.dtype(), layout)?;
        match cache {
            CpuStorage::F32(cache) => self.compact(cache, layout, capacity, width),
            CpuStorage::BF16(cache) => self.compact(cache, layout, capacity, width),
            CpuStorage::F16(cache) => self.compact(cache, layout, capacity, width),
            other => arg(COMPACT, "cache").float(other.dtype()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, cache: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let (capacity, width) = self.check(cache.dtype(), layout)?;
        match cache.dtype() {
            DType::F32 => self.launch::<f32>(cache, layout, (width, capacity)),
            DType::BF16 => self.launch::<half::bf16>(cache, layout, (width, capacity)),
            other => arg(COMPACT, "cache").no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl KvCompact<'_> {
    fn launch<T: CudaDType + WithDType + DeviceRepr>(
        &self,
        cache: &mut CudaStorage,
        layout: &Layout,
        sizes: (usize, usize),
    ) -> Result<()> {
        let device = cache.device().clone();
        let lens = crate::cuda::lists::on_device(&device, self.prefix_lens)?;
        let (paths, on_device) = (self.paths.host(), self.paths.on_device(COMPACT)?);
        let pool = crate::cuda::view_mut::<T>(arg(COMPACT, "cache"), cache, layout)?;
        let lens = lens.slice(..self.prefix_lens.len());
        kernel::launch::compact(&device.cuda_stream(), paths, on_device, lens, sizes, &mut [pool]).wrap()
    }
}
