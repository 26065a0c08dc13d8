//! RMS norms.

#[cfg(feature = "cuda")]
use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Storage, op::BackpropOp};
use canopy_kernels::glue::cpu::{self as kernel, Norm};
#[cfg(feature = "cuda")]
use canopy_kernels::glue::launch;

use crate::check::{Arg, arg};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::planes::{self, PlaneViews, PlanesMut};
use crate::recorded::kept;
use crate::slices::{row_major, row_pieces, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const RMS: &str = "rms-norm";
const ADD_RMS: &str = "add-rms-norm";
const GATED: &str = "gated-rms-norm";

/// How an RMSNorm's weight multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By the weight.
    Plain,
    /// By one plus the weight.
    UnitOffset,
}

impl NormKind {
    pub(super) fn norm(self, weight: &[f32], eps: f32) -> Norm<'_> {
        Norm { weight, eps, unit_offset: self == Self::UnitOffset }
    }
}

/// `x * rsqrt(mean x^2 + eps) * (weight or 1 + weight)` over the last dimension.
///
/// `x` `[.., width]` and `weight` `[width]`, f32, bf16 or f16 in any layout; in x's shape and dtype.
///
/// ```
/// use canopy_candle::{NormKind, rms_norm};
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[3f32, 3.]], &Device::Cpu)?;
/// let w = Tensor::new(&[0f32, 1.], &Device::Cpu)?;
/// let y = rms_norm(&x, &w, 0., NormKind::UnitOffset)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((y[0] - 1.).abs() < 1e-6 && (y[1] - 2.).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A weight of another width, a dtype that is not a float, or two devices.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32, kind: NormKind) -> Result<Tensor> {
    rms_norm_to(x, weight, eps, kind, x.dtype())
}

/// [`rms_norm`] in another dtype, as [`swiglu_to`](super::swiglu_to).
///
/// ```
/// use canopy_candle::{NormKind, rms_norm_to};
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::new(&[[3f32, 3.]], &Device::Cpu)?;
/// let w = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = rms_norm_to(&x, &w, 0., NormKind::Plain, DType::BF16)?;
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of [`rms_norm`], and a dtype that is not a float.
pub fn rms_norm_to(x: &Tensor, weight: &Tensor, eps: f32, kind: NormKind, dtype: DType) -> Result<Tensor> {
    check_devices(RMS, x.device(), &[("weight", weight)])?;
    if dtype != x.dtype() {
        arg(RMS, "dtype").float(dtype)?;
    }
    row_major(x)?.apply_op2_no_bwd(&row_major(weight)?, &RmsNorm { eps, kind, dtype }).and_then(kept)
}

struct RmsNorm {
    eps: f32,
    kind: NormKind,
    dtype: DType,
}

