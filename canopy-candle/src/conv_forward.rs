//! tree_conv's forward pass over draft trees or over long chains, as one op.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::tree_conv::launch::{self, Element, OutputOf};
use canopy_kernels::{ConvDims, tree_conv as kernel};

use crate::check::arg;
use crate::conv::check_pool;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::slices::{storage_from, values};
use crate::wrap::WrapKernelErr;
use crate::{DeviceSequences, DeviceTree};

/// What the rows are.
pub(crate) enum Over<'a> {
    Trees(&'a DeviceTree),
    Chains(&'a DeviceSequences),
}

/// The forward pass over `x`, `weight` and the pool.
pub(crate) struct ConvForward<'a> {
    /// Its name in errors.
    pub op: &'static str,
    pub over: Over<'a>,
    /// Of the output.
    pub dtype: DType,
}

impl ConvForward<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(
        &self,
        x: (DType, &Layout),
        weight: (DType, &Layout),
        state: (DType, &Layout),
    ) -> Result<ConvDims> {
        let channels = x.1.dims().last().copied().unwrap_or(0);
        let rows = match self.over {
            Over::Trees(tree) => tree.host().rows(),
            Over::Chains(sequences) => sequences.host().rows(),
        };
        arg(self.op, "x").float(x.0)?;
        arg(self.op, "x").shape(x.1, &[rows, channels])?;
        arg(self.op, "weight").float(weight.0)?;
        arg(self.op, "weight").shape(weight.1, &[channels, ConvDims::WIDTH])?;
        let slots = check_pool(self.op, state, channels)?;
        match self.over {
            Over::Trees(tree) => tree.host().check_slots(self.op, slots).wrap()?,
            Over::Chains(sequences) => sequences.host().check_slots(self.op, slots).wrap()?,
        }
        ConvDims::new(channels).wrap()
    }
}

#[cfg(feature = "cuda")]
impl ConvForward<'_> {
    /// The launch for one dtype, which all three sources have.
    fn launch<T: Element + CudaDType + WithDType, Out: OutputOf<T> + CudaDType>(
        &self,
        dims: ConvDims,
        [x, weight, state]: [(&CudaStorage, &Layout); 3],
    ) -> Result<(CudaStorage, Shape)> {
        let device = x.0.device();
        let inputs = [
            cuda::view::<T>(arg(self.op, "x"), x.0, x.1)?,
            cuda::view::<T>(arg(self.op, "weight"), weight.0, weight.1)?,
            cuda::view::<T>(arg(self.op, "conv_state"), state.0, state.1)?,
        ];
        let mut out = cuda::output::<Out>(device, x.1.shape().elem_count())?;
        let (stream, written) = (device.cuda_stream(), out.as_view_mut());
        match self.over {
            Over::Trees(tree) => {
                launch::verify(&stream, dims, tree.host(), tree.on_device(self.op)?, inputs, written)
            }
            Over::Chains(sequences) => {
                let (host, chains) = (sequences.host(), sequences.chains(self.op)?);
                launch::forward_chains(&stream, dims, host, chains, inputs, written)
            }
        }
        .wrap()?;
        Ok(cuda::storage(device, out, x.1.shape().clone()))
    }
}

impl CustomOp3 for ConvForward<'_> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        weight: &CpuStorage,
        weight_l: &Layout,
        state: &CpuStorage,
        state_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dims = self.check((x.dtype(), x_l), (weight.dtype(), weight_l), (state.dtype(), state_l))?;
        let rows = values(arg(self.op, "x"), x, x_l)?;
        let weight = values(arg(self.op, "weight"), weight, weight_l)?;
        let state = values(arg(self.op, "conv_state"), state, state_l)?;
        let mut out = vec![0f32; rows.len()];
        match self.over {
            Over::Trees(tree) => {
                kernel::cpu::verify(dims, tree.host(), &rows, &weight, &state, &mut out).wrap()?;
            }
            Over::Chains(sequences) => {
                let host = sequences.host();
                kernel::cpu::forward_chains(dims, host, &rows, &weight, &state, &mut out).wrap()?;
            }
        }
        Ok((storage_from(out, self.dtype), x_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        weight: &CudaStorage,
        weight_l: &Layout,
        state: &CudaStorage,
        state_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dims = self.check((x.dtype(), x_l), (weight.dtype(), weight_l), (state.dtype(), state_l))?;
        let sources = [(x, x_l), (weight, weight_l), (state, state_l)];
        match (x.dtype(), self.dtype) {
            (DType::F32, DType::F32) => self.launch::<f32, f32>(dims, sources),
            (DType::F32, DType::BF16) => self.launch::<f32, half::bf16>(dims, sources),
            (DType::BF16, DType::BF16) => self.launch::<half::bf16, half::bf16>(dims, sources),
            (other, out) if other == out => arg(self.op, "x").no_kernel(other),
            (_, other) => arg(self.op, "out").no_kernel(other),
        }
    }
}
