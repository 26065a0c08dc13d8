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
    let dims = cache.dims();
    if dims.len() != 4 {
        return arg(COMPACT, "cache")
            .refuse(format_args!("[slots, capacity, Hkv, D]"), format_args!("{dims:?}"));
    }
    arg(COMPACT, "cache").contiguous(cache.layout())?;
    kv_compact_layers(&cache.unsqueeze(0)?, paths, prefix_lens)
}

/// [`kv_compact`] for the layers of a model, whose caches lie one after another in `caches` `[layers, slots, capacity, Hkv, D]`; on CUDA one launch
/// for up to 64 of them.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, TreeBatch, kv_compact_layers};
/// use candle_core::{Device, Tensor};
///
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap(), &Device::Cpu)?;
/// let caches = Tensor::new(&[7f32, 0., 1., 2., 8., 3., 4., 5.], &Device::Cpu)?.reshape((2, 1, 4, 1, 1))?; // two layers
/// kv_compact_layers(&caches, &paths, &[1])?;
/// let rows = caches.reshape((2, 4))?.to_vec2::<f32>()?;
/// assert_eq!((&rows[0][..3], &rows[1][..3]), (&[7f32, 0., 2.][..], &[8f32, 3., 5.][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`kv_compact`].
pub fn kv_compact_layers(caches: &Tensor, paths: &DevicePaths, prefix_lens: &[i32]) -> Result<()> {
    paths.check_devices(COMPACT, &[("cache", caches)])?;
    caches.inplace_op1(&KvCompact { paths, prefix_lens })
}

struct KvCompact<'a> {
    paths: &'a DevicePaths,
    prefix_lens: &'a [i32],
}

/// What a pool of caches measures.
struct Sizes {
    /// Elements of one layer.
    layer: usize,
    capacity: usize,
    /// Elements of a row.
    width: usize,
}

impl KvCompact<'_> {
    /// Both devices' checks.
    fn check(&self, dtype: DType, layout: &Layout) -> Result<Sizes> {
        arg(COMPACT, "cache").float(dtype)?;
        arg(COMPACT, "cache").contiguous(layout)?;
        let &[_, slots, capacity, kv_heads, head_dim] = layout.dims() else {
            let got = layout.dims();
            return arg(COMPACT, "cache")
                .refuse(format_args!("[layers, slots, capacity, Hkv, D]"), format_args!("{got:?}"));
        };
        self.paths.check_slots(COMPACT, slots)?;
        arg(COMPACT, "prefix_lens").count(self.prefix_lens.len(), self.paths.host().slots().len())?;
        let width = kv_heads * head_dim;
        Ok(Sizes { layer: slots * capacity * width, capacity, width })
    }

    fn compact<T: Copy>(&self, caches: &mut [T], layout: &Layout, sizes: &Sizes) -> Result<()> {
        let start = layout.start_offset();
        let caches = &mut caches[start..start + layout.shape().elem_count()];
        for cache in caches.chunks_exact_mut(sizes.layer.max(1)) {
            kernel::cpu::compact(self.paths.host(), self.prefix_lens, sizes.width, sizes.capacity, cache)
                .wrap()?;
        }
        Ok(())
    }
}

impl InplaceOp1 for KvCompact<'_> {
    fn name(&self) -> &'static str {
        COMPACT
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let sizes = self.check(cache.dtype(), layout)?;
        match cache {
            CpuStorage::F32(cache) => self.compact(cache, layout, &sizes),
            CpuStorage::BF16(cache) => self.compact(cache, layout, &sizes),
            CpuStorage::F16(cache) => self.compact(cache, layout, &sizes),
            other => arg(COMPACT, "cache").float(other.dtype()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, cache: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let sizes = self.check(cache.dtype(), layout)?;
        match cache.dtype() {
            DType::F32 => self.launch::<f32>(cache, layout, &sizes),
            DType::BF16 => self.launch::<half::bf16>(cache, layout, &sizes),
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
        sizes: &Sizes,
    ) -> Result<()> {
        let device = cache.device().clone();
        let lens = crate::cuda::lists::on_device(&device, crate::List::Lens, self.prefix_lens)?;
        let (paths, on_device) = (self.paths.host(), self.paths.on_device(COMPACT)?);
        let lens = lens.first(self.prefix_lens.len());
        let all = crate::cuda::view_mut::<T>(arg(COMPACT, "cache"), cache, layout)?;
        let mut pools = crate::cuda::layers(all, sizes.layer);
        let row = (sizes.width, sizes.capacity);
        kernel::launch::compact(&device.cuda_stream(), paths, on_device, lens, row, &mut pools).wrap()
    }
}
