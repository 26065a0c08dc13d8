//! Queries ready for attention, keys and values in their pools: one launch on CUDA.

#[cfg(feature = "cuda")]
use std::cell::RefCell;

#[cfg(feature = "cuda")]
use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, InplaceOp2, Layout, Shape,
    cuda_backend::cudarc::driver::CudaViewMut,
};
use candle_core::{Result, Tensor};
#[cfg(feature = "cuda")]
use canopy_kernels::glue::launch::{self, Destinations};

#[cfg(feature = "cuda")]
use super::rope::{ROPE, Rope};
use super::{QkNormRope, qk_norm_rope};
#[cfg(feature = "cuda")]
use crate::List;
#[cfg(feature = "cuda")]
use crate::append::Pooled;
use crate::append::{CacheRows, kv_append_pair};
#[cfg(feature = "cuda")]
use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda::{self, glue::RowsView};
#[cfg(feature = "cuda")]
use crate::slices::row_pieces;
#[cfg(feature = "cuda")]
use crate::wrap::WrapKernelErr;

/// [`qk_norm_rope`], and [`kv_append_pair`] of its keys and of `v` `[N, Hkv, D]` to `rows` of the pools. Gives q `[N, Hq, D]`, on CUDA
/// in the pools' dtype, as attention takes it.
///
/// ```
/// use canopy_candle::{AttnDims, CacheRows, NormKind, QkNormRope, qk_norm_rope_append};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let ones = Tensor::new(&[1f32, 1.], &dev)?;
/// let op = QkNormRope {
///     dims: AttnDims::new(1, 1, 2).unwrap(),
///     gated: false,
///     q_norm: ones.clone(),
///     k_norm: ones,
///     eps: 0.,
///     kind: NormKind::Plain,
///     inv_freq: Tensor::new(&[1f32], &dev)?,
/// };
/// let (x, v) = (Tensor::new(&[[1f32, 1.]], &dev)?, Tensor::new(&[[[5f32, 6.]]], &dev)?);
/// let (keys, values) = (Tensor::zeros((1, 2, 1, 2), DType::F32, &dev)?, Tensor::zeros((1, 2, 1, 2), DType::F32, &dev)?);
/// let rows = CacheRows { cu_rows: &[0, 1], slots: &[0], starts: &[1] };
/// let q = qk_norm_rope_append(&op, [&x, &x, &v], &[0], (&keys, &values), rows)?;
/// assert_eq!(q.dims(), [1, 1, 2]);
/// assert_eq!(values.flatten_all()?.to_vec1::<f32>()?, [0., 0., 5., 6.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of the two steps; nothing is written then.
pub fn qk_norm_rope_append(
    op: &QkNormRope,
    [q_proj, k_proj, v]: [&Tensor; 3],
    positions: &[i32],
    pools: (&Tensor, &Tensor),
    rows: CacheRows<'_>,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if !q_proj.device().is_cpu() {
        return fused(op, [q_proj, k_proj, v], positions, pools, rows);
    }
    let (q, k) = qk_norm_rope(op, q_proj, k_proj, positions)?;
    kv_append_pair(pools, (&k, v), rows.cu_rows, rows.slots, rows.starts)?;
    Ok(q)
}

#[cfg(feature = "cuda")]
fn fused(
    op: &QkNormRope,
    [q_proj, k_proj, v]: [&Tensor; 3],
    positions: &[i32],
    (keys, values): (&Tensor, &Tensor),
    rows: CacheRows<'_>,
) -> Result<Tensor> {
    let rope = Rope::new(op, q_proj, k_proj, positions)?;
    crate::tree::check_devices(ROPE, q_proj.device(), &[("v", v), ("keys", keys), ("values", values)])?;
    rope.check(q_proj.layout(), k_proj.layout())?;
    let heads = (positions.len(), op.dims.kv_heads, op.dims.head_dim);
    rows.check_pair((keys, values), ("k_proj", &k_proj.reshape(heads)?), v)?;
    let (k_proj, v) = (&row_pieces(k_proj)?, &row_pieces(v)?);
    row_pieces(q_proj)?
        .apply_op1_no_bwd(&RopeAppend { rope, rows, k_proj, v, keys, values })
        .and_then(crate::recorded::kept)
}

/// The call over its queries; the pools are locked for writing inside.
#[cfg(feature = "cuda")]
struct RopeAppend<'a> {
    rope: Rope<'a>,
    rows: CacheRows<'a>,
    k_proj: &'a Tensor,
    v: &'a Tensor,
    keys: &'a Tensor,
    values: &'a Tensor,
}

