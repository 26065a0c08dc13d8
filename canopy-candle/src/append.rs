//! Appending packed rows to a KV cache, in place.

#[cfg(feature = "cuda")]
use std::cell::RefCell;

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDType, cudarc::driver::CudaViewMut};
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::glue::launch::{self, Destinations, PoolElement};

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda::{self, glue::RowsView};
use crate::slices::{expect_distinct, row_pieces, typed};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const APPEND: &str = "kv-append";

/// Writes packed rows into a pool: rows `cu_rows[b]..cu_rows[b + 1]` of `rows` `[N, Hkv, D]` go to
/// `cache[slots[b], starts[b]..]`; `cache` is contiguous `[slots, capacity, Hkv, D]`, f32, bf16 or f16 (on CUDA f32 or
/// bf16). `rows`, in any float dtype and layout, are rounded to its dtype. Slot -1 is skipped.
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
    let op = CacheRows { cu_rows, slots, starts };
    op.check(("cache", cache), ("rows", rows))?;
    cache.inplace_op2(&op.source(cache, rows)?, &op)
}

/// [`kv_append`] of keys `k` and values `v` into pools of one shape and dtype: one launch on CUDA.
///
/// ```
/// use canopy_candle::kv_append_pair;
/// use candle_core::{DType, Device, Tensor};
///
/// let pool = || Tensor::zeros((1, 2, 1, 1), DType::F32, &Device::Cpu);
/// let (keys, values) = (pool()?, pool()?);
/// let (k, v) = (Tensor::new(&[[[1f32]]], &Device::Cpu)?, Tensor::new(&[[[2f32]]], &Device::Cpu)?);
/// kv_append_pair((&keys, &values), (&k, &v), &[0, 1], &[0], &[1])?;
/// assert_eq!(keys.flatten_all()?.to_vec1::<f32>()?, [0., 1.]);
/// assert_eq!(values.flatten_all()?.to_vec1::<f32>()?, [0., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`kv_append`], and pools that differ in shape or dtype or share storage. Nothing is written then.
pub fn kv_append_pair(
    (keys, values): (&Tensor, &Tensor),
    (k, v): (&Tensor, &Tensor),
    cu_rows: &[i32],
    slots: &[i32],
    starts: &[i32],
) -> Result<()> {
    check_devices(APPEND, keys.device(), &[("values", values), ("k", k), ("v", v)])?;
    let op = CacheRows { cu_rows, slots, starts };
    op.check_pair((keys, values), ("k", k), v)?;
    let (k, v) = (op.source(keys, k)?, op.source(values, v)?);
    values.inplace_op2(&v, &AppendPair { op: &op, keys, k: &k })
}

/// Where packed rows go in a pool: rows `cu_rows[b]..cu_rows[b + 1]` to the slot `slots[b]` (-1 = nowhere) from position
/// `starts[b]` on.
#[derive(Clone, Copy, Debug)]
pub struct CacheRows<'a> {
    /// `[B + 1]`, ascending from 0 to N.
    pub cu_rows: &'a [i32],
    /// `[B]`.
    pub slots: &'a [i32],
    /// `[B]`.
    pub starts: &'a [i32],
}

/// One sequence's copy, in rows of the flattened pool.
struct Span {
    from: usize,
    to: usize,
    len: usize,
}

