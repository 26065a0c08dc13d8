//! gdn_prefill as an op.

use std::cell::RefCell;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Device, InplaceOp1, Layout, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, cuda_backend::cudarc::driver::CudaSlice};
use canopy_kernels::GdnDims;
#[cfg(feature = "cuda")]
use canopy_kernels::cuda::ChainsOnDevice;
#[cfg(feature = "cuda")]
use canopy_kernels::gdn_prefill::launch::{self, PrefillBuffers, SequencesOnDevice};
use canopy_kernels::gdn_prefill::{PrefillInput, Sequences, cpu};

use crate::check::arg;
use crate::gdn::check_pool;
use crate::slices::{expect_distinct, pool_mut, row_major, values};
use crate::tree::{check_devices, supported};
use crate::wrap::WrapKernelErr;

const PREFILL: &str = "gdn-prefill";

/// [`Sequences`] ready for a device's kernels.
///
/// ```
/// use canopy_candle::{DeviceSequences, Sequences};
/// use candle_core::Device;
///
/// let sequences = Sequences::new(&[300, 5], vec![0, 1]).unwrap();
/// assert_eq!(DeviceSequences::new(sequences, &Device::Cpu)?.host().rows(), 305);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceSequences {
    host: Sequences,
    device: Device,
    #[cfg(feature = "cuda")]
    on_device: Option<Arc<(SequencesOnDevice, ChainsOnDevice)>>,
}

impl DeviceSequences {
    /// Copies what the device's kernels read.
    ///
    /// # Errors
    /// On a device that canopy has no kernels for (metal).
    pub fn new(sequences: Sequences, device: &Device) -> Result<Self> {
        supported("device sequences", device)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_device: crate::cuda::upload(device, |stream| {
                Ok((SequencesOnDevice::new(stream, &sequences)?, ChainsOnDevice::new(stream, &sequences)?))
            })?,
            host: sequences,
            device: device.clone(),
        })
    }

    /// The sequences themselves.
    pub fn host(&self) -> &Sequences {
        &self.host
    }

    /// What the convolution reads of them.
    #[cfg(feature = "cuda")]
    pub(crate) fn chains(&self, op: &'static str) -> Result<&ChainsOnDevice> {
        match &self.on_device {
            Some(lists) => Ok(&lists.1),
            None => arg(op, "sequences")
                .refuse(format_args!("sequences on CUDA"), format_args!("{:?}", self.device)),
        }
    }

    /// Where the sequences are; every tensor of an op must be there too.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// Runs long chains (prompts) over the states in their slots, in place, and gives `o` `[N, Hv, Dv]` f32. The convolution before it has a
/// state of its own, which this does not touch.
///
/// `qkv` `[N, 2 Hk Dk + Hv Dv]` f32, bf16 or f16 as the convolution leaves it, in any layout, on CUDA bf16; `gates` `[N, 2, Hv]` f32 (plane 0
/// = g, plane 1 = beta), in any layout; `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`. On the CPU outputs and states have the bits
/// of one row at a time. On CUDA rows are taken in chunks of 64 from a sequence's first row: cut a prompt at multiples of 64 rows and the
/// bits stay the same.
///
/// ```
/// use canopy_candle::{DeviceSequences, GdnDims, Sequences, gdn_prefill};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let sequences = DeviceSequences::new(Sequences::new(&[2], vec![0]).unwrap(), &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let o = gdn_prefill(&sequences, dims, &qkv, &gates, &state)?;
/// assert_eq!(o.dims(), [2, 1, 2]);
/// // The first row's key is e_0, the second's e_1: each value lies in its column of the state.
/// let s = state.flatten_all()?.to_vec1::<f32>()?;
/// assert!([3., 5., 4., 6.].iter().zip(&s).all(|(want, got)| (got - want).abs() < 1e-4));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or a source that shares the pool's storage.
pub fn gdn_prefill(
    sequences: &DeviceSequences,
    dims: GdnDims,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<Tensor> {
    check_devices(PREFILL, &sequences.device, &[("qkv", qkv), ("gates", gates), ("state", state)])?;
    for (name, source) in [("qkv", qkv), ("gates", gates)] {
        expect_distinct(arg(PREFILL, name), source, state)?;
    }
    row_major(qkv)?.apply_op2_no_bwd(&row_major(gates)?, &Prefill { sequences, dims, state })
}

/// A storage and its layout.
type Source<'a, S> = (&'a S, &'a Layout);

/// The call over its rows; the pool is locked for writing inside.
struct Prefill<'a> {
    sequences: &'a DeviceSequences,
    dims: GdnDims,
    state: &'a Tensor,
}