#[cfg(feature = "cuda")]
impl RopeAppend<'_> {
    fn run<T: Pooled>(&self, q: &CudaStorage, q_l: &Layout) -> Result<(CudaStorage, Shape)> {
        let (device, dims) = (q.device(), self.rope.op.dims);
        let len = self.rope.positions.len() * dims.q_width();
        let mut out = cuda::output::<T>(device, len)?;
        let call = IntoValues {
            call: self,
            q_proj: cuda::glue::rows(arg(ROPE, "q_proj"), q, q_l)?,
            q: RefCell::new(out.slice_mut(..len)),
        };
        self.values.inplace_op2(self.v, &call)?;
        Ok(cuda::storage(device, out, (self.rope.positions.len(), dims.q_heads, dims.head_dim)))
    }

    /// The launch, with everything at hand.
    fn launch<T: Pooled>(
        &self,
        inputs: [&RowsView<'_>; 3],
        q: &mut CudaViewMut<'_, T>,
        pools: [&mut CudaViewMut<'_, T>; 2],
    ) -> Result<()> {
        let Rope { op, positions, q_norm, k_norm, inv_freq } = &self.rope;
        let candle_core::Device::Cuda(device) = self.keys.device() else {
            return arg(ROPE, "keys").refuse(format_args!("a tensor on CUDA"), format_args!("another"));
        };
        let q_norm = q_norm.cuda_values(arg(ROPE, "q_norm"))?;
        let k_norm = k_norm.cuda_values(arg(ROPE, "k_norm"))?;
        let host = self.rows.destinations(self.keys.dims()[1]);
        let to = cuda::lists::on_device(device, List::Destinations, &host)?;
        let at = cuda::lists::on_device(device, List::Positions, positions)?;
        let args = launch::QkNormRope {
            dims: op.dims,
            gated: op.gated,
            q_norm: cuda::glue::norm(op.kind, &q_norm, op.eps),
            k_norm: cuda::glue::norm(op.kind, &k_norm, op.eps),
            inv_freq: &inv_freq.cuda_values(arg(ROPE, "inv_freq"))?,
            positions: &at.first(positions.len()),
        };
        let to = Destinations { host: &host, on_device: &to.first(host.len()) };
        let inputs = inputs.map(RowsView::rows);
        launch::qk_norm_rope_append(&device.cuda_stream(), args, inputs, to, q, pools).wrap()
    }
}

#[cfg(feature = "cuda")]
impl CustomOp1 for RopeAppend<'_> {
    fn name(&self) -> &'static str {
        ROPE
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        arg(ROPE, "q_proj").cuda_only()
    }

    fn cuda_fwd(&self, q: &CudaStorage, q_l: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.keys.dtype() {
            DType::F32 => self.run::<f32>(q, q_l),
            DType::BF16 => self.run::<half::bf16>(q, q_l),
            other => arg(ROPE, "keys").no_kernel(other),
        }
    }
}

/// With the values' pool as its destination.
#[cfg(feature = "cuda")]
struct IntoValues<'a, T> {
    call: &'a RopeAppend<'a>,
    q_proj: RowsView<'a>,
    q: RefCell<CudaViewMut<'a, T>>,
}

#[cfg(feature = "cuda")]
impl<T: Pooled> InplaceOp2 for IntoValues<'_, T> {
    fn name(&self) -> &'static str {
        ROPE
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        arg(ROPE, "values").cuda_only()
    }

    fn cuda_fwd(
        &self,
        values: &mut CudaStorage,
        values_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
    ) -> Result<()> {
        let v = cuda::glue::rows(arg(ROPE, "v"), v, v_l)?;
        let values = RefCell::new(cuda::view_mut::<T>(arg(ROPE, "values"), values, values_l)?);
        self.call.keys.inplace_op2(self.call.k_proj, &IntoKeys { of: self, v, values })
    }
}

/// With the keys' pool as its destination, inside [`IntoValues`].
#[cfg(feature = "cuda")]
struct IntoKeys<'a, 'b, T> {
    of: &'a IntoValues<'b, T>,
    v: RowsView<'a>,
    values: RefCell<CudaViewMut<'a, T>>,
}

#[cfg(feature = "cuda")]
impl<T: Pooled> InplaceOp2 for IntoKeys<'_, '_, T> {
    fn name(&self) -> &'static str {
        ROPE
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        arg(ROPE, "keys").cuda_only()
    }

    fn cuda_fwd(&self, keys: &mut CudaStorage, keys_l: &Layout, k: &CudaStorage, k_l: &Layout) -> Result<()> {
        let k = cuda::glue::rows(arg(ROPE, "k_proj"), k, k_l)?;
        let mut keys = cuda::view_mut::<T>(arg(ROPE, "keys"), keys, keys_l)?;
        let (mut q, mut values) = (self.of.q.borrow_mut(), self.values.borrow_mut());
        let pools = [&mut keys.slice_mut(..), &mut values.slice_mut(..)];
        self.of.call.launch([&self.of.q_proj, &k, &self.v], &mut q, pools)
    }
}
