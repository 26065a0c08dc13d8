//! Launches of tree_gdn: chains that are faster walked by tree_gdn_serial's chain form; other trees by the fused design for bf16 rows, by the
//! split f32 design for f32 rows and where a fused block cannot hold a tree. Another solve than forward is there to be compared: it takes the
//! whole batch, in the design that has it.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use candle_core::{CudaStorage, DType, Layout, Result, WithDType};
use canopy_kernels::GdnDims;
use canopy_kernels::cuda::{Kernels, TreeOnDevice};
use canopy_kernels::tree_gdn::dispatch::Design;
use canopy_kernels::tree_gdn::fused::{self, FusedBuffers};
use canopy_kernels::tree_gdn::launch::{self, Element, LayerTape, VerifyBuffers};
use canopy_kernels::tree_gdn::{Schedule, Solve, Variant, series};
use canopy_kernels::tree_gdn_serial::launch::{self as serial, ChainBuffers, Pool};
use half::bf16;

use super::{memory, output, parts, view, view_mut};
use crate::check::arg;
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

/// A storage and its layout.
pub(crate) type Source<'a> = (&'a CudaStorage, &'a Layout);

/// One verify call.
pub(crate) struct Verify<'a> {
    pub op: &'static str,
    pub tree: &'a DeviceTree,
    pub dims: GdnDims,
    pub variant: Variant,
    pub qkv: Source<'a>,
    pub gates: Source<'a>,
    pub state: Source<'a>,
    /// Where o, u and g_cum lie in the pack.
    pub planes: [Range<usize>; 3],
}

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

