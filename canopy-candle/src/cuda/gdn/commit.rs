//! Commits, alone and with the next round's verify.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::{CudaStorage, DType, Layout, Result, WithDType};
use canopy_kernels::GdnDims;
use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_gdn::dispatch::{Dtype, Form};
use canopy_kernels::tree_gdn::fused::{self, FusedBuffers, Pending, Tier};
use canopy_kernels::tree_gdn::launch::{self, Element, LayerTape};
use canopy_kernels::tree_gdn::{Solve, Variant};
use half::bf16;

use super::{Made, Planes, Source, Verify, solve};
use crate::DevicePaths;
use crate::check::arg;
use crate::cuda::{view, view_mut};
use crate::wrap::WrapKernelErr;

/// What verify read and wrote in one layer.
pub(crate) struct Tape<'a> {
    pub qkv: Source<'a>,
    pub gates: Source<'a>,
    pub u: Source<'a>,
}

/// One commit call for the layers whose pools lie one after another.
pub(crate) struct Commit<'a> {
    pub op: &'static str,
    pub paths: &'a DevicePaths,
    pub dims: GdnDims,
    pub variant: Variant,
    pub tapes: Vec<Tape<'a>>,
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
                u: view::<f32>(arg(self.op, "verified.u"), tape.u.0, tape.u.1)?,
            })
        });
        let tapes = tapes.collect::<Result<Vec<_>>>()?;
        let on_device = self.paths.on_device(self.op)?;
        launch::commit(&stream, self.dims, self.paths.host(), on_device, &tapes, &mut state).wrap()
    }
}

/// A commit and the next round's verify.
pub(crate) struct CommitVerify<'a> {
    pub paths: &'a DevicePaths,
    pub tape: Tape<'a>,
    pub verify: Verify<'a>,
}

impl CommitVerify<'_> {
    /// Advances the pool in place and verifies from there: in one launch where there is a kernel for it, else in two. Arguments that the second
    /// would refuse are refused before the first.
    pub(crate) fn run(self, (state, layout): (&mut CudaStorage, &Layout)) -> Result<Made> {
        let Self { paths, tape, verify } = self;
        verify.expect_runs((&*state, layout))?;
        if let Some((tree, columns)) = verify.commits(&tape)? {
            let mut room = verify.room()?;
            let (o, planes) = verify.planes(room.packed.as_view_mut());
            let pending = (paths, &tape);
            match &mut room.half {
                None => verify.in_one((tree, columns), pending, (state, layout), (o, planes))?,
                Some(half) => {
                    let o = half.slice_mut(..verify.planes[1].len());
                    verify.in_one((tree, columns), pending, (state, layout), (o, planes))?;
                }
            }
            return Ok(verify.made(room));
        }
        let Verify { op, dims, variant, .. } = verify;
        Commit { op, paths, dims, variant, tapes: vec![tape] }.run((&mut *state, layout))?;
        verify.run((&*state, layout))
    }
}

impl Verify<'_> {
    /// Refuses what has no kernel.
    fn expect_runs(&self, state: Source<'_>) -> Result<()> {
        match (self.dtype, self.qkv.0.dtype()) {
            (DType::F32, DType::F32) => self.inputs::<f32>(state).and_then(|_| self.wide_solve()).map(|_| ()),
            (DType::F32, _) => self.wide_solve().and_then(|_| self.inputs::<bf16>(state)).map(|_| ()),
            (DType::BF16, _) => self.inputs::<bf16>(state).and_then(|_| self.expect_half()),
            (other, _) => arg(self.op, "out").no_kernel(other),
        }
    }

    /// The batch and the value columns of a block that commits and verifies it with the bits of both.
    fn commits(&self, tape: &Tape<'_>) -> Result<Option<(&TreeOnDevice, usize)>> {
        let bf16s = [self.qkv.0, tape.qkv.0].iter().all(|rows| rows.dtype() == DType::BF16);
        if !bf16s || solve(self.op, self.variant)? != Solve::Forward {
            return Ok(None);
        }
        Ok(match self.dtype {
            DType::BF16 => match self.tree.halves(self.op)? {
                [Some(tree), None] => self.committing::<bf16>(tree, Dtype::Bf16)?,
                _ => None,
            },
            _ => match self.tree.parts(self.op)? {
                [Some(tree), None] => self.committing::<f32>(tree, Dtype::F32)?,
                _ => None,
            },
        })
    }

    /// The block of a batch that the fused design verifies; it has the bits of every other of that design.
    fn committing<'t, Out: Tier>(
        &self,
        tree: &'t TreeOnDevice,
        dtype: Dtype,
    ) -> Result<Option<(&'t TreeOnDevice, usize)>> {
        let design = self.design(tree, dtype, Form::Solve)?;
        if self.columns(Some(design), |columns| fused::shared_bytes::<Out>(tree, columns))?.is_none() {
            return Ok(None);
        }
        let columns =
            self.columns(Some(design), |columns| fused::commit_shared_bytes::<Out>(tree, columns))?;
        Ok(columns.map(|columns| (tree, columns)))
    }

    fn in_one<Out: Tier>(
        &self,
        (tree, columns): (&TreeOnDevice, usize),
        (paths, tape): (&DevicePaths, &Tape<'_>),
        state: (&mut CudaStorage, &Layout),
        (o, [u, g_cum]): Planes<'_, Out>,
    ) -> Result<()> {
        let (stream, op) = (self.qkv.0.device().cuda_stream(), self.op);
        let pending = Pending {
            qkv: view::<bf16>(arg(op, "qkv"), tape.qkv.0, tape.qkv.1)?,
            gates: view::<f32>(arg(op, "gates"), tape.gates.0, tape.gates.1)?,
            u: view::<f32>(arg(op, "verified.u"), tape.u.0, tape.u.1)?,
            paths: paths.host(),
            on_device: paths.on_device(op)?,
        };
        let state: CudaViewMut<'_, f32> = view_mut(arg(op, "state"), state.0, state.1)?;
        let buffers = FusedBuffers {
            qkv: view::<bf16>(arg(op, "qkv"), self.qkv.0, self.qkv.1)?,
            gates: view::<f32>(arg(op, "gates"), self.gates.0, self.gates.1)?,
            state,
            o,
            u,
            g_cum,
        };
        let batch = self.tree.host();
        fused::commit_and_verify(&stream, self.dims, batch, tree, columns, pending, buffers).wrap()
    }
}
