//! KV cache ops, in place.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Result, Tensor};
use canopy_kernels::kv_compact as kernel;

use crate::DevicePaths;
use crate::check::arg;
use crate::slices::{expect_distinct, typed};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const APPEND: &str = "kv-append";
const COMPACT: &str = "kv-compact";

/// Writes packed rows into a pool: rows `cu_rows[b]..cu_rows[b + 1]` of `rows` `[N, Hkv, D]` go to
/// `cache[slots[b], starts[b]..]`; `cache` is contiguous `[slots, capacity, Hkv, D]` of the same dtype (f32, bf16
/// or f16). Slot -1 is skipped.
///
/// ```
/// use canopy_candle::kv_append;
/// use candle_core::{DType, Device, Tensor};
///
/// let cache = Tensor::zeros((2, 3, 1, 1), DType::F32, &Device::Cpu)?;
/// let rows = Tensor::new(&[[[1f32]], [[2.]], [[3.]]], &Device::Cpu)?;
/// kv_append(&cache, &rows, &[0, 2, 3], &[1, 0], &[1, 0])?; // two rows to slot 1, one to slot 0
/// assert_eq!(cache.flatten_all()?.to_vec1::<f32>()?, [3., 0., 0., 0., 1., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, rows beyond its
/// capacity, or `rows` that share the pool's storage.
pub fn kv_append(
    cache: &Tensor,
    rows: &Tensor,
    cu_rows: &[i32],
    slots: &[i32],
    starts: &[i32],
) -> Result<()> {
    check_devices(APPEND, cache.device(), &[("rows", rows)])?;
    expect_distinct(arg(APPEND, "rows"), rows, cache)?;
    let op = KvAppend { cu_rows, slots, starts };
    match cache.device() {
        Device::Cpu => cache.inplace_op2(rows, &op),
        _ => op.composed(cache, rows),
    }
}

struct KvAppend<'a> {
    cu_rows: &'a [i32],
    slots: &'a [i32],
    starts: &'a [i32],
}

/// One sequence's copy, in rows of the flattened pool.
struct Span {
    from: usize,
    to: usize,
    len: usize,
}

impl KvAppend<'_> {
    /// Both devices' checks of shapes, dtypes and ranges.
    fn check(&self, cache: (DType, &Layout), rows: (DType, &Layout)) -> Result<()> {
        arg(APPEND, "cache").float(cache.0)?;
        arg(APPEND, "cache").contiguous(cache.1)?;
        let &[pool_slots, capacity, kv_heads, head_dim] = cache.1.dims() else {
            let got = cache.1.dims();
            return arg(APPEND, "cache")
                .refuse(format_args!("[slots, capacity, Hkv, D]"), format_args!("{got:?}"));
        };
        arg(APPEND, "rows").dtype(rows.0, cache.0)?;
        let total = arg(APPEND, "rows").shape_but_first(rows.1, &[kv_heads, head_dim])?;
        arg(APPEND, "cu_rows").count(self.cu_rows.len(), self.slots.len() + 1)?;
        arg(APPEND, "starts").count(self.starts.len(), self.slots.len())?;
        let ascending = self.cu_rows.is_sorted() && self.cu_rows[0] == 0;
        if !ascending || self.cu_rows[self.slots.len()] as usize != total {
            return arg(APPEND, "cu_rows")
                .refuse(format_args!("ascending from 0 to {total}"), format_args!("{:?}", self.cu_rows));
        }
        canopy_kernels::check_slots(self.slots, APPEND, pool_slots).wrap()?;
        for (b, &start) in self.starts.iter().enumerate() {
            let len = self.cu_rows[b + 1] - self.cu_rows[b];
            if self.slots[b] >= 0 && (start < 0 || start as usize + len as usize > capacity) {
                return arg(APPEND, "starts").refuse(
                    format_args!("{len} rows of sequence {b} within the capacity of {capacity}"),
                    format_args!("start {start}"),
                );
            }
        }
        Ok(())
    }

    /// What to copy, in rows of the pool as `[slots capacity, Hkv, D]`.
    fn spans(&self, capacity: usize) -> impl Iterator<Item = Span> {
        (0..self.slots.len()).filter(|&b| self.slots[b] >= 0).map(move |b| Span {
            from: self.cu_rows[b] as usize,
            to: self.slots[b] as usize * capacity + self.starts[b] as usize,
            len: (self.cu_rows[b + 1] - self.cu_rows[b]) as usize,
        })
    }

    /// The same copies with candle's own ops, for devices without a kernel for it.
    fn composed(&self, cache: &Tensor, rows: &Tensor) -> Result<()> {
        self.check((cache.dtype(), cache.layout()), (rows.dtype(), rows.layout()))?;
        let (slots, capacity, kv_heads, head_dim) = cache.dims4()?;
        let pool = cache.reshape((slots * capacity, kv_heads, head_dim))?;
        for span in self.spans(capacity).filter(|span| span.len > 0) {
            pool.slice_set(&rows.narrow(0, span.from, span.len)?.contiguous()?, 0, span.to)?;
        }
        Ok(())
    }

    fn copy<T: Copy>(&self, cache: &mut [T], cache_l: &Layout, rows: &[T], rows_l: &Layout) {
        let (capacity, width) = (cache_l.dims()[1], cache_l.dims()[2] * cache_l.dims()[3]);
        let rows = typed(rows, rows_l);
        let cache = &mut cache[cache_l.start_offset()..];
        for Span { from, to, len } in self.spans(capacity) {
            cache[to * width..(to + len) * width].copy_from_slice(&rows[from * width..(from + len) * width]);
        }
    }
}

impl InplaceOp2 for KvAppend<'_> {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_l: &Layout,
        rows: &CpuStorage,
        rows_l: &Layout,
    ) -> Result<()> {
        self.check((cache.dtype(), cache_l), (rows.dtype(), rows_l))?;
        match (cache, rows) {
            (CpuStorage::F32(cache), CpuStorage::F32(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (CpuStorage::BF16(cache), CpuStorage::BF16(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (CpuStorage::F16(cache), CpuStorage::F16(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (cache, rows) => arg(APPEND, "rows").dtype(rows.dtype(), cache.dtype())?,
        }
        Ok(())
    }
}

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
}
