//! The MLP's gate.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use canopy_kernels::glue::cpu as kernel;

use crate::check::arg;
use crate::slices::{storage_from, values};
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
    check_devices(OP, gate.device(), &[("up", up)])?;
    gate.apply_op2_no_bwd(up, &Swiglu)
}

struct Swiglu;

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
        let dtype = gate.dtype();
        let gate = values(arg(OP, "gate"), gate, gate_l)?;
        let up = values(arg(OP, "up"), up, up_l)?;
        let mut out = vec![0f32; gate.len()];
        kernel::swiglu(&gate, &up, &mut out).wrap()?;
        Ok((storage_from(out, dtype), gate_l.shape().clone()))
    }
}
