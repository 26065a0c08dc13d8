//! From projected queries and keys to attention inputs, and the attention's output gate.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, DType};
use canopy_kernels::AttnDims;
use canopy_kernels::glue::cpu as kernel;
#[cfg(feature = "cuda")]
use canopy_kernels::glue::launch;

use super::NormKind;
use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::planes::{self, PlaneViews, PlanesMut};
use crate::recorded::kept;
use crate::slices::{Carried, row_major, row_pieces, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

pub(super) const ROPE: &str = "qk-norm-rope";
const GATE: &str = "attn-gate";

/// Norm and rotary embedding of projected queries and keys; see `canopy_kernels::glue::cpu::QkNormRope`.
#[derive(Clone, Debug)]
pub struct QkNormRope {
    /// Heads.
    pub dims: AttnDims,
    /// Each query head is followed by its output gate.
    pub gated: bool,
    /// `[D]` f32.
    pub q_norm: Tensor,
    /// `[D]` f32.
    pub k_norm: Tensor,
    /// Norm epsilon.
    pub eps: f32,
    /// How both norm weights multiply.
    pub kind: NormKind,
    /// `[rotary_dim / 2]` f32.
    pub inv_freq: Tensor,
}

/// RMSNorm of every query and key head, then rotary embedding at each row's own position.
///
/// `q_proj` `[N, Hq D]` (`[N, Hq 2 D]` if gated), `k_proj` `[N, Hkv D]`, one dtype of f32, bf16 or f16 in any layout;
/// absolute `positions` `[N]`. Gives `q` `[N, Hq, D]` and `k` `[N, Hkv, D]`, views of one allocation. A drafted node's
/// position is the committed length plus its depth, so siblings share one.
///
/// ```
/// use canopy_candle::{AttnDims, NormKind, QkNormRope, qk_norm_rope};
/// use candle_core::{Device, Tensor};
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
/// let x = Tensor::new(&[[1f32, 1.], [1., 1.]], &dev)?;
/// let (q, k) = qk_norm_rope(&op, &x, &x, &[0, 1])?;
/// let q = q.flatten_all()?.to_vec1::<f32>()?;
/// let (sin, cos) = 1f32.sin_cos();
/// assert!((q[0] - 1.).abs() < 1e-6 && (q[2] - (cos - sin)).abs() < 1e-6 && (q[3] - (cos + sin)).abs() < 1e-6);
/// assert_eq!(k.dims(), [2, 1, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype or device that differs from the above.
pub fn qk_norm_rope(
    op: &QkNormRope,
    q_proj: &Tensor,
    k_proj: &Tensor,
    positions: &[i32],
) -> Result<(Tensor, Tensor)> {
    let carried = Rope::new(op, q_proj, k_proj, positions)?;
    let pack = row_pieces(q_proj)?.apply_op2_no_bwd(&row_pieces(k_proj)?, &carried).and_then(kept)?;
    let mut views = PlaneViews::new(&pack);
    let (rows, dims) = (positions.len(), op.dims);
    let q = views.take((rows, dims.q_heads, dims.head_dim))?;
    Ok((q, views.take((rows, dims.kv_heads, dims.head_dim))?))
}

/// One call: its parameters, locked for reading.
pub(super) struct Rope<'a> {
    pub op: &'a QkNormRope,
    pub positions: &'a [i32],
    pub q_norm: Carried<'a>,
    pub k_norm: Carried<'a>,
    pub inv_freq: Carried<'a>,
}

impl<'a> Rope<'a> {
    /// All on the device of `q_proj`.
    pub fn new(op: &'a QkNormRope, q_proj: &Tensor, k_proj: &Tensor, positions: &'a [i32]) -> Result<Self> {
        let others =
            [("k_proj", k_proj), ("q_norm", &op.q_norm), ("k_norm", &op.k_norm), ("inv_freq", &op.inv_freq)];
        check_devices(ROPE, q_proj.device(), &others)?;
        let [q_norm, k_norm, inv_freq] = [&op.q_norm, &op.k_norm, &op.inv_freq].map(Carried::new);
        Ok(Self { op, positions, q_norm, k_norm, inv_freq })
    }

