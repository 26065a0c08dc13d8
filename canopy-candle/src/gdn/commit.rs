//! Commits of tree_gdn.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
use canopy_kernels::GdnDims;
use canopy_kernels::tree_gdn::{self, Tape, Variant};

use super::{TreeGdnOutput, check_pool};
use crate::DevicePaths;
use crate::check::arg;
use crate::slices::{Carried, expect_distinct, pool_mut, row_major};
use crate::wrap::WrapKernelErr;

const COMMIT: &str = "tree-gdn-commit";

/// Commits the accepted paths into the pool, in place; slots that no path names keep every bit.
///
/// `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`; `verified`, `qkv`, `gates` and `variant` are verify's.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, TreeBatch, Variant};
/// use canopy_candle::{tree_gdn_commit, tree_gdn_verify};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0]]).unwrap(), &dev)?;
/// let tree = DeviceTree::new(batch, &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let verified = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
/// tree_gdn_commit(&state, &paths, dims, Variant::Walk, &verified, &qkv, &gates)?;
/// // The root's key is e_0: its value (3, 4) now lies in column 0 of the state, nothing else does.
/// let s = state.flatten_all()?.to_vec1::<f32>()?;
/// assert!((s[0] - 3.).abs() < 1e-4 && (s[2] - 4.).abs() < 1e-4 && s[1] == 0. && s[3] == 0.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or a source that shares
/// the pool's storage.
pub fn tree_gdn_commit(
    state: &Tensor,
    paths: &DevicePaths,
    dims: GdnDims,
    variant: Variant,
    verified: &TreeGdnOutput,
    qkv: &Tensor,
    gates: &Tensor,
) -> Result<()> {
    check_pool(COMMIT, dims, (state.dtype(), state.layout()))?;
    tree_gdn_commit_layers(&state.unsqueeze(0)?, paths, dims, variant, &[GdnTape { verified, qkv, gates }])
}

/// What verify read and wrote in one layer.
#[derive(Clone, Copy, Debug)]
pub struct GdnTape<'a> {
    /// Its outputs.
    pub verified: &'a TreeGdnOutput,
    /// Its rows.
    pub qkv: &'a Tensor,
    /// Its gates.
    pub gates: &'a Tensor,
}

/// [`tree_gdn_commit`] for the layers of a model, which lie one after another in `states` `[layers, slots, Hv, Dv, Dk]`; on CUDA one launch
/// for all of them, and rows of one dtype.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, GdnTape, TreeBatch, Variant};
/// use canopy_candle::{tree_gdn_commit_layers, tree_gdn_verify};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let batch = TreeBatch::single(DraftTree::new(vec![-1]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0]]).unwrap(), &dev)?;
/// let tree = DeviceTree::new(batch, &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]]], &dev)?;
/// let states = Tensor::zeros((2, 1, 1, 2, 2), DType::F32, &dev)?; // two layers
/// let rows = [Tensor::new(&[[1f32, 0., 1., 0., 3., 4.]], &dev)?, Tensor::new(&[[1f32, 0., 1., 0., 5., 6.]], &dev)?];
/// let first = tree_gdn_verify(&tree, dims, Variant::Walk, &rows[0], &gates, &states.get(0)?)?;
/// let second = tree_gdn_verify(&tree, dims, Variant::Walk, &rows[1], &gates, &states.get(1)?)?;
/// let tapes = [
///     GdnTape { verified: &first, qkv: &rows[0], gates: &gates },
///     GdnTape { verified: &second, qkv: &rows[1], gates: &gates },
/// ];
/// tree_gdn_commit_layers(&states, &paths, dims, Variant::Walk, &tapes)?;
/// // The key of both is e_0: their values lie in column 0 of their layers.
/// let s = states.flatten_all()?.to_vec1::<f32>()?;
/// assert!([(s[0], 3.), (s[2], 4.), (s[4], 5.), (s[6], 6.)].iter().all(|(got, v): &(f32, f32)| (got - v).abs() < 1e-4));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_gdn_commit`], and another number of tapes than layers.
pub fn tree_gdn_commit_layers(
    states: &Tensor,
    paths: &DevicePaths,
    dims: GdnDims,
    variant: Variant,
    tapes: &[GdnTape<'_>],
) -> Result<()> {
    paths.check_devices(COMMIT, &[("state", states)])?;
    let mut rows = Vec::with_capacity(tapes.len());
    for tape in tapes {
        rows.push(tape.row_major(COMMIT, paths, states)?);
    }
    let carried =
        tapes.iter().zip(&rows).map(|(tape, [qkv, gates])| CarriedTape::new(tape.verified, qkv, gates));
    states.inplace_op1(&TreeGdnCommit { paths, dims, variant, tapes: carried.collect() })
}

impl GdnTape<'_> {
    /// The rows and the gates as kernels read them, none of them in the storage of `states`.
    pub(super) fn row_major(
        &self,
        op: &'static str,
        paths: &DevicePaths,
        states: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let tensors = [("verified", &self.verified.packed), ("qkv", self.qkv), ("gates", self.gates)];
        paths.check_devices(op, &tensors)?;
        for (name, source) in tensors {
            expect_distinct(arg(op, name), source, states)?;
        }
        Ok([row_major(self.qkv)?, row_major(self.gates)?])
    }
}