impl Verify<'_> {
    /// Writes the three planes of `pack`.
    pub(crate) fn run(&self, mut pack: CudaViewMut<'_, f32>) -> Result<()> {
        let solve = solve(self.op, self.variant)?;
        let [o, u, g_cum] = &self.planes;
        let (o_len, u_len, g_cum_len) = (o.len(), u.len(), g_cum.len());
        let (mut o_plane, mut rest) = pack.split_at_mut(u.start);
        let (mut u_plane, mut g_cum_plane) = rest.split_at_mut(g_cum.start - u.start);
        let planes =
            [o_plane.slice_mut(..o_len), u_plane.slice_mut(..u_len), g_cum_plane.slice_mut(..g_cum_len)];
        let forward = solve == Solve::Forward;
        match self.qkv.0.dtype() {
            DType::BF16 => {
                let qkv = view::<bf16>(arg(self.op, "qkv"), self.qkv.0, self.qkv.1)?;
                if forward { self.rows(qkv, planes, Self::fused) } else { self.compared(solve, qkv, planes) }
            }
            DType::F32 => {
                let qkv = view::<f32>(arg(self.op, "qkv"), self.qkv.0, self.qkv.1)?;
                match solve {
                    Solve::Forward => self.rows(qkv, planes, Self::forward),
                    Solve::Level | Solve::Chains => {
                        arg(self.op, "qkv").refuse(format_args!("bf16 rows for {solve}"), format_args!("f32"))
                    }
                    solve => self.by_solve(solve, qkv, planes),
                }
            }
            other => arg(self.op, "qkv").no_kernel(other),
        }
    }

    /// bf16 rows under a solve that is there to be compared.
    fn compared(
        &self,
        solve: Solve,
        qkv: CudaView<'_, bf16>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let schedule = match solve {
            Solve::Level => Schedule::Levels,
            Solve::Chains => Schedule::Chains,
            solve => return self.by_solve(solve, qkv, [o, u, g_cum]),
        };
        let (stream, batch) = (self.qkv.0.device().cuda_stream(), self.tree.host());
        let tree = TreeOnDevice::with_schedule(&stream, batch, |_| schedule).wrap()?;
        let gates = view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?;
        let state = view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?;
        let buffers = FusedBuffers { qkv, gates, state, o, u, g_cum };
        fused::verify(&stream, self.dims, batch, &tree, 32, buffers).wrap()
    }

    /// The whole batch in the split design.
    fn by_solve<T: Element>(
        &self,
        solve: Solve,
        qkv: CudaView<'_, T>,
        planes: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let stream = self.qkv.0.device().cuda_stream();
        let tree = TreeOnDevice::new(&stream, self.tree.host()).wrap()?;
        // forward substitution of the split design goes by blocks of 32
        let solve = if matches!(solve, Solve::Blocked(_)) { Solve::Forward } else { solve };
        self.split(&tree, solve, qkv, planes)
    }

    /// Solves the sequences that are solved and walks the chains that are walked.
    fn rows<T: Element + serial::Element + 'static>(
        &self,
        qkv: CudaView<'_, T>,
        mut planes: [CudaViewMut<'_, f32>; 3],
        solve: impl Fn(&Self, &TreeOnDevice, CudaView<'_, T>, [CudaViewMut<'_, f32>; 3]) -> Result<()>,
    ) -> Result<()> {
        let [solved, walked] = self.tree.parts(self.op)?;
        if let Some(tree) = solved {
            solve(self, tree, qkv.slice(..), planes.each_mut().map(|plane| plane.slice_mut(..)))?;
        }
        match walked {
            Some(tree) => self.walk(tree, qkv, planes),
            None => Ok(()),
        }
    }

    /// The dispatched design for the kept sequences of `tree`.
    fn design(&self, tree: &TreeOnDevice, walked: bool) -> Result<Design> {
        let stream = self.qkv.0.device().cuda_stream();
        parts::design(&stream, self.dims, self.tree.host(), &tree.kept, walked).wrap()
    }

    fn fused(
        &self,
        tree: &TreeOnDevice,
        qkv: CudaView<'_, bf16>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let stream = self.qkv.0.device().cuda_stream();
        let limit = Kernels::on(stream.context()).wrap()?.shared_limit();
        let fits =
            |columns: &usize| fused::shared_bytes::<f32>(tree, *columns).is_some_and(|bytes| bytes <= limit);
        let columns = match self.design(tree, false)? {
            Design::Fused { columns, .. } => [columns, 32].into_iter().find(fits),
            _ => None,
        };
        let Some(columns) = columns else {
            return self.split(tree, Solve::Forward, qkv, [o, u, g_cum]);
        };
        let gates = view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?;
        let state = view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?;
        let buffers = FusedBuffers { qkv, gates, state, o, u, g_cum };
        fused::verify(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    fn walk<T: serial::Element>(
        &self,
        tree: &TreeOnDevice,
        qkv: CudaView<'_, T>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let columns = match self.design(tree, true)? {
            Design::Chain { columns } => columns,
            _ => serial::COLUMNS[0],
        };
        let gates = view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?;
        let state = Pool::Read(view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?);
        let buffers = ChainBuffers { qkv, gates, state, o, u, g_cum };
        let stream = self.qkv.0.device().cuda_stream();
        serial::chain(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    /// f32 rows: the split design, which takes every tree, so that a row's bits do not depend on its company; the fused one by name where its
    /// blocks hold the batch.
    fn forward(
        &self,
        tree: &TreeOnDevice,
        qkv: CudaView<'_, f32>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let stream = self.qkv.0.device().cuda_stream();
        let limit = Kernels::on(stream.context()).wrap()?.shared_limit();
        let fits =
            |columns: &usize| fused::wide_shared_bytes(tree, *columns).is_some_and(|bytes| bytes <= limit);
        let columns = match Design::from_env().wrap()? {
            Some(Design::Fused { columns, .. }) => [columns, 32].into_iter().find(fits),
            _ => None,
        };
        let Some(columns) = columns else {
            return self.split(tree, Solve::Forward, qkv, [o, u, g_cum]);
        };
        let gates = view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?;
        let state = view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?;
        let buffers = FusedBuffers { qkv, gates, state, o, u, g_cum };
        fused::verify_wide(&stream, self.dims, self.tree.host(), tree, columns, buffers).wrap()
    }

    fn split<T: Element>(
        &self,
        tree: &TreeOnDevice,
        solve: Solve,
        qkv: CudaView<'_, T>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let device = self.qkv.0.device();
        let batch = self.tree.host();
        let len = series::scratch_len(self.dims, batch, solve).wrap()?;
        let mut scratch = output::<f32>(device, len.max(1))?;
        let buffers = VerifyBuffers {
            qkv,
            gates: view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?,
            state: view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?,
            scratch: &mut scratch,
            o,
            u,
            g_cum,
        };
        series::verify(&device.cuda_stream(), self.dims, batch, tree, solve, buffers).wrap()?;
        memory::keep(scratch);
        Ok(())
    }
}

/// What verify read and wrote in one layer.
pub(crate) struct Tape<'a> {
    pub qkv: Source<'a>,
    pub gates: Source<'a>,
    /// Verify's pack.
    pub pack: Source<'a>,
}

/// One commit call for the layers whose pools lie one after another.
pub(crate) struct Commit<'a> {
    pub op: &'static str,
    pub paths: &'a DevicePaths,
    pub dims: GdnDims,
    pub variant: Variant,
    pub tapes: Vec<Tape<'a>>,
    /// Where u lies in a pack.
    pub u: Range<usize>,
}

impl Commit<'_> {
    /// Advances the pools in place.
    pub(crate) fn run(&self, state: (&mut CudaStorage, &Layout)) -> Result<()> {
        solve(self.op, self.variant)?;
        match self.tapes.first().map(|tape| tape.qkv.0.dtype()) {
            None => Ok(()),
            Some(DType::BF16) => self.launch::<bf16>(state),
            Some(DType::F32) => self.launch::<f32>(state),
            Some(other) => arg(self.op, "qkv").no_kernel(other),
        }
    }

    fn launch<T: Element + CudaDType + WithDType>(&self, state: (&mut CudaStorage, &Layout)) -> Result<()> {
        let stream = state.0.device().cuda_stream();
        let mut state = view_mut::<f32>(arg(self.op, "state"), state.0, state.1)?;
        let tapes = self.tapes.iter().map(|tape| {
            Ok(LayerTape {
                qkv: view::<T>(arg(self.op, "qkv"), tape.qkv.0, tape.qkv.1)?,
                gates: view::<f32>(arg(self.op, "gates"), tape.gates.0, tape.gates.1)?,
                u: view::<f32>(arg(self.op, "verified"), tape.pack.0, tape.pack.1)?.slice(self.u.clone()),
            })
        });
        let tapes = tapes.collect::<Result<Vec<_>>>()?;
        let on_device = self.paths.on_device(self.op)?;
        launch::commit(&stream, self.dims, self.paths.host(), on_device, &tapes, &mut state).wrap()
    }
}