    /// Both devices' checks of shapes and dtypes.
    pub fn check(&self, q_proj: &Layout, k_proj: &Layout) -> Result<()> {
        let (rows, dims) = (self.positions.len(), self.op.dims);
        let q_width = dims.q_width() * if self.op.gated { 2 } else { 1 };
        arg(ROPE, "q_proj").shape(q_proj, &[rows, q_width])?;
        arg(ROPE, "k_proj").shape(k_proj, &[rows, dims.kv_width()])?;
        arg(ROPE, "q_norm").shape(self.q_norm.layout(), &[dims.head_dim])?;
        arg(ROPE, "k_norm").shape(self.k_norm.layout(), &[dims.head_dim])?;
        match self.inv_freq.layout().dims() {
            &[half] if 2 * half <= dims.head_dim => Ok(()),
            got => arg(ROPE, "inv_freq")
                .refuse(format_args!("[at most {}]", dims.head_dim / 2), format_args!("{got:?}")),
        }
    }
}

impl CustomOp2 for Rope<'_> {
    fn name(&self) -> &'static str {
        ROPE
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.check(q_l, k_l)?;
        arg(ROPE, "k_proj").dtype(k.dtype(), q.dtype())?;
        let dtype = q.dtype();
        let q_proj = values(arg(ROPE, "q_proj"), q, q_l)?;
        let k_proj = values(arg(ROPE, "k_proj"), k, k_l)?;
        let q_norm = self.q_norm.values(arg(ROPE, "q_norm"))?;
        let k_norm = self.k_norm.values(arg(ROPE, "k_norm"))?;
        let inv_freq = self.inv_freq.values(arg(ROPE, "inv_freq"))?;
        let (rows, QkNormRope { dims, gated, eps, kind, .. }) = (self.positions.len(), self.op);
        let lens = [rows * dims.q_width(), rows * dims.kv_width()];
        let mut pack = vec![0f32; planes::elem_count(&lens)];
        let mut outs = PlanesMut::new(&mut pack);
        let (q, k) = (outs.take(lens[0]), outs.take(lens[1]));
        let args = kernel::QkNormRope {
            dims: *dims,
            gated: *gated,
            q_norm: kind.norm(&q_norm, *eps),
            k_norm: kind.norm(&k_norm, *eps),
            inv_freq: &inv_freq,
            positions: self.positions,
        };
        kernel::qk_norm_rope(args, &q_proj, &k_proj, q, k).wrap()?;
        let shape = pack.len().into();
        Ok((storage_from(pack, dtype), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_l: &Layout,
        k: &CudaStorage,
        k_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.check(q_l, k_l)?;
        let device = q.device();
        let q_proj = cuda::glue::rows(arg(ROPE, "q_proj"), q, q_l)?;
        let k_proj = cuda::glue::rows(arg(ROPE, "k_proj"), k, k_l)?;
        let q_norm = self.q_norm.cuda_values(arg(ROPE, "q_norm"))?;
        let k_norm = self.k_norm.cuda_values(arg(ROPE, "k_norm"))?;
        let inv_freq = self.inv_freq.cuda_values(arg(ROPE, "inv_freq"))?;
        let (rows, QkNormRope { dims, gated, eps, kind, .. }) = (self.positions.len(), self.op);
        let positions = cuda::lists::on_device(device, crate::List::Positions, self.positions)?;
        let lens = [rows * dims.q_width(), rows * dims.kv_width()];
        let mut pack = cuda::output::<f32>(device, planes::elem_count(&lens))?;
        let [q, k] = planes::ranges(lens);
        let (mut head, mut tail) = pack.split_at_mut(k.start);
        let outs = [&mut head.slice_mut(q), &mut tail.slice_mut(..k.len())];
        let op = launch::QkNormRope {
            dims: *dims,
            gated: *gated,
            q_norm: cuda::glue::norm(*kind, &q_norm, *eps),
            k_norm: cuda::glue::norm(*kind, &k_norm, *eps),
            inv_freq: &inv_freq,
            positions: &positions.first(rows),
        };
        let inputs = [q_proj.rows(), k_proj.rows()];
        launch::qk_norm_rope(&device.cuda_stream(), op, inputs, outs).wrap()?;
        let len = planes::elem_count(&lens);
        Ok(cuda::storage(device, pack, len))
    }
}

