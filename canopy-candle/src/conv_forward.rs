//! tree_conv's forward pass over draft trees or over long chains, with or without the gates of the same rows, as one op.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::tree_conv::launch::{self, ConvBuffers, OutputOf};
use canopy_kernels::{ConvDims, tree_conv as kernel};
#[cfg(feature = "cuda")]
use canopy_kernels::{gates::launch::Element as GateElement, tree_conv::launch::Element};

use crate::check::arg;
use crate::conv::check_pool;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::gates::GateSources;
use crate::recorded::kept;
use crate::slices::{Carried, row_major, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;
use crate::{DeviceSequences, DeviceTree, GateInputs};

/// What the rows are.
pub(crate) enum Over<'a> {
    Trees(&'a DeviceTree),
    Chains(&'a DeviceSequences),
}

impl Over<'_> {
    fn device(&self) -> &candle_core::Device {
        match self {
            Self::Trees(tree) => tree.device(),
            Self::Chains(sequences) => sequences.device(),
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::Trees(tree) => tree.host().rows(),
            Self::Chains(sequences) => sequences.host().rows(),
        }
    }
}

/// The forward pass over `x`, `weight` and the pool.
pub(crate) struct ConvForward<'a> {
    /// Its name in errors.
    op: &'static str,
    over: Over<'a>,
    /// Of the output.
    dtype: DType,
    gates: Option<GatesPart<'a>>,
}

/// The gates of the same rows: ab, a_log and dt_bias, and what the pass leaves.
struct GatesPart<'a> {
    inputs: [Carried<'a>; 3],
    out: RefCell<Option<(Storage, Shape)>>,
}

impl GatesPart<'_> {
    fn cpu(&self, op: &'static str) -> Result<GateSources<'_, CpuStorage>> {
        let [ab, a_log, dt_bias] = &self.inputs;
        let (ab, a_log) = (ab.cpu_source(arg(op, "ab"))?, a_log.cpu_source(arg(op, "a_log"))?);
        Ok(GateSources([ab, a_log, dt_bias.cpu_source(arg(op, "dt_bias"))?]))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, op: &'static str) -> Result<GateSources<'_, CudaStorage>> {
        let [ab, a_log, dt_bias] = &self.inputs;
        let (ab, a_log) = (ab.cuda_source(arg(op, "ab"))?, a_log.cuda_source(arg(op, "a_log"))?);
        Ok(GateSources([ab, a_log, dt_bias.cuda_source(arg(op, "dt_bias"))?]))
    }
}

/// The rows in `dtype`.
pub(crate) fn conv(
    op: &'static str,
    over: Over<'_>,
    [x, weight, conv_state]: [&Tensor; 3],
    dtype: DType,
) -> Result<Tensor> {
    ConvForward { op, over, dtype, gates: None }.apply([x, weight, conv_state])
}

/// The rows in `dtype`, and the gates.
pub(crate) fn conv_gates(
    op: &'static str,
    over: Over<'_>,
    sources: [&Tensor; 3],
    gates: GateInputs<'_>,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let named = [("ab", gates.ab), ("a_log", gates.a_log), ("dt_bias", gates.dt_bias)];
    check_devices(op, over.device(), &named)?;
    let [ab, a_log, dt_bias] = named.map(|(_, tensor)| row_major(tensor));
    let inputs = [ab?, a_log?, dt_bias?];
    let part = GatesPart { inputs: inputs.each_ref().map(Carried::new), out: RefCell::new(None) };
    let pass = ConvForward { op, over, dtype, gates: Some(part) };
    let rows = pass.apply(sources)?;
    let left = pass.gates.and_then(|part| part.out.into_inner());
    let Some((storage, shape)) = left else {
        return arg(op, "gates").refuse(format_args!("gates of the pass"), format_args!("none"));
    };
    Ok((rows, kept(Tensor::from_storage(storage, shape, BackpropOp::none(), false))?))
}

impl ConvForward<'_> {
    fn apply(&self, [x, weight, conv_state]: [&Tensor; 3]) -> Result<Tensor> {
        let tensors = [("x", x), ("weight", weight), ("conv_state", conv_state)];
        check_devices(self.op, self.over.device(), &tensors)?;
        arg(self.op, "out").float(self.dtype)?;
        row_major(x)?.apply_op3_no_bwd(&row_major(weight)?, conv_state, self).and_then(kept)
    }

    /// Both devices' checks of shapes, dtypes and slots.
    fn check(
        &self,
        x: (DType, &Layout),
        weight: (DType, &Layout),
        state: (DType, &Layout),
    ) -> Result<ConvDims> {
        let channels = x.1.dims().last().copied().unwrap_or(0);
        arg(self.op, "x").float(x.0)?;
        arg(self.op, "x").shape(x.1, &[self.over.rows(), channels])?;
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
    /// The launch for one dtype, which all three sources have, and `ab` where there are gates.
    fn launch<T: Element + GateElement + CudaDType + WithDType, Out: OutputOf<T> + CudaDType>(
        &self,
        dims: ConvDims,
        [x, weight, state]: [(&CudaStorage, &Layout); 3],
    ) -> Result<(CudaStorage, Shape)> {
        let (device, op) = (x.0.device(), self.op);
        let len = x.1.shape().elem_count();
        let mut out = cuda::output::<Out>(device, len)?;
        let mut gates = None;
        if let Some(part) = &self.gates {
            let sources = part.cuda(op)?;
            let shape = Shape::from(sources.check(op, Some(self.over.rows()))?.to_vec());
            gates = Some((sources, cuda::output::<f32>(device, shape.elem_count())?, shape));
        }
        let buffers = ConvBuffers {
            x: cuda::view::<T>(arg(op, "x"), x.0, x.1)?,
            weight: cuda::view::<T>(arg(op, "weight"), weight.0, weight.1)?,
            conv_state: cuda::view::<T>(arg(op, "conv_state"), state.0, state.1)?,
            out: out.slice_mut(..len),
            gates: match &mut gates {
                Some((sources, out, shape)) => {
                    Some(sources.buffers::<T>(op, out.slice_mut(..shape.elem_count()))?)
                }
                None => None,
            },
        };
        let stream = device.cuda_stream();
        match self.over {
            Over::Trees(tree) => launch::verify(&stream, dims, tree.host(), tree.on_device(op)?, buffers),
            Over::Chains(sequences) => {
                let (host, chains) = (sequences.host(), sequences.chains(op)?);
                launch::forward_chains(&stream, dims, host, chains, buffers)
            }
        }
        .wrap()?;
        if let (Some(part), Some((_, out, shape))) = (&self.gates, gates) {
            let (storage, shape) = cuda::storage(device, out, shape);
            part.out.replace(Some((Storage::Cuda(storage), shape)));
        }
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
        if let Some(part) = &self.gates {
            let sources = part.cpu(self.op)?;
            let (gates, shape) = sources.cpu(self.op, sources.check(self.op, Some(self.over.rows()))?)?;
            part.out.replace(Some((Storage::Cpu(gates), shape)));
        }
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
