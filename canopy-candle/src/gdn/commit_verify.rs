//! Commit and the next round's verify as one op.

use std::cell::RefCell;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use canopy_kernels::GdnDims;
use canopy_kernels::tree_gdn::Variant;

use super::commit::{CarriedTape, GdnTape};
use super::verify::Pass;
use super::{TreeGdnOutput, check_pool};
use crate::check::arg;
use crate::recorded::kept;
use crate::slices::{Carried, expect_distinct, pool_mut, row_major};
use crate::{DevicePaths, DeviceTree};

const OP: &str = "tree-gdn-commit-verify";

/// A round whose accepted paths the pool does not hold yet.
#[derive(Clone, Copy, Debug)]
pub struct GdnPending<'a> {
    /// The accepted paths, of the slots of the batch that is verified now, in its order.
    pub paths: &'a DevicePaths,
    /// What that round's verify read and wrote.
    pub tape: GdnTape<'a>,
}

/// [`tree_gdn_commit`](super::tree_gdn_commit) of the round before, then [`tree_gdn_verify_to`](super::tree_gdn_verify_to) from the states that
/// this gives, with the bits of both. A path may be empty: its state is only read.
///
/// ```text
/// S <- exp(g_cum_a) S + sum_j exp(g_cum_a - g_cum_j) u_j k_j^T    j over the accepted path, a its end
/// ```
///
/// `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`, written in place; `qkv` `[N, 2 Hk Dk + Hv Dv]` f32, bf16 or f16 and `gates` `[N, 2, Hv]`
/// f32 as [`tree_gdn_verify`](super::tree_gdn_verify) takes them; `variant` that of both rounds; `dtype` that of `o`. On CUDA one launch loads a
/// state, commits and verifies: where all rows are bf16, the variant is `forward`, and every tree is solved by the fused design in a
/// block that fits; else two.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, GdnPending, GdnTape, TreeBatch, Variant};
/// use canopy_candle::{tree_gdn_commit_verify, tree_gdn_verify};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let batch = TreeBatch::single(DraftTree::new(vec![-1]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0]]).unwrap(), &dev)?;
/// let tree = DeviceTree::new(batch, &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]]], &dev)?;
/// let (write, read) = (Tensor::new(&[[1f32, 0., 1., 0., 3., 4.]], &dev)?, Tensor::new(&[[1f32, 0., 0., 1., 0., 0.]], &dev)?);
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let verified = tree_gdn_verify(&tree, dims, Variant::Walk, &write, &gates, &state)?;
/// let pending = GdnPending { paths: &paths, tape: GdnTape { verified: &verified, qkv: &write, gates: &gates } };
/// let out = tree_gdn_commit_verify(&state, pending, &tree, dims, Variant::Walk, [&read, &gates], DType::F32)?;
/// // The first round's value (3, 4) lies under its key, e_0, which is the second round's query, scaled by Dk^-1/2.
/// let o = out.o.flatten_all()?.to_vec1::<f32>()?;
/// assert!((o[0] - 3. / 2f32.sqrt()).abs() < 1e-4 && (o[1] - 4. / 2f32.sqrt()).abs() < 1e-4);
/// assert!(state.sqr()?.sum_all()?.to_scalar::<f32>()? > 24.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of both, and paths of other slots than the batch's.
pub fn tree_gdn_commit_verify(
    state: &Tensor,
    pending: GdnPending<'_>,
    tree: &DeviceTree,
    dims: GdnDims,
    variant: Variant,
    [qkv, gates]: [&Tensor; 2],
    dtype: DType,
) -> Result<TreeGdnOutput> {
    let GdnPending { paths, tape } = pending;
    tree.check_devices(OP, &[("state", state), ("qkv", qkv), ("gates", gates)])?;
    arg(OP, "out").float(dtype)?;
    for (name, source) in [("qkv", qkv), ("gates", gates)] {
        expect_distinct(arg(OP, name), source, state)?;
    }
    let [last_qkv, last_gates] = tape.row_major(OP, paths, state)?;
    let (qkv, gates) = (row_major(qkv)?, row_major(gates)?);
    let pass = Pass { op: OP, tree, dims, variant, dtype };
    let op = CommitVerify {
        pass,
        paths,
        tape: CarriedTape::new(tape.verified, &last_qkv, &last_gates),
        qkv: Carried::new(&qkv),
        gates: Carried::new(&gates),
        made: RefCell::new(None),
    };
    state.inplace_op1(&op)?;
    let Some((packed, beside)) = op.made.into_inner() else {
        return arg(OP, "out").refuse(format_args!("outputs of the pass"), format_args!("none"));
    };
    let packed = Tensor::from_storage(packed, pass.pack().elem_count(), BackpropOp::none(), false);
    pass.pack().output(kept(packed)?, beside)
}

struct CommitVerify<'a> {
    pass: Pass<'a>,
    paths: &'a DevicePaths,
    tape: CarriedTape<'a>,
    qkv: Carried<'a>,
    gates: Carried<'a>,
    /// The verify pass's pack, and o where it lies beside.
    made: RefCell<Option<(Storage, Option<Storage>)>>,
}

impl CommitVerify<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, state: (DType, &Layout)) -> Result<()> {
        let Self { pass, paths, qkv, gates, .. } = self;
        let (expected, got) = (pass.tree.host().slots(), paths.host().slots());
        if expected != got {
            return arg(OP, "paths")
                .refuse(format_args!("the batch's slots {expected:?}"), format_args!("slots {got:?}"));
        }
        paths.check_slots(OP, check_pool(OP, pass.dims, state)?)?;
        self.tape.check(OP, paths.batch_rows(), pass.dims)?;
        pass.check((qkv.dtype(), qkv.layout()), (gates.dtype(), gates.layout()), state)
    }
}

impl InplaceOp1 for CommitVerify<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, state_l: &Layout) -> Result<()> {
        self.check((state.dtype(), state_l))?;
        let Self { pass, paths, tape, .. } = self;
        let state = pool_mut(arg(OP, "state"), state, state_l)?;
        let (qkv, gates) = (self.qkv.cpu_source(arg(OP, "qkv"))?, self.gates.cpu_source(arg(OP, "gates"))?);
        tape.commit(OP, pass.dims, pass.variant, paths, state)?;
        let mut packed = vec![0f32; pass.pack().elem_count()];
        let beside = pass.cpu(qkv, gates, state, &mut packed)?;
        self.made.replace(Some((Storage::Cpu(CpuStorage::F32(packed)), beside)));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, state: &mut CudaStorage, state_l: &Layout) -> Result<()> {
        self.check((state.dtype(), state_l))?;
        let Self { pass, paths, tape, .. } = self;
        let device = state.device().clone();
        let (qkv, gates) = (self.qkv.cuda_source(arg(OP, "qkv"))?, self.gates.cuda_source(arg(OP, "gates"))?);
        let (tape, verify) = (tape.cuda(OP)?, pass.cuda(qkv, gates));
        let made = crate::cuda::gdn::CommitVerify { paths, tape, verify }.run((state, state_l))?;
        let (packed, _) = crate::cuda::storage(&device, made.packed, pass.pack().elem_count());
        self.made.replace(Some((Storage::Cuda(packed), made.beside)));
        Ok(())
    }
}
