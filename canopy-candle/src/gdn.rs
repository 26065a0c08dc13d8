//! tree_gdn as ops.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp3, DType, Device, InplaceOp1, InplaceOp3, Layout, Result, Shape, Tensor,
};
use canopy_kernels::tree_gdn::{self, Tape, Variant, VerifyInput, VerifyOutput};
use canopy_kernels::{GdnDims, TreeBatch};

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda::gdn::Source;
use crate::planes::{self, PlaneViews, PlanesMut};
use crate::recorded::kept;
use crate::slices::{Carried, expect_distinct, pool, pool_mut, row_major, values};
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

const VERIFY: &str = "tree-gdn-verify";
const COMMIT: &str = "tree-gdn-commit";

/// What one verify pass leaves behind. Three views of one allocation.
#[derive(Clone, Debug)]
pub struct TreeGdnOutput {
    packed: Tensor,
    /// `[N, Hv, Dv]` f32.
    pub o: Tensor,
    /// `[N, Hv, Dv]` f32, pseudo-values.
    pub u: Tensor,
    /// `[N, Hv]` f32, cumulative log gate.
    pub g_cum: Tensor,
}

impl TreeGdnOutput {
    /// Room for the outputs of `rows` packed rows, for [`tree_gdn_verify_into`].
    pub fn zeros(rows: usize, dims: GdnDims, device: &Device) -> Result<Self> {
        let len = planes::elem_count(&plane_lens(rows, dims));
        Self::from_packed(Tensor::zeros(len, DType::F32, device)?, rows, dims)
    }

    fn from_packed(packed: Tensor, rows: usize, dims: GdnDims) -> Result<Self> {
        let mut views = PlaneViews::new(&packed);
        let o = views.take((rows, dims.v_heads, dims.dv))?;
        let u = views.take((rows, dims.v_heads, dims.dv))?;
        let g_cum = views.take((rows, dims.v_heads))?;
        Ok(Self { packed, o, u, g_cum })
    }

    /// The one allocation: the planes o, u and g_cum, each starting at a multiple of 32 elements.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }
}

/// Both devices' checks of what verify reads, in either form of the delta rule: shapes, dtypes and slots.
pub(crate) fn check_inputs(
    op: &'static str,
    batch: &TreeBatch,
    dims: GdnDims,
    qkv: (DType, &Layout),
    gates: (DType, &Layout),
    state: (DType, &Layout),
) -> Result<()> {
    let rows = batch.rows();
    arg(op, "qkv").float(qkv.0)?;
    arg(op, "qkv").shape(qkv.1, &[rows, dims.qkv_width()])?;
    arg(op, "gates").dtype(gates.0, DType::F32)?;
    arg(op, "gates").shape(gates.1, &[rows, 2, dims.v_heads])?;
    batch.check_slots(op, check_pool(op, dims, state)?).wrap()
}

/// The state pool; returns its slots.
pub(crate) fn check_pool(op: &'static str, dims: GdnDims, state: (DType, &Layout)) -> Result<usize> {
    arg(op, "state").dtype(state.0, DType::F32)?;
    arg(op, "state").contiguous(state.1)?;
    arg(op, "state").shape_but_first(state.1, &[dims.v_heads, dims.dv, dims.dk])
}

fn plane_lens(rows: usize, dims: GdnDims) -> [usize; 3] {
    let values = rows * dims.v_heads * dims.dv;
    [values, values, rows * dims.v_heads]
}

