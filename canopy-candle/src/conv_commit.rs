//! tree_conv's commit of accepted paths or of long chains, for one layer or several, as one op.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::tree_conv::launch::{self, Element};
use canopy_kernels::{ConvDims, tree_conv as kernel};

use crate::check::arg;
use crate::conv::check_pool;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::slices::{Carried, expect_distinct, pool_mut, row_major, values, write_back};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceSequences};

/// Which rows a sequence goes on with.
#[derive(Clone, Copy)]
pub(crate) enum Along<'a> {
    Paths(&'a DevicePaths),
    Chains(&'a DeviceSequences),
}

impl<'a> Along<'a> {
    fn device(self) -> &'a Device {
        match self {
            Self::Paths(paths) => paths.device(),
            Self::Chains(sequences) => sequences.device(),
        }
    }

    /// N, the packed rows.
    fn rows(self) -> usize {
        match self {
            Self::Paths(paths) => paths.batch_rows(),
            Self::Chains(sequences) => sequences.host().rows(),
        }
    }

    fn check_slots(self, op: &'static str, pool_slots: usize) -> Result<()> {
        match self {
            Self::Paths(paths) => paths.check_slots(op, pool_slots),
            Self::Chains(sequences) => sequences.host().check_slots(op, pool_slots).wrap(),
        }
    }

    /// Slots that are written.
    fn slots(self) -> Vec<usize> {
        match self {
            Self::Paths(paths) => paths.host().iter().map(|(_, slot, _)| slot).collect(),
            Self::Chains(sequences) => sequences.host().iter().filter_map(|(_, _, slot)| slot).collect(),
        }
    }

    /// The CPU forward of one layer.
    fn cpu(self, dims: ConvDims, x: &[f32], state: &mut [f32]) -> Result<()> {
        match self {
            Self::Paths(paths) => kernel::cpu::commit(dims, paths.host(), x, state),
            Self::Chains(sequences) => kernel::cpu::advance_chains(dims, sequences.host(), x, state),
        }
        .wrap()
    }
}

/// Commits one layer's rows `[N, C]` into its pool `[slots, 3, C]`.
pub(crate) fn layer(op: &'static str, along: Along<'_>, conv_state: &Tensor, x: &Tensor) -> Result<()> {
    let channels = x.dims().last().copied().unwrap_or(0);
    check_pool(op, (conv_state.dtype(), conv_state.layout()), channels)?;
    layers(op, along, &conv_state.unsqueeze(0)?, &[x])
}

/// Commits every layer's rows into its pool of `[layers, slots, 3, C]`.
pub(crate) fn layers(op: &'static str, along: Along<'_>, conv_states: &Tensor, xs: &[&Tensor]) -> Result<()> {
    check_devices(op, along.device(), &[("conv_state", conv_states)])?;
    let mut rows = Vec::with_capacity(xs.len());
    for x in xs {
        check_devices(op, along.device(), &[("x", x)])?;
        expect_distinct(arg(op, "x"), x, conv_states)?;
        rows.push(row_major(x)?);
    }
    conv_states.inplace_op1(&ConvCommit { op, along, xs: rows.iter().map(Carried::new).collect() })
}

struct ConvCommit<'a> {
    /// Its name in errors.
    op: &'static str,
    along: Along<'a>,
    /// Raw rows of every layer.
    xs: Vec<Carried<'a>>,
}

impl ConvCommit<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, (dtype, layout): (DType, &Layout)) -> Result<ConvDims> {
        let pool = arg(self.op, "conv_state");
        let &[layers, slots, _, channels] = layout.dims() else {
            let got = layout.dims();
            return pool.refuse(format_args!("[layers, slots, 3, C]"), format_args!("{got:?}"));
        };
        pool.float(dtype)?;
        pool.contiguous(layout)?;
        pool.shape(layout, &[layers, slots, ConvDims::STATE_ROWS, channels])?;
        arg(self.op, "xs").count(self.xs.len(), layers)?;
        for x in &self.xs {
            arg(self.op, "x").float(x.dtype())?;
            arg(self.op, "x").shape(x.layout(), &[self.along.rows(), channels])?;
        }
        self.along.check_slots(self.op, slots)?;
        ConvDims::new(channels).wrap()
    }
}

impl InplaceOp1 for ConvCommit<'_> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, state_l: &Layout) -> Result<()> {
        let dims = self.check((state.dtype(), state_l))?;
        let pool = arg(self.op, "conv_state");
        let layer_len = state_l.shape().elem_count() / self.xs.len().max(1);
        let layer = |at: usize| at * layer_len..(at + 1) * layer_len;
        let xs = self.xs.iter().map(|x| x.values(arg(self.op, "x"))).enumerate();
        if let CpuStorage::F32(_) = state {
            let states = pool_mut(pool, state, state_l)?;
            for (at, x) in xs {
                self.along.cpu(dims, &x?, &mut states[layer(at)])?;
            }
            return Ok(());
        }
        let mut wide = values(pool, state, state_l)?.into_owned();
        for (at, x) in xs {
            let wide = &mut wide[layer(at)];
            self.along.cpu(dims, &x?, wide)?;
            for slot in self.along.slots() {
                let rows = slot * dims.state_len()..(slot + 1) * dims.state_len();
                write_back(state, state_l.start_offset() + layer(at).start + rows.start, &wide[rows])
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, state: &mut CudaStorage, state_l: &Layout) -> Result<()> {
        let dims = self.check((state.dtype(), state_l))?;
        match state.dtype() {
            DType::F32 => self.launch::<f32>(dims, (state, state_l)),
            DType::BF16 => self.launch::<half::bf16>(dims, (state, state_l)),
            other => arg(self.op, "conv_state").no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl ConvCommit<'_> {
    /// The launch for one dtype, which rows and pools have.
    fn launch<T: Element + CudaDType + WithDType>(
        &self,
        dims: ConvDims,
        state: (&mut CudaStorage, &Layout),
    ) -> Result<()> {
        let (stream, op) = (state.0.device().cuda_stream(), self.op);
        let mut pools = cuda::view_mut::<T>(arg(op, "conv_state"), state.0, state.1)?;
        let x = arg(op, "x");
        let xs = self.xs.iter().map(|rows| cuda::view::<T>(x, rows.cuda(x)?, rows.layout()));
        let xs = xs.collect::<Result<Vec<_>>>()?;
        match self.along {
            Along::Paths(paths) => {
                launch::commit(&stream, dims, paths.host(), paths.on_device(op)?, &xs, &mut pools)
            }
            Along::Chains(chains) => {
                launch::advance_chains(&stream, dims, chains.host(), chains.chains(op)?, &xs, &mut pools)
            }
        }
        .wrap()
    }
}