/// A layer's tape, locked for reading.
pub(super) struct CarriedTape<'a> {
    u: Carried<'a>,
    g_cum: Carried<'a>,
    qkv: Carried<'a>,
    gates: Carried<'a>,
}

impl<'a> CarriedTape<'a> {
    pub fn new(verified: &'a TreeGdnOutput, qkv: &'a Tensor, gates: &'a Tensor) -> Self {
        let [u, g_cum] = [&verified.u, &verified.g_cum].map(Carried::new);
        Self { u, g_cum, qkv: Carried::new(qkv), gates: Carried::new(gates) }
    }

    /// Both devices' checks of shapes and dtypes for so many rows.
    pub fn check(&self, op: &'static str, rows: usize, dims: GdnDims) -> Result<()> {
        let Self { u, g_cum, qkv, gates } = self;
        arg(op, "verified.u").shape(u.layout(), &[rows, dims.v_heads, dims.dv])?;
        arg(op, "verified.g_cum").shape(g_cum.layout(), &[rows, dims.v_heads])?;
        for (name, plane) in [("verified.u", u), ("verified.g_cum", g_cum), ("gates", gates)] {
            arg(op, name).dtype(plane.dtype(), DType::F32)?;
        }
        arg(op, "qkv").float(qkv.dtype())?;
        arg(op, "qkv").shape(qkv.layout(), &[rows, dims.qkv_width()])?;
        arg(op, "gates").shape(gates.layout(), &[rows, 2, dims.v_heads])
    }

    /// The CPU's commit into one layer's pool.
    pub fn commit(
        &self,
        op: &'static str,
        dims: GdnDims,
        variant: Variant,
        paths: &DevicePaths,
        state: &mut [f32],
    ) -> Result<()> {
        let (u, g_cum) =
            (self.u.values(arg(op, "verified.u"))?, self.g_cum.values(arg(op, "verified.g_cum"))?);
        let (qkv, gates) = (self.qkv.values(arg(op, "qkv"))?, self.gates.values(arg(op, "gates"))?);
        let tape = Tape { qkv: &qkv, gates: &gates, u: &u, g_cum: &g_cum };
        tree_gdn::cpu::commit(dims, paths.host(), variant, tape, state).wrap()
    }

    /// What CUDA's commit reads.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self, op: &'static str) -> Result<crate::cuda::gdn::Tape<'_>> {
        Ok(crate::cuda::gdn::Tape {
            qkv: self.qkv.cuda_source(arg(op, "qkv"))?,
            gates: self.gates.cuda_source(arg(op, "gates"))?,
            u: self.u.cuda_source(arg(op, "verified.u"))?,
        })
    }
}

/// The accepted paths' update of the pools.
struct TreeGdnCommit<'a> {
    paths: &'a DevicePaths,
    dims: GdnDims,
    variant: Variant,
    tapes: Vec<CarriedTape<'a>>,
}

impl TreeGdnCommit<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, (dtype, layout): (DType, &Layout)) -> Result<()> {
        let (rows, dims) = (self.paths.batch_rows(), self.dims);
        let &[layers, slots, ..] = layout.dims() else {
            let got = layout.dims();
            return arg(COMMIT, "state")
                .refuse(format_args!("[layers, slots, Hv, Dv, Dk]"), format_args!("{got:?}"));
        };
        arg(COMMIT, "state").dtype(dtype, DType::F32)?;
        arg(COMMIT, "state").contiguous(layout)?;
        arg(COMMIT, "state").shape(layout, &[layers, slots, dims.v_heads, dims.dv, dims.dk])?;
        arg(COMMIT, "tapes").count(self.tapes.len(), layers)?;
        self.paths.check_slots(COMMIT, slots)?;
        self.tapes.iter().try_for_each(|tape| tape.check(COMMIT, rows, dims))
    }
}

impl InplaceOp1 for TreeGdnCommit<'_> {
    fn name(&self) -> &'static str {
        COMMIT
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.check((state.dtype(), layout))?;
        let states = pool_mut(arg(COMMIT, "state"), state, layout)?;
        let len = states.len() / self.tapes.len().max(1);
        for (tape, state) in self.tapes.iter().zip(states.chunks_exact_mut(len.max(1))) {
            tape.commit(COMMIT, self.dims, self.variant, self.paths, state)?;
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, state: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.check((state.dtype(), layout))?;
        let tapes = self.tapes.iter().map(|tape| tape.cuda(COMMIT)).collect::<Result<Vec<_>>>()?;
        let Self { paths, dims, variant, .. } = *self;
        crate::cuda::gdn::Commit { op: COMMIT, paths, dims, variant, tapes }.run((state, layout))
    }
}