/// Verifies every tree in one pass and leaves the pool as it is.
///
/// `qkv` `[N, 2 Hk Dk + Hv Dv]` f32, bf16 or f16 as tree_conv leaves it, in any layout; `gates` `[N, 2, Hv]` f32
/// (plane 0 = g, plane 1 = beta), in any layout; `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, GdnDims, TreeBatch, Variant, tree_gdn_verify};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let tree = DraftTree::new(vec![-1, 0, 0]).unwrap();
/// let tree = DeviceTree::new(TreeBatch::single(tree, 0), &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.], [0., 1., 1., 0., 7., 8.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let out = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
/// // The root writes its own value under its key and, as beta is 1, reads it back scaled by Dk^-1/2.
/// let o = out.o.flatten_all()?.to_vec1::<f32>()?;
/// assert!((o[0] - 3. / 2f32.sqrt()).abs() < 1e-5 && (o[1] - 4. / 2f32.sqrt()).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, or a slot outside the pool.
pub fn tree_gdn_verify(
    tree: &DeviceTree,
    dims: GdnDims,
    variant: Variant,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<TreeGdnOutput> {
    tree.check_devices(VERIFY, &[("qkv", qkv), ("gates", gates), ("state", state)])?;
    let op = TreeGdnVerify { tree, dims, variant, state: None };
    let packed = row_major(qkv)?.apply_op3_no_bwd(&row_major(gates)?, state, &op).and_then(kept)?;
    TreeGdnOutput::from_packed(packed, tree.host().rows(), dims)
}

/// [`tree_gdn_verify`] into outputs that exist already ([`TreeGdnOutput::zeros`]): nothing is allocated, as a
/// captured CUDA graph needs.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, GdnDims, TreeBatch, TreeGdnOutput, Variant};
/// use canopy_candle::{tree_gdn_verify, tree_gdn_verify_into};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let tree = DeviceTree::new(TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0), &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let out = TreeGdnOutput::zeros(2, dims, &dev)?;
/// tree_gdn_verify_into(&out, &tree, dims, Variant::Walk, &qkv, &gates, &state)?;
/// let fresh = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
/// assert_eq!(out.o.flatten_all()?.to_vec1::<f32>()?, fresh.o.flatten_all()?.to_vec1::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_gdn_verify`], and outputs of another size or over an input's storage.
pub fn tree_gdn_verify_into(
    out: &TreeGdnOutput,
    tree: &DeviceTree,
    dims: GdnDims,
    variant: Variant,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<()> {
    let tensors = [("qkv", qkv), ("gates", gates), ("state", state), ("out", &out.packed)];
    tree.check_devices(VERIFY, &tensors)?;
    for (name, source) in &tensors[..3] {
        expect_distinct(arg(VERIFY, name), source, &out.packed)?;
    }
    let op = TreeGdnVerify { tree, dims, variant, state: Some(Carried::new(state)) };
    out.packed.inplace_op3(&row_major(qkv)?, &row_major(gates)?, &op)
}

/// One verify pass; as an allocating op the state is an operand, as an in-place op it is carried.
struct TreeGdnVerify<'a> {
    tree: &'a DeviceTree,
    dims: GdnDims,
    variant: Variant,
    state: Option<Carried<'a>>,
}

impl TreeGdnVerify<'_> {
    /// Both devices' checks of what verify reads.
    fn check(&self, qkv: (DType, &Layout), gates: (DType, &Layout), state: (DType, &Layout)) -> Result<()> {
        check_inputs(VERIFY, self.tree.host(), self.dims, qkv, gates, state)
    }

    /// The carried pool, after the in-place face's checks.
    fn carried(&self, qkv: (DType, &Layout), gates: (DType, &Layout), out: &Layout) -> Result<&Carried<'_>> {
        let Some(state) = &self.state else {
            return arg(VERIFY, "state")
                .refuse(format_args!("a pool carried by the op"), format_args!("none"));
        };
        self.check(qkv, gates, (state.dtype(), state.layout()))?;
        arg(VERIFY, "out").shape(out, &[self.elem_count()])?;
        Ok(state)
    }

    /// The one CPU forward of both faces.
    fn cpu(
        &self,
        qkv: (&CpuStorage, &Layout),
        gates: (&CpuStorage, &Layout),
        state: (&CpuStorage, &Layout),
        packed: &mut [f32],
    ) -> Result<()> {
        let qkv = values(arg(VERIFY, "qkv"), qkv.0, qkv.1)?;
        let gates = values(arg(VERIFY, "gates"), gates.0, gates.1)?;
        let state = pool(arg(VERIFY, "state"), state.0, state.1)?;
        let [o, u, g_cum] = plane_lens(self.tree.host().rows(), self.dims);
        let mut planes = PlanesMut::new(packed);
        let output = VerifyOutput { o: planes.take(o), u: planes.take(u), g_cum: planes.take(g_cum) };
        let input = VerifyInput { qkv: &qkv, gates: &gates, state };
        tree_gdn::cpu::verify(self.dims, self.tree.host(), self.variant, input, output).wrap()
    }

    /// The launch that both faces share.
    #[cfg(feature = "cuda")]
    fn cuda<'s>(&self, qkv: Source<'s>, gates: Source<'s>, state: Source<'s>) -> crate::cuda::gdn::Verify<'s>
    where
        Self: 's,
    {
        let planes = planes::ranges(plane_lens(self.tree.host().rows(), self.dims));
        let Self { tree, dims, variant, .. } = *self;
        crate::cuda::gdn::Verify { op: VERIFY, tree, dims, variant, qkv, gates, state, planes }
    }

    fn elem_count(&self) -> usize {
        planes::elem_count(&plane_lens(self.tree.host().rows(), self.dims))
    }
}