impl CacheRows<'_> {
    /// Both devices' checks of shapes, dtypes and ranges.
    pub(crate) fn check(
        &self,
        (cache_name, cache): (&'static str, &Tensor),
        rows: (&'static str, &Tensor),
    ) -> Result<()> {
        let cache_arg = arg(APPEND, cache_name);
        cache_arg.float(cache.dtype())?;
        cache_arg.contiguous(cache.layout())?;
        let &[pool_slots, capacity, kv_heads, head_dim] = cache.dims() else {
            let got = cache.dims();
            return cache_arg.refuse(format_args!("[slots, capacity, Hkv, D]"), format_args!("{got:?}"));
        };
        arg(APPEND, rows.0).float(rows.1.dtype())?;
        let total = arg(APPEND, rows.0).shape_but_first(rows.1.layout(), &[kv_heads, head_dim])?;
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

    /// Checks of two pools and their rows, which are called `k_name` and v.
    pub(crate) fn check_pair(
        &self,
        (keys, values): (&Tensor, &Tensor),
        (k_name, k): (&'static str, &Tensor),
        v: &Tensor,
    ) -> Result<()> {
        expect_distinct(arg(APPEND, "values"), values, keys)?;
        for (name, source) in [(k_name, k), ("v", v)] {
            expect_distinct(arg(APPEND, name), source, keys)?;
            expect_distinct(arg(APPEND, name), source, values)?;
        }
        arg(APPEND, "values").shape(values.layout(), keys.dims())?;
        arg(APPEND, "values").dtype(values.dtype(), keys.dtype())?;
        self.check(("keys", keys), (k_name, k))?;
        self.check(("values", values), ("v", v))
    }

    /// The rows as the device's forward reads them: of the pool's dtype on the CPU, f32 elsewhere.
    pub(crate) fn source(&self, cache: &Tensor, rows: &Tensor) -> Result<Tensor> {
        match cache.device() {
            Device::Cpu => rows.to_dtype(cache.dtype()),
            _ => row_pieces(&rows.to_dtype(DType::F32)?),
        }
    }

    /// What to copy, in rows of the pool as `[slots capacity, Hkv, D]`.
    /// Every packed row's row of the pool, -1 for none.
    pub(crate) fn destinations(&self, capacity: usize) -> Vec<i32> {
        let mut to = vec![-1; self.cu_rows[self.slots.len()] as usize];
        for span in self.spans(capacity) {
            for row in 0..span.len {
                to[span.from + row] = (span.to + row) as i32;
            }
        }
        to
    }

    /// The launch for one dtype of the pools; of keys and values when a `pair` is given.
    fn spans(&self, capacity: usize) -> impl Iterator<Item = Span> {
        (0..self.slots.len()).filter(|&b| self.slots[b] >= 0).map(move |b| Span {
            from: self.cu_rows[b] as usize,
            to: self.slots[b] as usize * capacity + self.starts[b] as usize,
            len: (self.cu_rows[b + 1] - self.cu_rows[b]) as usize,
        })
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

impl InplaceOp2 for CacheRows<'_> {
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
        match (cache, rows) {
            (CpuStorage::F32(cache), CpuStorage::F32(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (CpuStorage::BF16(cache), CpuStorage::BF16(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (CpuStorage::F16(cache), CpuStorage::F16(rows)) => self.copy(cache, cache_l, rows, rows_l),
            (cache, rows) => arg(APPEND, "rows").dtype(rows.dtype(), cache.dtype())?,
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut CudaStorage,
        cache_l: &Layout,
        rows: &CudaStorage,
        rows_l: &Layout,
    ) -> Result<()> {
        let rows = (rows, rows_l);
        match cache.dtype() {
            DType::F32 => self.launch::<f32>((cache, cache_l), rows, None),
            DType::BF16 => self.launch::<half::bf16>((cache, cache_l), rows, None),
            other => arg(APPEND, "cache").no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl CacheRows<'_> {
    fn launch<T: Pooled>(
        &self,
        cache: (&mut CudaStorage, &Layout),
        rows: (&CudaStorage, &Layout),
        pair: Option<(&RowsView<'_>, &mut CudaViewMut<'_, T>)>,
    ) -> Result<()> {
        let device = rows.0.device();
        let &[_, capacity, kv_heads, head_dim] = cache.1.dims() else {
            return arg(APPEND, "cache").contiguous(cache.1);
        };
        let width = kv_heads * head_dim;
        let (host, stream) = (self.destinations(capacity), device.cuda_stream());
        let on_device = cuda::lists::on_device(device, crate::List::Destinations, &host)?;
        let to = Destinations { host: &host, on_device: &on_device.first(host.len()) };
        let rows = cuda::glue::rows(arg(APPEND, "rows"), rows.0, rows.1)?;
        let mut pool = cuda::view_mut::<T>(arg(APPEND, "cache"), cache.0, cache.1)?;
        match pair {
            None => launch::kv_append(&stream, width, to, rows.rows(), &mut pool).wrap(),
            Some((v, values)) => {
                let pools = [&mut pool, &mut values.slice_mut(..)];
                launch::kv_append_pair(&stream, width, to, [rows.rows(), v.rows()], pools).wrap()
            }
        }
    }
}

/// A dtype of the pools on CUDA.
#[cfg(feature = "cuda")]
pub(crate) trait Pooled: PoolElement + CudaDType + WithDType {}

#[cfg(feature = "cuda")]
impl<T: PoolElement + CudaDType + WithDType> Pooled for T {}

/// Appends `k` to `keys` while the op's destination, the values' pool, is locked for writing.
struct AppendPair<'a> {
    op: &'a CacheRows<'a>,
    keys: &'a Tensor,
    k: &'a Tensor,
}

impl InplaceOp2 for AppendPair<'_> {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(
        &self,
        values: &mut CpuStorage,
        values_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> Result<()> {
        self.keys.inplace_op2(self.k, self.op)?;
        self.op.cpu_fwd(values, values_l, v, v_l)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        values: &mut CudaStorage,
        values_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
    ) -> Result<()> {
        let v = cuda::glue::rows(arg(APPEND, "v"), v, v_l)?;
        let pool = arg(APPEND, "values");
        match values.dtype() {
            DType::F32 => self.launch(v, cuda::view_mut::<f32>(pool, values, values_l)?),
            DType::BF16 => self.launch(v, cuda::view_mut::<half::bf16>(pool, values, values_l)?),
            other => pool.no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl AppendPair<'_> {
    fn launch<T: Pooled>(&self, v: RowsView<'_>, values: CudaViewMut<'_, T>) -> Result<()> {
        self.keys.inplace_op2(self.k, &BothPools { op: self.op, v, values: values.into() })
    }
}

/// The launch into both pools; the op's destination is the keys' pool.
#[cfg(feature = "cuda")]
struct BothPools<'a, T> {
    op: &'a CacheRows<'a>,
    v: RowsView<'a>,
    values: RefCell<CudaViewMut<'a, T>>,
}

#[cfg(feature = "cuda")]
impl<T: Pooled> InplaceOp2 for BothPools<'_, T> {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        arg(APPEND, "keys").cuda_only()
    }

    fn cuda_fwd(&self, keys: &mut CudaStorage, keys_l: &Layout, k: &CudaStorage, k_l: &Layout) -> Result<()> {
        let mut values = self.values.borrow_mut();
        self.op.launch::<T>((keys, keys_l), (k, k_l), Some((&self.v, &mut values)))
    }
}
