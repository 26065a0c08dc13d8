//! Launches of tree_gdn. f32 outputs: chains that are faster walked by tree_gdn_serial's chain form; other trees by the fused design for bf16
//! rows, by the split f32 design for f32 rows and where a fused block cannot hold a tree. bf16 outputs: [`half`]. Another solve than forward is
//! there to be compared: it takes the whole batch, in the design that has it.

mod commit;
mod half;

use std::ops::Range;

use ::half::bf16;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use candle_core::{CudaStorage, DType, Layout, Result, Storage, WithDType};
use canopy_kernels::GdnDims;
use canopy_kernels::cuda::{Kernels, TreeOnDevice};
use canopy_kernels::tree_gdn::dispatch::{Design, Dtype, Form};
use canopy_kernels::tree_gdn::fused::{self, FusedBuffers, Tier};
use canopy_kernels::tree_gdn::launch::{Element, VerifyBuffers};
use canopy_kernels::tree_gdn::{Schedule, Solve, Variant, series};
use canopy_kernels::tree_gdn_serial::launch::{self as serial, ChainBuffers, Pool};

use super::{memory, output, parts, storage, view};
use crate::DeviceTree;
use crate::check::arg;
use crate::wrap::WrapKernelErr;

pub(crate) use commit::{Commit, CommitVerify, Tape};

/// A storage and its layout.
pub(crate) type Source<'a> = (&'a CudaStorage, &'a Layout);

/// One verify call.
pub(crate) struct Verify<'a> {
    pub op: &'static str,
    pub tree: &'a DeviceTree,
    pub dims: GdnDims,
    pub variant: Variant,
    /// Of o.
    pub dtype: DType,
    pub qkv: Source<'a>,
    pub gates: Source<'a>,
    /// Where o (empty unless it is f32), u and g_cum lie in the pack.
    pub planes: [Range<usize>; 3],
}

/// What a call wrote: its pack, and o where it is bf16.
pub(crate) struct Made {
    pub packed: CudaSlice<f32>,
    pub beside: Option<Storage>,
}

/// What a call reads.
struct Inputs<'a, T> {
    qkv: CudaView<'a, T>,
    gates: CudaView<'a, f32>,
    state: CudaView<'a, f32>,
}

impl<T> Inputs<'_, T> {
    /// The same, for one of several launches.
    fn again(&self) -> Inputs<'_, T> {
        Inputs { qkv: self.qkv.slice(..), gates: self.gates.slice(..), state: self.state.slice(..) }
    }
}

/// Outputs in memory of their own.
struct Room {
    packed: CudaSlice<f32>,
    half: Option<CudaSlice<bf16>>,
}

/// Views of o, u and g_cum.
type Planes<'a, Out = f32> = (CudaViewMut<'a, Out>, [CudaViewMut<'a, f32>; 2]);

/// The solve of a variant that CUDA has.
fn solve(op: &'static str, variant: Variant) -> Result<Solve> {
    match variant {
        Variant::Walk | Variant::Solve(Solve::Blocked(16 | 64)) => {
            let built = format_args!("forward, dense, blocked32, neumann, squaring, level or chains on CUDA");
            arg(op, "variant").refuse(built, format_args!("{variant}"))
        }
        Variant::Solve(solve) => Ok(solve),
    }
}

/// The fused design's buffers of one call.
fn fused_buffers<'a, T, Out>(
    inputs: Inputs<'a, T>,
    (o, [u, g_cum]): Planes<'a, Out>,
) -> FusedBuffers<'a, Out, CudaView<'a, f32>, T> {
    let Inputs { qkv, gates, state } = inputs;
    FusedBuffers { qkv, gates, state, o, u, g_cum }
}