/// The weight spans the last dimension.
fn check_weight(arg: Arg, weight: &Layout, x: &Layout) -> Result<()> {
    let width = x.dims().last().copied().unwrap_or(1);
    arg.shape(weight, &[width])
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        RMS
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        check_weight(arg(RMS, "weight"), w_l, x_l)?;
        let x = values(arg(RMS, "x"), x, x_l)?;
        let weight = values(arg(RMS, "weight"), w, w_l)?;
        let mut out = vec![0f32; x.len()];
        kernel::rms_norm(self.kind.norm(&weight, self.eps), &x, &mut out).wrap()?;
        Ok((storage_from(out, self.dtype), x_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        check_weight(arg(RMS, "weight"), w_l, x_l)?;
        let (device, rows) = (x.device(), cuda::glue::whole(arg(RMS, "x"), x, x_l)?);
        let weight = cuda::glue::whole(arg(RMS, "weight"), w, w_l)?;
        let norm = cuda::glue::norm(self.kind, &weight, self.eps);
        let (stream, len) = (device.cuda_stream(), rows.len());
        Ok(match self.dtype {
            DType::BF16 => {
                let mut out = cuda::output::<half::bf16>(device, len)?;
                launch::rms_norm(&stream, norm, &rows, &mut out.slice_mut(..len)).wrap()?;
                cuda::storage(device, out, x_l.shape().clone())
            }
            DType::F32 => {
                let mut out = cuda::output::<f32>(device, len)?;
                launch::rms_norm(&stream, norm, &rows, &mut out.slice_mut(..len)).wrap()?;
                cuda::storage(device, out, x_l.shape().clone())
            }
            other => return arg(RMS, "dtype").no_kernel(other),
        })
    }
}

/// `(sum, rms_norm(sum))` with `sum = x + residual`; the two are views of one allocation.
///
/// `x`, `residual` `[.., width]` of one shape, `weight` `[width]`; as [`rms_norm`].
///
/// ```
/// use canopy_candle::{NormKind, add_rms_norm};
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 1.]], &Device::Cpu)?;
/// let w = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let (sum, y) = add_rms_norm(&x, &x, &w, 0., NormKind::Plain)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[2., 2.]]);
/// assert_eq!(y.dims(), [1, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`rms_norm`], and a residual of another shape.
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f32,
    kind: NormKind,
) -> Result<(Tensor, Tensor)> {
    check_devices(ADD_RMS, x.device(), &[("residual", residual), ("weight", weight)])?;
    let pack =
        row_major(x)?.apply_op3_no_bwd(&row_major(residual)?, &row_major(weight)?, &AddRmsNorm { eps, kind });
    let pack = pack.and_then(kept)?;
    let mut views = PlaneViews::new(&pack);
    Ok((views.take(x.shape())?, views.take(x.shape())?))
}

/// [`add_rms_norm`] with the norm in `dtype`, as [`swiglu_to`](super::swiglu_to); the sum stays in x's dtype.
///
/// ```
/// use canopy_candle::{NormKind, add_rms_norm_to};
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::new(&[[1f32, 1.]], &Device::Cpu)?;
/// let w = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let (sum, y) = add_rms_norm_to(&x, &x, &w, 0., NormKind::Plain, DType::BF16)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[2., 2.]]);
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of [`add_rms_norm`], and a dtype that is not a float.
pub fn add_rms_norm_to(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f32,
    kind: NormKind,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    if dtype != x.dtype() {
        arg(ADD_RMS, "dtype").float(dtype)?;
    }
    #[cfg(feature = "cuda")]
    if dtype == DType::BF16 && x.dtype() == DType::F32 && x.device().is_cuda() {
        check_devices(ADD_RMS, x.device(), &[("residual", residual), ("weight", weight)])?;
        let op = AddRmsNormBf16 { eps, kind, normed: RefCell::new(None) };
        let sum = row_major(x)?.apply_op3_no_bwd(&row_major(residual)?, &row_major(weight)?, &op);
        let sum = sum.and_then(kept)?;
        let Some(normed) = op.normed.into_inner() else {
            return arg(ADD_RMS, "x").refuse(format_args!("a tensor on CUDA"), format_args!("another"));
        };
        let normed = Tensor::from_storage(Storage::Cuda(normed), x.shape(), BackpropOp::none(), false);
        return Ok((sum, kept(normed)?));
    }
    let (sum, normed) = add_rms_norm(x, residual, weight, eps, kind)?;
    Ok((sum, normed.to_dtype(dtype)?))
}

/// The op of [`add_rms_norm_to`] on CUDA: gives the sum, and leaves the norm beside it.
#[cfg(feature = "cuda")]
struct AddRmsNormBf16 {
    eps: f32,
    kind: NormKind,
    normed: RefCell<Option<CudaStorage>>,
}

