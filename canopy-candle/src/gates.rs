//! gates as an op.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use canopy_kernels::gates as kernel;

use crate::check::arg;
use crate::slices::values;
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
    ab.apply_op3_no_bwd(a_log, dt_bias, &Gates)
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
        let v_heads = a_log.1.shape().elem_count();
        let rows = match *ab.1.dims() {
            [rows, 2, heads] if heads == v_heads => rows,
            _ => arg(OP, "ab").shape_but_first(ab.1, &[2 * v_heads])?,
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
}
