//! tree_conv over long chains, as ops.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::tree_conv::launch::{self, Element};
use canopy_kernels::{ConvDims, tree_conv as kernel};

use crate::DeviceSequences;
use crate::check::arg;
use crate::conv::check_pool;
use crate::conv_forward::{self, Over};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::slices::{Carried, expect_distinct, pool_mut, row_major};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

pub(crate) const FORWARD: &str = "chain-conv";
const ADVANCE: &str = "chain-conv-advance";

/// [`tree_conv_to`](crate::tree_conv_to) of long chains, each after the conv state in its slot.
///
/// `x` `[N, C]` raw rows and `weight` `[C, 4]` (tap 3 = the row itself), f32, bf16 or f16 in any layout; `conv_state` the contiguous pool
/// `[slots, 3, C]` (raw rows, oldest first). Gives `[N, C]` in `dtype`; on CUDA that is x's dtype, or bf16 from f32. Bits are those of
/// the rows as trees, wherever a chain is cut.
///
/// ```
/// use canopy_candle::{DeviceSequences, Sequences, chain_conv, chain_conv_advance};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let chain = DeviceSequences::new(Sequences::new(&[2], vec![0]).unwrap(), &dev)?;
/// let (x, state) = (Tensor::new(&[[1f32], [10.]], &dev)?, Tensor::new(&[[[7f32], [8.], [9.]]], &dev)?);
/// let weight = Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?; // the row and the one before it
/// let y = chain_conv(&chain, &x, &weight, &state, DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((y[0] - 10.).abs() < 1e-2 && (y[1] - 11.).abs() < 1e-2);
/// chain_conv_advance(&state, &chain, &x)?;
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [9., 1., 10.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, or a slot outside the pool.
pub fn chain_conv(
    sequences: &DeviceSequences,
    x: &Tensor,
    weight: &Tensor,
    conv_state: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    conv_forward::conv(FORWARD, Over::Chains(sequences), [x, weight, conv_state], dtype)
}

/// Keeps the last three raw rows of (conv state, chain), in place in the pool; slots that no chain names keep every bit.
///
/// `conv_state` the contiguous pool `[slots, 3, C]`, f32, on CUDA f32 or bf16; `x` `[N, C]` [`chain_conv`]'s raw rows, on CUDA of the
/// pool's dtype.
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or an `x` that shares the pool's storage.
pub fn chain_conv_advance(conv_state: &Tensor, sequences: &DeviceSequences, x: &Tensor) -> Result<()> {
    check_devices(ADVANCE, sequences.device(), &[("conv_state", conv_state), ("x", x)])?;
    expect_distinct(arg(ADVANCE, "x"), x, conv_state)?;
    let x = row_major(x)?;
    conv_state.inplace_op1(&Advance { sequences, x: Carried::new(&x) })
}

struct Advance<'a> {
    sequences: &'a DeviceSequences,
    x: Carried<'a>,
}

impl Advance<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, state: (DType, &Layout)) -> Result<ConvDims> {
        let (x, sequences) = (&self.x, self.sequences.host());
        let channels = x.layout().dims().last().copied().unwrap_or(0);
        arg(ADVANCE, "x").float(x.dtype())?;
        arg(ADVANCE, "x").shape(x.layout(), &[sequences.rows(), channels])?;
        let slots = check_pool(ADVANCE, state, channels)?;
        sequences.check_slots(ADVANCE, slots).wrap()?;
        ConvDims::new(channels).wrap()
    }
}

impl InplaceOp1 for Advance<'_> {
    fn name(&self) -> &'static str {
        ADVANCE
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, state_l: &Layout) -> Result<()> {
        let dims = self.check((state.dtype(), state_l))?;
        let x = self.x.values(arg(ADVANCE, "x"))?;
        let state = pool_mut(arg(ADVANCE, "conv_state"), state, state_l)?;
        kernel::cpu::advance_chains(dims, self.sequences.host(), &x, state).wrap()
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, state: &mut CudaStorage, state_l: &Layout) -> Result<()> {
        let dims = self.check((state.dtype(), state_l))?;
        match state.dtype() {
            DType::F32 => self.launch::<f32>(dims, (state, state_l)),
            DType::BF16 => self.launch::<half::bf16>(dims, (state, state_l)),
            other => arg(ADVANCE, "conv_state").no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl Advance<'_> {
    /// The launch for one dtype, which rows and pool have.
    fn launch<T: Element + CudaDType + WithDType>(
        &self,
        dims: ConvDims,
        state: (&mut CudaStorage, &Layout),
    ) -> Result<()> {
        let stream = state.0.device().cuda_stream();
        let mut pool = cuda::view_mut::<T>(arg(ADVANCE, "conv_state"), state.0, state.1)?;
        let x = arg(ADVANCE, "x");
        let x = cuda::view::<T>(x, self.x.cuda(x)?, self.x.layout())?;
        let (host, chains) = (self.sequences.host(), self.sequences.chains(ADVANCE)?);
        launch::advance_chains(&stream, dims, host, chains, x, &mut pool).wrap()
    }
}