impl Verify<'_> {
    /// Into new outputs.
    pub(crate) fn run(&self, state: Source<'_>) -> Result<Made> {
        let mut room = self.room()?;
        match &mut room.half {
            None => self.wide(state, self.planes(room.packed.as_view_mut()))?,
            Some(half) => {
                let (_, tape) = self.planes(room.packed.as_view_mut());
                self.half(state, (half.slice_mut(..self.planes[1].len()), tape))?;
            }
        }
        Ok(self.made(room))
    }

    /// Writes the three planes of `pack`, which has o.
    pub(crate) fn run_into(&self, state: Source<'_>, pack: CudaViewMut<'_, f32>) -> Result<()> {
        self.wide(state, self.planes(pack))
    }

    fn room(&self) -> Result<Room> {
        let device = self.qkv.0.device();
        let packed = output::<f32>(device, self.planes[2].end)?;
        let half = match self.dtype {
            DType::F32 => None,
            DType::BF16 => Some(output::<bf16>(device, self.planes[1].len())?),
            other => return arg(self.op, "out").no_kernel(other),
        };
        Ok(Room { packed, half })
    }

    fn made(&self, room: Room) -> Made {
        let device = self.qkv.0.device();
        let beside = room.half.map(|half| Storage::Cuda(storage(device, half, self.planes[1].len()).0));
        Made { packed: room.packed, beside }
    }

    /// Views of a pack's planes.
    fn planes<'v>(&self, pack: CudaViewMut<'v, f32>) -> Planes<'v> {
        let [o, u, g_cum] = super::pieces(pack, &self.planes);
        (o, [u, g_cum])
    }

    fn inputs<'v, T: CudaDType + WithDType>(&'v self, state: Source<'v>) -> Result<Inputs<'v, T>> {
        Ok(Inputs {
            qkv: view::<T>(arg(self.op, "qkv"), self.qkv.0, self.qkv.1)?,
            gates: view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?,
            state: view::<f32>(arg(self.op, "state"), state.0, state.1)?,
        })
    }

    /// f32 outputs.
    fn wide(&self, state: Source<'_>, planes: Planes<'_>) -> Result<()> {
        let (solve, bf16s) = (self.wide_solve()?, self.qkv.0.dtype() == DType::BF16);
        match solve {
            Solve::Forward if bf16s => self.rows(self.inputs(state)?, planes, Self::fused),
            Solve::Forward => self.rows(self.inputs(state)?, planes, Self::forward),
            Solve::Level => self.under(Schedule::Levels, self.inputs(state)?, planes),
            Solve::Chains => self.under(Schedule::Chains, self.inputs(state)?, planes),
            solve if bf16s => self.by_solve::<bf16>(solve, self.inputs(state)?, planes),
            solve => self.by_solve::<f32>(solve, self.inputs(state)?, planes),
        }
    }

    /// The solve, for f32 outputs of these rows.
    fn wide_solve(&self) -> Result<Solve> {
        let solve = solve(self.op, self.variant)?;
        match (self.qkv.0.dtype(), solve) {
            (DType::F32, Solve::Level | Solve::Chains) => {
                arg(self.op, "qkv").refuse(format_args!("bf16 rows for {solve}"), format_args!("f32"))
            }
            (DType::F32 | DType::BF16, solve) => Ok(solve),
            (other, _) => arg(self.op, "qkv").no_kernel(other),
        }
    }

    /// The whole batch in the fused design under a schedule that is there to be compared.
    fn under<Out: Tier>(
        &self,
        schedule: Schedule,
        inputs: Inputs<'_, bf16>,
        planes: Planes<'_, Out>,
    ) -> Result<()> {
        let (stream, batch) = (self.qkv.0.device().cuda_stream(), self.tree.host());
        let tree = TreeOnDevice::with_schedule(&stream, batch, |_| schedule).wrap()?;
        fused::verify(&stream, self.dims, batch, &tree, 32, fused_buffers(inputs, planes)).wrap()
    }

    /// The whole batch in the split design.
    fn by_solve<T: Element>(&self, solve: Solve, inputs: Inputs<'_, T>, planes: Planes<'_>) -> Result<()> {
        let stream = self.qkv.0.device().cuda_stream();
        let tree = TreeOnDevice::new(&stream, self.tree.host()).wrap()?;
        // forward substitution of the split design goes by blocks of 32
        let solve = if matches!(solve, Solve::Blocked(_)) { Solve::Forward } else { solve };
        self.split(&tree, solve, inputs, planes)
    }

    /// Solves the sequences that are solved and walks the chains that are walked.
    fn rows<T: Element + serial::Element + 'static>(
        &self,
        inputs: Inputs<'_, T>,
        (mut o, mut tape): Planes<'_>,
        solve: impl Fn(&Self, &TreeOnDevice, Inputs<'_, T>, Planes<'_>) -> Result<()>,
    ) -> Result<()> {
        let [solved, walked] = self.tree.parts(self.op)?;
        if let Some(tree) = solved {
            let planes = (o.slice_mut(..), tape.each_mut().map(|plane| plane.slice_mut(..)));
            solve(self, tree, inputs.again(), planes)?;
        }
        match walked {
            Some(tree) => self.walk(tree, inputs, (o, tape)),
            None => Ok(()),
        }
    }

    /// The dispatched design for the kept sequences of `tree`.
    fn design(&self, tree: &TreeOnDevice, dtype: Dtype, form: Form) -> Result<Design> {
        let stream = self.qkv.0.device().cuda_stream();
        parts::design(&stream, self.dims, self.tree.host(), &tree.kept, (dtype, form)).wrap()
    }

    /// Bytes of shared memory that a block of this device may have.
    fn shared_limit(&self) -> Result<usize> {
        Ok(Kernels::on(self.qkv.0.device().cuda_stream().context()).wrap()?.shared_limit())
    }

    /// The dispatched width of the fused design's blocks, or the narrowest, where a block of `bytes` fits.
    fn columns(
        &self,
        design: Option<Design>,
        bytes: impl Fn(usize) -> Option<usize>,
    ) -> Result<Option<usize>> {
        let limit = self.shared_limit()?;
        let fits = |columns: &usize| bytes(*columns).is_some_and(|bytes| bytes <= limit);
        Ok(match design {
            Some(Design::Fused { columns, .. }) => [columns, 32].into_iter().find(fits),
            _ => None,
        })
    }

    fn fused(&self, tree: &TreeOnDevice, inputs: Inputs<'_, bf16>, planes: Planes<'_>) -> Result<()> {
        let design = self.design(tree, Dtype::F32, Form::Solve)?;
        let columns = self.columns(Some(design), |columns| fused::shared_bytes::<f32>(tree, columns))?;
        let Some(columns) = columns else {
            return self.split(tree, Solve::Forward, inputs, planes);
        };
        let stream = self.qkv.0.device().cuda_stream();
        let buffers = fused_buffers(inputs, planes);
        fused::verify(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    fn walk<T: serial::Element>(
        &self,
        tree: &TreeOnDevice,
        Inputs { qkv, gates, state }: Inputs<'_, T>,
        (o, [u, g_cum]): Planes<'_>,
    ) -> Result<()> {
        let columns = match self.design(tree, Dtype::F32, Form::Walk)? {
            Design::Chain { columns } => columns,
            _ => serial::COLUMNS[0],
        };
        let buffers = ChainBuffers { qkv, gates, state: Pool::Read(state), o, u, g_cum };
        let stream = self.qkv.0.device().cuda_stream();
        serial::chain(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    /// f32 rows: the split design, which takes every tree, so that a row's bits do not depend on its company; the fused one by name where its
    /// blocks hold the batch.
    fn forward(&self, tree: &TreeOnDevice, inputs: Inputs<'_, f32>, planes: Planes<'_>) -> Result<()> {
        let named = Design::from_env().wrap()?;
        let Some(columns) = self.columns(named, |columns| fused::wide_shared_bytes(tree, columns))? else {
            return self.split(tree, Solve::Forward, inputs, planes);
        };
        let stream = self.qkv.0.device().cuda_stream();
        let buffers = fused_buffers(inputs, planes);
        fused::verify_wide(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    fn split<T: Element>(
        &self,
        tree: &TreeOnDevice,
        solve: Solve,
        Inputs { qkv, gates, state }: Inputs<'_, T>,
        (o, [u, g_cum]): Planes<'_>,
    ) -> Result<()> {
        let (device, batch) = (self.qkv.0.device(), self.tree.host());
        let len = series::scratch_len(self.dims, batch, solve).wrap()?;
        let mut scratch = output::<f32>(device, len.max(1))?;
        let buffers = VerifyBuffers { qkv, gates, state, scratch: &mut scratch, o, u, g_cum };
        series::verify(&device.cuda_stream(), self.dims, batch, tree, solve, buffers).wrap()?;
        memory::keep(scratch);
        Ok(())
    }
}