impl Prefill<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, qkv: (DType, &Layout), gates: (DType, &Layout)) -> Result<()> {
        let (sequences, dims) = (&self.sequences.host, self.dims);
        let rows = sequences.rows();
        arg(PREFILL, "qkv").float(qkv.0)?;
        arg(PREFILL, "qkv").shape(qkv.1, &[rows, dims.qkv_width()])?;
        arg(PREFILL, "gates").dtype(gates.0, DType::F32)?;
        arg(PREFILL, "gates").shape(gates.1, &[rows, 2, dims.v_heads])?;
        let slots = check_pool(PREFILL, dims, (self.state.dtype(), self.state.layout()))?;
        sequences.check_slots(PREFILL, slots).wrap()
    }

    fn shape(&self) -> Shape {
        (self.sequences.host.rows(), self.dims.v_heads, self.dims.dv).into()
    }
}

impl CustomOp2 for Prefill<'_> {
    fn name(&self) -> &'static str {
        PREFILL
    }

    fn cpu_fwd(
        &self,
        qkv: &CpuStorage,
        qkv_l: &Layout,
        gates: &CpuStorage,
        gates_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l))?;
        let o = RefCell::new(vec![0f32; self.shape().elem_count()]);
        self.state.inplace_op1(&OnCpu { call: self, qkv: (qkv, qkv_l), gates: (gates, gates_l), o: &o })?;
        Ok((CpuStorage::F32(o.into_inner()), self.shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        qkv: &CudaStorage,
        qkv_l: &Layout,
        gates: &CudaStorage,
        gates_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l))?;
        let device = qkv.device();
        let o = RefCell::new(crate::cuda::output::<f32>(device, self.shape().elem_count())?);
        self.state.inplace_op1(&OnCuda { call: self, qkv: (qkv, qkv_l), gates: (gates, gates_l), o: &o })?;
        Ok(crate::cuda::storage(device, o.into_inner(), self.shape()))
    }
}

/// With the pool as its destination, on the CPU.
struct OnCpu<'a> {
    call: &'a Prefill<'a>,
    qkv: Source<'a, CpuStorage>,
    gates: Source<'a, CpuStorage>,
    o: &'a RefCell<Vec<f32>>,
}

impl InplaceOp1 for OnCpu<'_> {
    fn name(&self) -> &'static str {
        PREFILL
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, state_l: &Layout) -> Result<()> {
        let qkv = values(arg(PREFILL, "qkv"), self.qkv.0, self.qkv.1)?;
        let gates = values(arg(PREFILL, "gates"), self.gates.0, self.gates.1)?;
        let state = pool_mut(arg(PREFILL, "state"), state, state_l)?;
        let input = PrefillInput { qkv: &qkv, gates: &gates };
        let Prefill { sequences, dims, .. } = *self.call;
        cpu::forward(dims, &sequences.host, input, state, &mut self.o.borrow_mut()).wrap()
    }
}

/// With the pool as its destination, on CUDA.
#[cfg(feature = "cuda")]
struct OnCuda<'a> {
    call: &'a Prefill<'a>,
    qkv: Source<'a, CudaStorage>,
    gates: Source<'a, CudaStorage>,
    o: &'a RefCell<CudaSlice<f32>>,
}

#[cfg(feature = "cuda")]
impl InplaceOp1 for OnCuda<'_> {
    fn name(&self) -> &'static str {
        PREFILL
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        arg(PREFILL, "state").cuda_only()
    }

    fn cuda_fwd(&self, state: &mut CudaStorage, state_l: &Layout) -> Result<()> {
        let Prefill { sequences, dims, .. } = *self.call;
        let Some(on_device) = &sequences.on_device else {
            return arg(PREFILL, "sequences")
                .refuse(format_args!("sequences on CUDA"), format_args!("{:?}", sequences.device));
        };
        let device = self.qkv.0.device();
        let len = launch::scratch_len(dims, &sequences.host);
        let mut scratch = crate::cuda::output::<f32>(device, len)?;
        let mut o = self.o.borrow_mut();
        let buffers = PrefillBuffers {
            qkv: crate::cuda::view::<half::bf16>(arg(PREFILL, "qkv"), self.qkv.0, self.qkv.1)?,
            gates: crate::cuda::view::<f32>(arg(PREFILL, "gates"), self.gates.0, self.gates.1)?,
            state: crate::cuda::view_mut::<f32>(arg(PREFILL, "state"), state, state_l)?,
            scratch: &mut scratch,
            o: o.slice_mut(..self.call.shape().elem_count()),
        };
        launch::forward(&device.cuda_stream(), dims, &sequences.host, &on_device.0, buffers).wrap()
    }
}