impl CustomOp3 for TreeGdnVerify<'_> {
    fn name(&self) -> &'static str {
        VERIFY
    }

    fn cpu_fwd(
        &self,
        qkv: &CpuStorage,
        qkv_l: &Layout,
        gates: &CpuStorage,
        gates_l: &Layout,
        state: &CpuStorage,
        state_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), (state.dtype(), state_l))?;
        let mut packed = vec![0f32; self.elem_count()];
        self.cpu((qkv, qkv_l), (gates, gates_l), (state, state_l), &mut packed)?;
        let shape = packed.len().into();
        Ok((CpuStorage::F32(packed), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        qkv: &CudaStorage,
        qkv_l: &Layout,
        gates: &CudaStorage,
        gates_l: &Layout,
        state: &CudaStorage,
        state_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), (state.dtype(), state_l))?;
        let mut packed = crate::cuda::output::<f32>(qkv.device(), self.elem_count())?;
        self.cuda((qkv, qkv_l), (gates, gates_l), (state, state_l)).run(packed.as_view_mut())?;
        Ok(crate::cuda::storage(qkv.device(), packed, self.elem_count()))
    }
}

impl InplaceOp3 for TreeGdnVerify<'_> {
    fn name(&self) -> &'static str {
        VERIFY
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        out_l: &Layout,
        qkv: &CpuStorage,
        qkv_l: &Layout,
        gates: &CpuStorage,
        gates_l: &Layout,
    ) -> Result<()> {
        let state = self.carried((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), out_l)?;
        let packed = pool_mut(arg(VERIFY, "out"), out, out_l)?;
        let state = (state.cpu(arg(VERIFY, "state"))?, state.layout());
        self.cpu((qkv, qkv_l), (gates, gates_l), state, packed)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        out_l: &Layout,
        qkv: &CudaStorage,
        qkv_l: &Layout,
        gates: &CudaStorage,
        gates_l: &Layout,
    ) -> Result<()> {
        let state = self.carried((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), out_l)?;
        let packed = crate::cuda::view_mut::<f32>(arg(VERIFY, "out"), out, out_l)?;
        let state = (state.cuda(arg(VERIFY, "state"))?, state.layout());
        self.cuda((qkv, qkv_l), (gates, gates_l), state).run(packed)
    }
}

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
        let tensors = [("verified", &tape.verified.packed), ("qkv", tape.qkv), ("gates", tape.gates)];
        paths.check_devices(COMMIT, &tensors)?;
        for (name, source) in tensors {
            expect_distinct(arg(COMMIT, name), source, states)?;
        }
        rows.push((row_major(tape.qkv)?, row_major(tape.gates)?));
    }
    let carried = tapes.iter().zip(&rows).map(|(tape, (qkv, gates))| CarriedTape {
        packed: Carried::new(&tape.verified.packed),
        qkv: Carried::new(qkv),
        gates: Carried::new(gates),
    });
    states.inplace_op1(&TreeGdnCommit { paths, dims, variant, tapes: carried.collect() })
}

/// A layer's tape, locked for reading.
struct CarriedTape<'a> {
    packed: Carried<'a>,
    qkv: Carried<'a>,
    gates: Carried<'a>,
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
        for CarriedTape { packed, qkv, gates } in &self.tapes {
            arg(COMMIT, "verified").shape(packed.layout(), &[planes::elem_count(&plane_lens(rows, dims))])?;
            arg(COMMIT, "qkv").float(qkv.dtype())?;
            arg(COMMIT, "qkv").shape(qkv.layout(), &[rows, dims.qkv_width()])?;
            arg(COMMIT, "gates").dtype(gates.dtype(), DType::F32)?;
            arg(COMMIT, "gates").shape(gates.layout(), &[rows, 2, dims.v_heads])?;
        }
        Ok(())
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
            let packed = tape.packed.values(arg(COMMIT, "verified"))?;
            let qkv = tape.qkv.values(arg(COMMIT, "qkv"))?;
            let gates = tape.gates.values(arg(COMMIT, "gates"))?;
            let [_, u, g_cum] = planes::ranges(plane_lens(self.paths.batch_rows(), self.dims));
            let tape = Tape { qkv: &qkv, gates: &gates, u: &packed[u], g_cum: &packed[g_cum] };
            tree_gdn::cpu::commit(self.dims, self.paths.host(), self.variant, tape, state).wrap()?;
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, state: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.check((state.dtype(), layout))?;
        let [_, u, _] = planes::ranges(plane_lens(self.paths.batch_rows(), self.dims));
        let tapes = self.tapes.iter().map(|tape| {
            Ok(crate::cuda::gdn::Tape {
                qkv: tape.qkv.cuda_source(arg(COMMIT, "qkv"))?,
                gates: tape.gates.cuda_source(arg(COMMIT, "gates"))?,
                pack: tape.packed.cuda_source(arg(COMMIT, "verified"))?,
            })
        });
        let tapes = tapes.collect::<Result<Vec<_>>>()?;
        let Self { paths, dims, variant, .. } = *self;
        crate::cuda::gdn::Commit { op: COMMIT, paths, dims, variant, tapes, u }.run((state, layout))
    }
}