/// `attn * sigmoid(gate)` with the gate taken from a gated `q_proj`.
///
/// `attn` `[N, Hq, D]`, `q_proj` `[N, Hq 2 D]` (every head's query, then its gate), f32, bf16 or f16 in any layout; gives
/// `[N, Hq D]` in attn's dtype (on CUDA f32, from attn of f32 or bf16).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let dims = canopy_candle::AttnDims::new(1, 1, 2).unwrap();
/// let attn = Tensor::new(&[[[2f32, 4.]]], &Device::Cpu)?;
/// let q_proj = Tensor::new(&[[9f32, 9., 0., 0.]], &Device::Cpu)?;
/// let y = canopy_candle::attn_gate(dims, &attn, &q_proj)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype or device that differs from the above.
pub fn attn_gate(dims: AttnDims, attn: &Tensor, q_proj: &Tensor) -> Result<Tensor> {
    check_devices(GATE, attn.device(), &[("q_proj", q_proj)])?;
    row_major(attn)?.apply_op2_no_bwd(&row_pieces(q_proj)?, &AttnGate { dims }).and_then(kept)
}

struct AttnGate {
    dims: AttnDims,
}

impl AttnGate {
    /// Both devices' checks of shapes; returns N.
    fn check(&self, attn: &Layout, q_proj: &Layout) -> Result<usize> {
        let rows = arg(GATE, "attn").shape_but_first(attn, &[self.dims.q_heads, self.dims.head_dim])?;
        arg(GATE, "q_proj").shape(q_proj, &[rows, 2 * self.dims.q_width()])?;
        Ok(rows)
    }
}

impl CustomOp2 for AttnGate {
    fn name(&self) -> &'static str {
        GATE
    }

    fn cpu_fwd(
        &self,
        attn: &CpuStorage,
        attn_l: &Layout,
        q_proj: &CpuStorage,
        q_proj_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dims = self.dims;
        let rows = self.check(attn_l, q_proj_l)?;
        let dtype = attn.dtype();
        let attn = values(arg(GATE, "attn"), attn, attn_l)?;
        let q_proj = values(arg(GATE, "q_proj"), q_proj, q_proj_l)?;
        let mut out = vec![0f32; attn.len()];
        kernel::attn_gate(dims, &attn, &q_proj, &mut out).wrap()?;
        Ok((storage_from(out, dtype), (rows, dims.q_width()).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        attn: &CudaStorage,
        attn_l: &Layout,
        q_proj: &CudaStorage,
        q_proj_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let rows = self.check(attn_l, q_proj_l)?;
        let device = attn.device();
        let q_proj = cuda::glue::rows(arg(GATE, "q_proj"), q_proj, q_proj_l)?;
        let len = attn_l.shape().elem_count();
        let (mut out, stream) = (cuda::output::<f32>(device, len)?, device.cuda_stream());
        let (name, gated) = (arg(GATE, "attn"), &mut out.slice_mut(..len));
        match attn.dtype() {
            DType::BF16 => {
                let attn = cuda::view::<half::bf16>(name, attn, attn_l)?;
                launch::attn_gate(&stream, self.dims, &attn, q_proj.rows(), gated).wrap()?;
            }
            _ => {
                let attn = cuda::glue::whole(name, attn, attn_l)?;
                launch::attn_gate(&stream, self.dims, &attn, q_proj.rows(), gated).wrap()?;
            }
        }
        Ok(cuda::storage(device, out, (rows, self.dims.q_width())))
    }
}
