//! Launches of tree_gdn: chains that are faster walked by tree_gdn_serial's chain form; other trees by the fused design for bf16 rows, by the
//! split f32 design for f32 rows and where a fused block cannot hold a tree.

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
use canopy_kernels::tree_gdn::{Solve, Variant};
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

/// The CUDA kernels solve by forward substitution; the series are there to be compared, on the CPU.
fn check_variant(op: &'static str, variant: Variant) -> Result<()> {
    match variant {
        Variant::Solve(Solve::Forward) => Ok(()),
        other => arg(op, "variant").refuse(format_args!("forward on CUDA"), format_args!("{other}")),
    }
}

impl Verify<'_> {
    /// Writes the three planes of `pack`.
    pub(crate) fn run(&self, mut pack: CudaViewMut<'_, f32>) -> Result<()> {
        check_variant(self.op, self.variant)?;
        let [o, u, g_cum] = &self.planes;
        let (o_len, u_len, g_cum_len) = (o.len(), u.len(), g_cum.len());
        let (mut o_plane, mut rest) = pack.split_at_mut(u.start);
        let (mut u_plane, mut g_cum_plane) = rest.split_at_mut(g_cum.start - u.start);
        let planes =
            [o_plane.slice_mut(..o_len), u_plane.slice_mut(..u_len), g_cum_plane.slice_mut(..g_cum_len)];
        match self.qkv.0.dtype() {
            DType::BF16 => {
                self.rows(view::<bf16>(arg(self.op, "qkv"), self.qkv.0, self.qkv.1)?, planes, Self::fused)
            }
            DType::F32 => {
                self.rows(view::<f32>(arg(self.op, "qkv"), self.qkv.0, self.qkv.1)?, planes, Self::split)
            }
            other => arg(self.op, "qkv").no_kernel(other),
        }
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
            return self.split(tree, qkv, [o, u, g_cum]);
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

    fn split<T: Element>(
        &self,
        tree: &TreeOnDevice,
        qkv: CudaView<'_, T>,
        [o, u, g_cum]: [CudaViewMut<'_, f32>; 3],
    ) -> Result<()> {
        let device = self.qkv.0.device();
        let batch = self.tree.host();
        let mut scratch = output::<f32>(device, launch::scratch_len(self.dims, batch).max(1))?;
        let buffers = VerifyBuffers {
            qkv,
            gates: view::<f32>(arg(self.op, "gates"), self.gates.0, self.gates.1)?,
            state: view::<f32>(arg(self.op, "state"), self.state.0, self.state.1)?,
            scratch: &mut scratch,
            o,
            u,
            g_cum,
        };
        launch::verify(&device.cuda_stream(), self.dims, batch, tree, buffers).wrap()?;
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
        check_variant(self.op, self.variant)?;
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
