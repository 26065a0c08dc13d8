//! gates as an op.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, CudaStorage};
use canopy_kernels::gates as kernel;
#[cfg(feature = "cuda")]
use canopy_kernels::gates::launch::{self, Element};

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::recorded::kept;
use crate::slices::{row_major, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const OP: &str = "gates";

/// Log gates and write strengths: `g = -exp(a_log) softplus(a + dt_bias)`, `beta = sigmoid(b)`.
///
/// `ab` `[N, 2 Hv]` or `[N, 2, Hv]` (a, then b), `a_log`, `dt_bias` `[Hv]`, each f32, bf16 or f16 in any layout. Gives
/// `[N, 2, Hv]` f32 (plane 0 = g, plane 1 = beta).
///
/// ```
/// use canopy_candle::gates;
/// use candle_core::{Device, Tensor};
///
/// let dev = Device::Cpu;
/// let ab = Tensor::new(&[[0f32, 0.]], &dev)?;
/// let out = gates(&ab, &Tensor::new(&[0f32], &dev)?, &Tensor::new(&[0f32], &dev)?)?;
/// let out = out.flatten_all()?.to_vec1::<f32>()?;
/// assert!((out[0] + 2f32.ln()).abs() < 1e-6 && (out[1] - 0.5).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype or device that differs from the above.
pub fn gates(ab: &Tensor, a_log: &Tensor, dt_bias: &Tensor) -> Result<Tensor> {
    check_devices(OP, ab.device(), &[("a_log", a_log), ("dt_bias", dt_bias)])?;
    row_major(ab)?.apply_op3_no_bwd(&row_major(a_log)?, &row_major(dt_bias)?, &Gates).and_then(kept)
}

struct Gates;

impl Gates {
    /// Both devices' checks of shapes and dtypes; returns (N, Hv).
    fn check(
        ab: (DType, &Layout),
        a_log: (DType, &Layout),
        dt_bias: (DType, &Layout),
    ) -> Result<(usize, usize)> {
        arg(OP, "ab").float(ab.0)?;
        arg(OP, "a_log").float(a_log.0)?;
        arg(OP, "dt_bias").float(dt_bias.0)?;
        let (rows, v_heads) = match *ab.1.dims() {
            [rows, 2, heads] => (rows, heads),
            _ => {
                let v_heads = a_log.1.shape().elem_count();
                (arg(OP, "ab").shape_but_first(ab.1, &[2 * v_heads])?, v_heads)
            }
        };
        arg(OP, "a_log").shape(a_log.1, &[v_heads])?;
        arg(OP, "dt_bias").shape(dt_bias.1, &[v_heads])?;
        Ok((rows, v_heads))
    }
}

impl CustomOp3 for Gates {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        ab: &CpuStorage,
        ab_l: &Layout,
        a_log: &CpuStorage,
        a_log_l: &Layout,
        dt_bias: &CpuStorage,
        dt_bias_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, v_heads) =
            Self::check((ab.dtype(), ab_l), (a_log.dtype(), a_log_l), (dt_bias.dtype(), dt_bias_l))?;
        let ab = values(arg(OP, "ab"), ab, ab_l)?;
        let a_log = values(arg(OP, "a_log"), a_log, a_log_l)?;
        let dt_bias = values(arg(OP, "dt_bias"), dt_bias, dt_bias_l)?;
        let mut out = vec![0f32; ab.len()];
        kernel::cpu::forward(v_heads, &ab, &a_log, &dt_bias, &mut out).wrap()?;
        Ok((CpuStorage::F32(out), (rows, 2, v_heads).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        ab: &CudaStorage,
        ab_l: &Layout,
        a_log: &CudaStorage,
        a_log_l: &Layout,
        dt_bias: &CudaStorage,
        dt_bias_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, v_heads) =
            Self::check((ab.dtype(), ab_l), (a_log.dtype(), a_log_l), (dt_bias.dtype(), dt_bias_l))?;
        let device = ab.device();
        let a_log = cuda::view::<f32>(arg(OP, "a_log"), a_log, a_log_l)?;
        let dt_bias = cuda::view::<f32>(arg(OP, "dt_bias"), dt_bias, dt_bias_l)?;
        let ab_arg = arg(OP, "ab");
        let out = match ab.dtype() {
            DType::F32 => launch_on(device, cuda::view::<f32>(ab_arg, ab, ab_l)?, a_log, dt_bias),
            DType::BF16 => launch_on(device, cuda::view::<half::bf16>(ab_arg, ab, ab_l)?, a_log, dt_bias),
            other => ab_arg.no_kernel(other),
        }?;
        Ok(cuda::storage(device, out, (rows, 2, v_heads)))
    }
}

#[cfg(feature = "cuda")]
fn launch_on<T: Element>(
    device: &CudaDevice,
    ab: CudaView<'_, T>,
    a_log: CudaView<'_, f32>,
    dt_bias: CudaView<'_, f32>,
) -> Result<CudaSlice<f32>> {
    let mut out = cuda::output::<f32>(device, ab.len())?;
    let v_heads = a_log.len();
    launch::forward(&device.cuda_stream(), v_heads, ab, a_log, dt_bias, out.as_view_mut()).wrap()?;
    Ok(out)
}