#[cfg(feature = "cuda")]
impl CustomOp3 for AddRmsNormBf16 {
    fn name(&self) -> &'static str {
        ADD_RMS
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        arg(ADD_RMS, "x").cuda_only()
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        residual: &CudaStorage,
        residual_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        check_weight(arg(ADD_RMS, "weight"), w_l, x_l)?;
        arg(ADD_RMS, "residual").shape(residual_l, x_l.dims())?;
        let (device, rows) = (x.device(), cuda::glue::whole(arg(ADD_RMS, "x"), x, x_l)?);
        let residual = cuda::glue::whole(arg(ADD_RMS, "residual"), residual, residual_l)?;
        let weight = cuda::glue::whole(arg(ADD_RMS, "weight"), w, w_l)?;
        let (norm, len) = (cuda::glue::norm(self.kind, &weight, self.eps), rows.len());
        let mut sum = cuda::output::<f32>(device, len)?;
        let mut out = cuda::output::<half::bf16>(device, len)?;
        let outs = (&mut sum.slice_mut(..len), &mut out.slice_mut(..len));
        launch::add_rms_norm(&device.cuda_stream(), norm, [&rows, &residual], outs.0, outs.1).wrap()?;
        *self.normed.borrow_mut() = Some(cuda::storage(device, out, x_l.shape().clone()).0);
        Ok(cuda::storage(device, sum, x_l.shape().clone()))
    }
}

struct AddRmsNorm {
    eps: f32,
    kind: NormKind,
}

impl CustomOp3 for AddRmsNorm {
    fn name(&self) -> &'static str {
        ADD_RMS
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        residual: &CpuStorage,
        residual_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        check_weight(arg(ADD_RMS, "weight"), w_l, x_l)?;
        arg(ADD_RMS, "residual").shape(residual_l, x_l.dims())?;
        let dtype = x.dtype();
        let x = values(arg(ADD_RMS, "x"), x, x_l)?;
        let residual = values(arg(ADD_RMS, "residual"), residual, residual_l)?;
        let weight = values(arg(ADD_RMS, "weight"), w, w_l)?;
        let mut pack = vec![0f32; planes::elem_count(&[x.len(); 2])];
        let mut outs = PlanesMut::new(&mut pack);
        let (sum, out) = (outs.take(x.len()), outs.take(x.len()));
        kernel::add_rms_norm(self.kind.norm(&weight, self.eps), &x, &residual, sum, out).wrap()?;
        let shape = pack.len().into();
        Ok((storage_from(pack, dtype), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        residual: &CudaStorage,
        residual_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        check_weight(arg(ADD_RMS, "weight"), w_l, x_l)?;
        arg(ADD_RMS, "residual").shape(residual_l, x_l.dims())?;
        let (device, rows) = (x.device(), cuda::glue::whole(arg(ADD_RMS, "x"), x, x_l)?);
        let residual = cuda::glue::whole(arg(ADD_RMS, "residual"), residual, residual_l)?;
        let weight = cuda::glue::whole(arg(ADD_RMS, "weight"), w, w_l)?;
        let norm = cuda::glue::norm(self.kind, &weight, self.eps);
        let lens = [rows.len(); 2];
        let mut pack = cuda::output::<f32>(device, planes::elem_count(&lens))?;
        let [sum, out] = planes::ranges(lens);
        let (mut head, mut tail) = pack.split_at_mut(out.start);
        let (sum, out) = (&mut head.slice_mut(sum), &mut tail.slice_mut(..out.len()));
        launch::add_rms_norm(&device.cuda_stream(), norm, [&rows, &residual], sum, out).wrap()?;
        let len = planes::elem_count(&lens);
        Ok(cuda::storage(device, pack, len))
    }
}

/// `rms_norm(o) * silu(z)` per head, the weight plain: a GDN layer's output norm.
///
/// `o` `[N, Hv, Dv]`, `z` `[N, Hv Dv]`, `weight` `[Dv]`, f32, bf16 or f16 in any layout; gives `[N, Hv Dv]` in z's
/// dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let o = Tensor::new(&[[[2f32, 2.]]], &Device::Cpu)?;
/// let z = Tensor::new(&[[0f32, 1.]], &Device::Cpu)?;
/// let w = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let y = canopy_candle::gated_rms_norm(&o, &z, &w, 0.)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 1. / (1. + (-1f32).exp())).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape that differs from the above, a dtype that is not a float, or two devices.
pub fn gated_rms_norm(o: &Tensor, z: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    gated_rms_norm_to(o, z, weight, eps, z.dtype())
}

/// [`gated_rms_norm`] in another dtype, as [`swiglu_to`](super::swiglu_to).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let o = Tensor::new(&[[[2f32, 2.]]], &Device::Cpu)?;
/// let z = Tensor::new(&[[0f32, 1.]], &Device::Cpu)?;
/// let w = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let y = canopy_candle::gated_rms_norm_to(&o, &z, &w, 0., DType::BF16)?; // silu(1) = 0.7311 in eight bits
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[0., 0.73046875]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of [`gated_rms_norm`], and a dtype that is not a float.
pub fn gated_rms_norm_to(o: &Tensor, z: &Tensor, weight: &Tensor, eps: f32, dtype: DType) -> Result<Tensor> {
    check_devices(GATED, o.device(), &[("z", z), ("weight", weight)])?;
    if dtype != z.dtype() {
        arg(GATED, "dtype").float(dtype)?;
    }
    row_major(o)?
        .apply_op3_no_bwd(&row_pieces(z)?, &row_major(weight)?, &GatedRmsNorm { eps, dtype })
        .and_then(kept)
}

struct GatedRmsNorm {
    eps: f32,
    dtype: DType,
}

impl GatedRmsNorm {
    /// Both devices' checks of shapes; returns Hv.
    fn check(o: &Layout, z: &Layout, weight: &Layout) -> Result<usize> {
        let &[rows, heads, width] = o.dims() else {
            return arg(GATED, "o").refuse(format_args!("[N, Hv, Dv]"), format_args!("{:?}", o.dims()));
        };
        arg(GATED, "z").shape(z, &[rows, heads * width])?;
        arg(GATED, "weight").shape(weight, &[width])?;
        Ok(heads)
    }
}

impl CustomOp3 for GatedRmsNorm {
    fn name(&self) -> &'static str {
        GATED
    }

