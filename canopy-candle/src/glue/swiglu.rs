//! The MLP's gate.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, backend::BackendStorage};
use canopy_kernels::glue::cpu as kernel;
#[cfg(feature = "cuda")]
use canopy_kernels::glue::launch;

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::recorded::kept;
#[cfg(feature = "cuda")]
use crate::slices::matrix;
use crate::slices::{row_pieces, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const OP: &str = "swiglu";

/// `silu(gate) * up`, both of one shape, f32, bf16 or f16 in any layout; in gate's dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let gate = Tensor::new(&[[0f32, 1.]], &Device::Cpu)?;
/// let up = Tensor::new(&[[5f32, 2.]], &Device::Cpu)?;
/// let y = canopy_candle::swiglu(&gate, &up)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 2. / (1. + (-1f32).exp())).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Shapes that differ, a dtype that is not a float, or two devices.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    swiglu_to(gate, up, gate.dtype())
}

/// [`swiglu`] in another dtype: f32, or bf16 as products take it that round their rows ([`PackedLinear::rows_dtype`](crate::PackedLinear::rows_dtype)).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let one = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let y = canopy_candle::swiglu_to(&one, &one, DType::BF16)?; // silu(1) = 0.7311 in eight bits
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[0.73046875]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of [`swiglu`], and a dtype that is not a float.
pub fn swiglu_to(gate: &Tensor, up: &Tensor, dtype: DType) -> Result<Tensor> {
    check_devices(OP, gate.device(), &[("up", up)])?;
    if dtype != gate.dtype() {
        arg(OP, "dtype").float(dtype)?;
    }
    row_pieces(gate)?.apply_op2_no_bwd(&row_pieces(up)?, &Swiglu { dtype }).and_then(kept)
}

struct Swiglu {
    dtype: DType,
}

impl CustomOp2 for Swiglu {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_l: &Layout,
        up: &CpuStorage,
        up_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        arg(OP, "up").shape(up_l, gate_l.dims())?;
        let gate = values(arg(OP, "gate"), gate, gate_l)?;
        let up = values(arg(OP, "up"), up, up_l)?;
        let mut out = vec![0f32; gate.len()];
        kernel::swiglu(&gate, &up, &mut out).wrap()?;
        Ok((storage_from(out, self.dtype), gate_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_l: &Layout,
        up: &CudaStorage,
        up_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        arg(OP, "up").shape(up_l, gate_l.dims())?;
        let device = gate.device();
        let gate = cuda::glue::rows(arg(OP, "gate"), gate, gate_l)?;
        let up = cuda::glue::rows(arg(OP, "up"), up, up_l)?;
        let width = matrix(gate_l).map_or(0, |(_, width, _)| width);
        let len = gate_l.shape().elem_count();
        let stream = device.cuda_stream();
        Ok(match self.dtype {
            DType::BF16 => {
                let mut out = cuda::output::<half::bf16>(device, len)?;
                launch::swiglu(&stream, width, gate.rows(), up.rows(), &mut out.slice_mut(..len)).wrap()?;
                cuda::storage(device, out, gate_l.shape().clone())
            }
            DType::F32 => {
                let mut out = cuda::output::<f32>(device, len)?;
                launch::swiglu(&stream, width, gate.rows(), up.rows(), &mut out.slice_mut(..len)).wrap()?;
                cuda::storage(device, out, gate_l.shape().clone())
            }
            other => return arg(OP, "dtype").no_kernel(other),
        })
    }
}
