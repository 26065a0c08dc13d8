//! RMS norms.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};
use canopy_kernels::glue::cpu::{self as kernel, Norm};

use crate::check::{Arg, arg};
use crate::planes::{self, PlaneViews, PlanesMut};
use crate::slices::{storage_from, values};
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
    check_devices(RMS, x.device(), &[("weight", weight)])?;
    x.apply_op2_no_bwd(weight, &RmsNorm { eps, kind })
}

struct RmsNorm {
    eps: f32,
    kind: NormKind,
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
        let dtype = x.dtype();
        let x = values(arg(RMS, "x"), x, x_l)?;
        let weight = values(arg(RMS, "weight"), w, w_l)?;
        let mut out = vec![0f32; x.len()];
        kernel::rms_norm(self.kind.norm(&weight, self.eps), &x, &mut out).wrap()?;
        Ok((storage_from(out, dtype), x_l.shape().clone()))
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
    let pack = x.apply_op3_no_bwd(residual, weight, &AddRmsNorm { eps, kind })?;
    let mut views = PlaneViews::new(&pack);
    Ok((views.take(x.shape())?, views.take(x.shape())?))
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
    check_devices(GATED, o.device(), &[("z", z), ("weight", weight)])?;
    o.apply_op3_no_bwd(z, weight, &GatedRmsNorm { eps })
}

struct GatedRmsNorm {
    eps: f32,
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
        let &[rows, heads, width] = o_l.dims() else {
            return arg(GATED, "o").refuse(format_args!("[N, Hv, Dv]"), format_args!("{:?}", o_l.dims()));
        };
        arg(GATED, "z").shape(z_l, &[rows, heads * width])?;
        arg(GATED, "weight").shape(w_l, &[width])?;
        let dtype = z.dtype();
        let o = values(arg(GATED, "o"), o, o_l)?;
        let z = values(arg(GATED, "z"), z, z_l)?;
        let weight = values(arg(GATED, "weight"), w, w_l)?;
        let mut out = vec![0f32; o.len()];
        kernel::gated_rms_norm(NormKind::Plain.norm(&weight, self.eps), &o, &z, &mut out).wrap()?;
        Ok((storage_from(out, dtype), z_l.shape().clone()))
    }
}