    fn cpu_fwd(
        &self,
        o: &CpuStorage,
        o_l: &Layout,
        z: &CpuStorage,
        z_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Self::check(o_l, z_l, w_l)?;
        let o = values(arg(GATED, "o"), o, o_l)?;
        let z = values(arg(GATED, "z"), z, z_l)?;
        let weight = values(arg(GATED, "weight"), w, w_l)?;
        let mut out = vec![0f32; o.len()];
        kernel::gated_rms_norm(NormKind::Plain.norm(&weight, self.eps), &o, &z, &mut out).wrap()?;
        Ok((storage_from(out, self.dtype), z_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        o: &CudaStorage,
        o_l: &Layout,
        z: &CudaStorage,
        z_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let heads = Self::check(o_l, z_l, w_l)?;
        let (device, rows) = (o.device(), cuda::glue::whole(arg(GATED, "o"), o, o_l)?);
        let z = cuda::glue::rows(arg(GATED, "z"), z, z_l)?;
        let weight = cuda::glue::whole(arg(GATED, "weight"), w, w_l)?;
        let norm = cuda::glue::norm(NormKind::Plain, &weight, self.eps);
        let (stream, len) = (device.cuda_stream(), rows.len());
        Ok(match self.dtype {
            DType::BF16 => {
                let mut out = cuda::output::<half::bf16>(device, len)?;
                let outs = &mut out.slice_mut(..len);
                launch::gated_rms_norm(&stream, norm, heads, &rows, z.rows(), outs).wrap()?;
                cuda::storage(device, out, z_l.shape().clone())
            }
            DType::F32 => {
                let mut out = cuda::output::<f32>(device, len)?;
                let outs = &mut out.slice_mut(..len);
                launch::gated_rms_norm(&stream, norm, heads, &rows, z.rows(), outs).wrap()?;
                cuda::storage(device, out, z_l.shape().clone())
            }
            other => return arg(GATED, "dtype").no_kernel(other),
        })
    }
}
