//! gates as an op.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, DType, WithDType};
use canopy_kernels::gates as kernel;
#[cfg(feature = "cuda")]
use canopy_kernels::gates::launch::{self, Element, GateBuffers};

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

/// What the gates are made from: ab, a_log and dt_bias, each with its layout.
pub(crate) struct GateSources<'a, S>(pub [(&'a S, &'a Layout); 3]);

impl<S: BackendStorage> GateSources<'_, S> {
    /// Both devices' checks of shapes and dtypes, as arguments of `op` and for so many rows where they are fixed; returns `[N, 2, Hv]`.
    pub fn check(&self, op: &'static str, rows: Option<usize>) -> Result<[usize; 3]> {
        let [ab, a_log, dt_bias] = &self.0;
        arg(op, "ab").float(ab.0.dtype())?;
        arg(op, "a_log").float(a_log.0.dtype())?;
        arg(op, "dt_bias").float(dt_bias.0.dtype())?;
        let (got, v_heads) = match *ab.1.dims() {
            [rows, 2, heads] => (rows, heads),
            _ => {
                let v_heads = a_log.1.shape().elem_count();
                (arg(op, "ab").shape_but_first(ab.1, &[2 * v_heads])?, v_heads)
            }
        };
        let rows = rows.unwrap_or(got);
        arg(op, "ab").shape(ab.1, &[&[rows], &ab.1.dims()[1..]].concat())?;
        arg(op, "a_log").shape(a_log.1, &[v_heads])?;
        arg(op, "dt_bias").shape(dt_bias.1, &[v_heads])?;
        Ok([rows, 2, v_heads])
    }
}

impl GateSources<'_, CpuStorage> {
    /// The CPU forward, after [`Self::check`].
    pub fn cpu(&self, op: &'static str, [rows, planes, v_heads]: [usize; 3]) -> Result<(CpuStorage, Shape)> {
        let [ab, a_log, dt_bias] = self.0;
        let ab = values(arg(op, "ab"), ab.0, ab.1)?;
        let a_log = values(arg(op, "a_log"), a_log.0, a_log.1)?;
        let dt_bias = values(arg(op, "dt_bias"), dt_bias.0, dt_bias.1)?;
        let mut out = vec![0f32; ab.len()];
        kernel::cpu::forward(v_heads, &ab, &a_log, &dt_bias, &mut out).wrap()?;
        Ok((CpuStorage::F32(out), (rows, planes, v_heads).into()))
    }
}

#[cfg(feature = "cuda")]
impl<'a> GateSources<'a, CudaStorage> {
    /// What a launch over rows of one dtype takes, after [`Self::check`].
    pub fn buffers<T: Element + CudaDType + WithDType>(
        &self,
        op: &'static str,
        out: CudaViewMut<'a, f32>,
    ) -> Result<GateBuffers<'a, T>> {
        let [ab, a_log, dt_bias] = self.0;
        Ok(GateBuffers {
            ab: cuda::view::<T>(arg(op, "ab"), ab.0, ab.1)?,
            a_log: cuda::view::<f32>(arg(op, "a_log"), a_log.0, a_log.1)?,
            dt_bias: cuda::view::<f32>(arg(op, "dt_bias"), dt_bias.0, dt_bias.1)?,
            out,
        })
    }
}

struct Gates;

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
        let sources = GateSources([(ab, ab_l), (a_log, a_log_l), (dt_bias, dt_bias_l)]);
        sources.cpu(OP, sources.check(OP, None)?)
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
        let sources = GateSources([(ab, ab_l), (a_log, a_log_l), (dt_bias, dt_bias_l)]);
        let shape = Shape::from(sources.check(OP, None)?.to_vec());
        let (device, len) = (ab.device(), shape.elem_count());
        let (mut out, stream) = (cuda::output::<f32>(device, len)?, device.cuda_stream());
        let written = out.slice_mut(..len);
        match ab.dtype() {
            DType::F32 => launch::forward(&stream, sources.buffers::<f32>(OP, written)?),
            DType::BF16 => launch::forward(&stream, sources.buffers::<half::bf16>(OP, written)?),
            other => return arg(OP, "ab").no_kernel(other),
        }
        .wrap()?;
        Ok(cuda::storage(device, out, shape))
    }
}
