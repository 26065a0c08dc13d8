//! tree_gdn_serial as ops: the baseline that keeps every node's state.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, InplaceOp2, Layout, Result, Shape, Tensor};
use canopy_kernels::tree_gdn_serial::{SerialInput, SerialOutput, cpu};
use canopy_kernels::{GdnDims, TreeBatch};

use crate::check::arg;
use crate::gdn::{check_inputs, check_pool};
use crate::planes::{self, PlaneViews, PlanesMut};
use crate::slices::{expect_distinct, pool, pool_mut, values};
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

const VERIFY: &str = "tree-gdn-serial-verify";
const COMMIT: &str = "tree-gdn-serial-commit";

/// What one pass of the baseline leaves behind. Two views of one allocation.
#[derive(Clone, Debug)]
pub struct TreeGdnSerialOutput {
    /// `[N, Hv, Dv]` f32.
    pub o: Tensor,
    /// `[N, Hv, Dv, Dk]` f32, every node's state.
    pub snapshots: Tensor,
}

fn plane_lens(rows: usize, dims: GdnDims) -> [usize; 2] {
    [rows * dims.v_heads * dims.dv, rows * dims.state_len()]
}

/// Verifies every tree node by node, each node's state kept, and leaves the pool as it is: what
/// [`tree_gdn_verify`](crate::tree_gdn_verify) is measured against. Its outputs have the bits of `Variant::Walk`.
///
/// `qkv` `[N, 2 Hk Dk + Hv Dv]` f32, bf16 or f16, in any layout; `gates` `[N, 2, Hv]` f32 (plane 0 = g, plane 1 =
/// beta), in any layout; `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, TreeBatch};
/// use canopy_candle::{tree_gdn_serial_commit, tree_gdn_serial_verify};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 2, 2).unwrap());
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0]]).unwrap(), &dev)?;
/// let tree = DeviceTree::new(batch, &dev)?;
/// let qkv = Tensor::new(&[[1f32, 0., 1., 0., 3., 4.], [1., 0., 0., 1., 5., 6.]], &dev)?;
/// let gates = Tensor::new(&[[[0f32], [1.]], [[0.], [1.]]], &dev)?;
/// let state = Tensor::zeros((1, 1, 2, 2), DType::F32, &dev)?;
/// let verified = tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &state)?;
/// assert_eq!(verified.snapshots.dims(), [2, 1, 2, 2]);
/// tree_gdn_serial_commit(&state, &paths, dims, &verified)?;
/// // The root's key is e_0: its value (3, 4) now lies in column 0 of the state, nothing else does.
/// let s = state.flatten_all()?.to_vec1::<f32>()?;
/// assert!((s[0] - 3.).abs() < 1e-4 && (s[2] - 4.).abs() < 1e-4 && s[1] == 0. && s[3] == 0.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, or a slot outside the pool.
pub fn tree_gdn_serial_verify(
    tree: &DeviceTree,
    dims: GdnDims,
    qkv: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<TreeGdnSerialOutput> {
    tree.check_devices(VERIFY, &[("qkv", qkv), ("gates", gates), ("state", state)])?;
    let rows = tree.host().rows();
    let packed = qkv.apply_op3_no_bwd(gates, state, &Verify { batch: tree.host(), dims })?;
    let mut views = PlaneViews::new(&packed);
    let o = views.take((rows, dims.v_heads, dims.dv))?;
    let snapshots = views.take((rows, dims.v_heads, dims.dv, dims.dk))?;
    Ok(TreeGdnSerialOutput { o, snapshots })
}

struct Verify<'a> {
    batch: &'a TreeBatch,
    dims: GdnDims,
}

impl CustomOp3 for Verify<'_> {
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
        let (batch, dims) = (self.batch, self.dims);
        let pool_of = (state.dtype(), state_l);
        check_inputs(VERIFY, batch, dims, (qkv.dtype(), qkv_l), (gates.dtype(), gates_l), pool_of)?;
        let qkv = values(arg(VERIFY, "qkv"), qkv, qkv_l)?;
        let gates = values(arg(VERIFY, "gates"), gates, gates_l)?;
        let state = pool(arg(VERIFY, "state"), state, state_l)?;
        let lens = plane_lens(batch.rows(), dims);
        let mut packed = vec![0f32; planes::elem_count(&lens)];
        let mut planes = PlanesMut::new(&mut packed);
        let output = SerialOutput { o: planes.take(lens[0]), snapshots: planes.take(lens[1]) };
        cpu::verify(dims, batch, SerialInput { qkv: &qkv, gates: &gates, state }, output).wrap()?;
        let shape = packed.len().into();
        Ok((CpuStorage::F32(packed), shape))
    }
}

/// Copies the state of every accepted path's last node into the pool, in place; slots that no path names keep every
/// bit.
///
/// `state` the contiguous f32 pool `[slots, Hv, Dv, Dk]`; `verified` is [`tree_gdn_serial_verify`]'s.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, GdnDims, TreeBatch, TreeGdnSerialOutput};
/// use canopy_candle::tree_gdn_serial_commit;
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, GdnDims::new(1, 1, 1, 2).unwrap());
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap(), &dev)?;
/// let snapshots = Tensor::new(&[1f32, 2., 3., 4., 5., 6.], &dev)?.reshape((3, 1, 2, 1))?;
/// let verified = TreeGdnSerialOutput { o: Tensor::zeros((3, 1, 2), DType::F32, &dev)?, snapshots };
/// let state = Tensor::zeros((1, 1, 2, 1), DType::F32, &dev)?;
/// tree_gdn_serial_commit(&state, &paths, dims, &verified)?;
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [5., 6.]); // of node 2, where the path ends
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or snapshots that share the
/// pool's storage.
pub fn tree_gdn_serial_commit(
    state: &Tensor,
    paths: &DevicePaths,
    dims: GdnDims,
    verified: &TreeGdnSerialOutput,
) -> Result<()> {
    let snapshots = &verified.snapshots;
    paths.check_devices(COMMIT, &[("state", state), ("snapshots", snapshots)])?;
    expect_distinct(arg(COMMIT, "snapshots"), snapshots, state)?;
    state.inplace_op2(snapshots, &Commit { paths, dims })
}

struct Commit<'a> {
    paths: &'a DevicePaths,
    dims: GdnDims,
}

impl InplaceOp2 for Commit<'_> {
    fn name(&self) -> &'static str {
        COMMIT
    }

    fn cpu_fwd(
        &self,
        state: &mut CpuStorage,
        state_l: &Layout,
        snapshots: &CpuStorage,
        snapshots_l: &Layout,
    ) -> Result<()> {
        let dims = self.dims;
        self.paths.check_slots(COMMIT, check_pool(COMMIT, dims, (state.dtype(), state_l))?)?;
        let shape = [self.paths.batch_rows(), dims.v_heads, dims.dv, dims.dk];
        arg(COMMIT, "snapshots").dtype(snapshots.dtype(), DType::F32)?;
        arg(COMMIT, "snapshots").shape(snapshots_l, &shape)?;
        let snapshots = pool(arg(COMMIT, "snapshots"), snapshots, snapshots_l)?;
        let state = pool_mut(arg(COMMIT, "state"), state, state_l)?;
        cpu::commit(dims, self.paths.host(), snapshots, state).wrap()
    }
}
