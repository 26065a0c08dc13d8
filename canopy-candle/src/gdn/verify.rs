//! Verify passes of tree_gdn.

use std::cell::RefCell;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, InplaceOp3, Layout, Result, Shape, Storage, Tensor};
use canopy_kernels::GdnDims;
use canopy_kernels::tree_gdn::{self, Variant, VerifyInput, VerifyOutput};

use super::{Pack, TreeGdnOutput, check_inputs};
use crate::DeviceTree;
use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda::gdn::Source;
use crate::planes::PlanesMut;
use crate::recorded::kept;
use crate::slices::{Carried, expect_distinct, pool, pool_mut, row_major, storage_from, values};
use crate::wrap::WrapKernelErr;

const VERIFY: &str = "tree-gdn-verify";

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
    tree_gdn_verify_to(tree, dims, variant, qkv, gates, state, DType::F32)
}

/// [`tree_gdn_verify`] with `o` in `dtype`; `u` and `g_cum`, and so what a commit leaves, stay f32.
///
/// On the CPU `o` is rounded as it is written. On CUDA `dtype` is the accuracy: bf16 from bf16 rows takes the state in bf16 and products of bf16
/// and tf32 with f32 sums, about 1e-2 relative, under the variants `forward`, `level` and `chains`. Trees whose dense blocks are measured
/// faster are solved in those; a tree's bits are a matter of its own shape.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, GdnDims, TreeBatch, Variant, tree_gdn_verify, tree_gdn_verify_to};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let tree = DeviceTree::new(TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0), &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let wide = tree_gdn_verify(&tree, dims, Variant::Walk, &qkv, &gates, &state)?;
/// let out = tree_gdn_verify_to(&tree, dims, Variant::Walk, &qkv, &gates, &state, DType::BF16)?;
/// assert_eq!(out.o.dtype(), DType::BF16);
/// assert_eq!(out.u.flatten_all()?.to_vec1::<f32>()?, wide.u.flatten_all()?.to_vec1::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_gdn_verify`], and a `dtype` that is no float.
pub fn tree_gdn_verify_to(
    tree: &DeviceTree,
    dims: GdnDims,
    variant: Variant,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
    dtype: DType,
) -> Result<TreeGdnOutput> {
    tree.check_devices(VERIFY, &[("qkv", qkv), ("gates", gates), ("state", state)])?;
    arg(VERIFY, "out").float(dtype)?;
    let pass = Pass { op: VERIFY, tree, dims, variant, dtype };
    let op = TreeGdnVerify { pass, state: None, beside: RefCell::new(None) };
    let packed = row_major(qkv)?.apply_op3_no_bwd(&row_major(gates)?, state, &op).and_then(kept)?;
    pass.pack().output(packed, op.beside.into_inner())
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
    arg(VERIFY, "out.o").dtype(out.o.dtype(), DType::F32)?;
    for (name, source) in &tensors[..3] {
        expect_distinct(arg(VERIFY, name), source, &out.packed)?;
    }
    let pass = Pass { op: VERIFY, tree, dims, variant, dtype: DType::F32 };
    let op = TreeGdnVerify { pass, state: Some(Carried::new(state)), beside: RefCell::new(None) };
    out.packed.inplace_op3(&row_major(qkv)?, &row_major(gates)?, &op)
}

/// What a verify pass is, whatever op it is part of.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    /// Its name in errors.
    pub op: &'static str,
    pub tree: &'a DeviceTree,
    pub dims: GdnDims,
    pub variant: Variant,
    /// Of o.
    pub dtype: DType,
}

impl<'a> Pass<'a> {
    pub fn pack(&self) -> Pack {
        Pack { rows: self.tree.host().rows(), dims: self.dims, dtype: self.dtype }
    }

    /// Both devices' checks of what it reads.
    pub fn check(
        &self,
        qkv: (DType, &Layout),
        gates: (DType, &Layout),
        state: (DType, &Layout),
    ) -> Result<()> {
        check_inputs(self.op, self.tree.host(), self.dims, qkv, gates, state)
    }

    /// The CPU forward; returns o where it lies beside the pack.
    pub fn cpu(
        &self,
        qkv: (&CpuStorage, &Layout),
        gates: (&CpuStorage, &Layout),
        state: &[f32],
        packed: &mut [f32],
    ) -> Result<Option<Storage>> {
        let qkv = values(arg(self.op, "qkv"), qkv.0, qkv.1)?;
        let gates = values(arg(self.op, "gates"), gates.0, gates.1)?;
        let ([o, u, g_cum], mut planes) = (self.pack().lens(), PlanesMut::new(packed));
        let mut beside = vec![0f32; self.pack().values() - o];
        let within = planes.take(o);
        let o = if beside.is_empty() { within } else { &mut beside };
        let output = VerifyOutput { o, u: planes.take(u), g_cum: planes.take(g_cum) };
        let input = VerifyInput { qkv: &qkv, gates: &gates, state };
        tree_gdn::cpu::verify(self.dims, self.tree.host(), self.variant, input, output).wrap()?;
        Ok((self.dtype != DType::F32).then(|| Storage::Cpu(storage_from(beside, self.dtype))))
    }

    /// The launches.
    #[cfg(feature = "cuda")]
    pub fn cuda<'s>(&self, qkv: Source<'s>, gates: Source<'s>) -> crate::cuda::gdn::Verify<'s>
    where
        'a: 's,
    {
        let planes = crate::planes::ranges(self.pack().lens());
        let Self { op, tree, dims, variant, dtype } = *self;
        crate::cuda::gdn::Verify { op, tree, dims, variant, dtype, qkv, gates, planes }
    }
}

/// One verify pass; as an allocating op the state is an operand, as an in-place op it is carried.
struct TreeGdnVerify<'a> {
    pass: Pass<'a>,
    state: Option<Carried<'a>>,
    /// o, where it is no plane of the result.
    beside: RefCell<Option<Storage>>,
}

impl TreeGdnVerify<'_> {
    /// The carried pool, after the in-place face's checks.
    fn carried(&self, qkv: (DType, &Layout), gates: (DType, &Layout), out: &Layout) -> Result<&Carried<'_>> {
        let Some(state) = &self.state else {
            return arg(VERIFY, "state")
                .refuse(format_args!("a pool carried by the op"), format_args!("none"));
        };
        self.pass.check(qkv, gates, (state.dtype(), state.layout()))?;
        arg(VERIFY, "out").shape(out, &[self.pass.pack().elem_count()])?;
        Ok(state)
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
        self.pass.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), (state.dtype(), state_l))?;
        let mut packed = vec![0f32; self.pass.pack().elem_count()];
        let state = pool(arg(VERIFY, "state"), state, state_l)?;
        let beside = self.pass.cpu((qkv, qkv_l), (gates, gates_l), state, &mut packed)?;
        self.beside.replace(beside);
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
        self.pass.check((qkv.dtype(), qkv_l), (gates.dtype(), gates_l), (state.dtype(), state_l))?;
        let made = self.pass.cuda((qkv, qkv_l), (gates, gates_l)).run((state, state_l))?;
        self.beside.replace(made.beside);
        Ok(crate::cuda::storage(qkv.device(), made.packed, self.pass.pack().elem_count()))
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
        let at = arg(VERIFY, "state");
        let state = pool(at, state.cpu(at)?, state.layout())?;
        self.pass.cpu((qkv, qkv_l), (gates, gates_l), state, packed).map(|_| ())
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
        let state = state.cuda_source(arg(VERIFY, "state"))?;
        self.pass.cuda((qkv, qkv_l), (gates, gates_l)).run_into(state, packed)
    }
}
