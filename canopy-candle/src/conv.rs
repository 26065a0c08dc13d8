//! tree_conv as ops.

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, WithDType};
#[cfg(feature = "cuda")]
use canopy_kernels::tree_conv::launch::{self, Element};
use canopy_kernels::{ConvDims, tree_conv as kernel};

use crate::check::arg;
use crate::conv_forward::{self, Over};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::slices::{Carried, expect_distinct, pool_mut, row_major, values, write_back};
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

pub(crate) const VERIFY: &str = "tree-conv-verify";
const COMMIT: &str = "tree-conv-commit";

/// Causal convolution of width 4 along each node's root path, then SiLU.
///
/// `x` `[N, C]` raw rows and `weight` `[C, 4]` (tap 3 = the node itself), f32, bf16 or f16 in any layout;
/// `conv_state` the contiguous pool `[slots, 3, C]` (raw rows, oldest first). Gives `[N, C]` in x's dtype.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, TreeBatch, tree_conv};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let tree = DraftTree::new(vec![-1, 0, 0]).unwrap(); // two siblings below the root
/// let tree = DeviceTree::new(TreeBatch::single(tree, 0), &dev)?;
/// let x = Tensor::new(&[[1f32], [10.], [100.]], &dev)?;
/// let weight = Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?; // the node and its parent
/// let y = tree_conv(&tree, &x, &weight, &Tensor::zeros((1, 3, 1), DType::F32, &dev)?)?;
/// let silu = |v: f32| v / (1. + (-v).exp());
/// let y = y.flatten_all()?.to_vec1::<f32>()?;
/// assert!((y[0] - silu(1.)).abs() < 1e-5 && (y[1] - silu(11.)).abs() < 1e-4 && (y[2] - silu(101.)).abs() < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, or a slot outside the pool.
pub fn tree_conv(tree: &DeviceTree, x: &Tensor, weight: &Tensor, conv_state: &Tensor) -> Result<Tensor> {
    tree_conv_to(tree, x, weight, conv_state, x.dtype())
}

/// [`tree_conv`] with rows rounded to `dtype` as they are written; on CUDA that is x's dtype, or bf16 from f32.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, TreeBatch, tree_conv_to};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let tree = DeviceTree::new(TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0), &dev)?;
/// let x = Tensor::new(&[[1f32], [0.]], &dev)?;
/// let weight = Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?; // the node and its parent
/// let y = tree_conv_to(&tree, &x, &weight, &Tensor::zeros((1, 3, 1), DType::F32, &dev)?, DType::BF16)?;
/// assert_eq!(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?, [0.73046875; 2]); // silu(1) in eight bits
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_conv`], and a `dtype` that is no float.
pub fn tree_conv_to(
    tree: &DeviceTree,
    x: &Tensor,
    weight: &Tensor,
    conv_state: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    conv_forward::conv(VERIFY, Over::Trees(tree), [x, weight, conv_state], dtype)
}

/// The conv-state pool's checks; returns its slots.
pub(crate) fn check_pool(
    op: &'static str,
    (dtype, layout): (DType, &Layout),
    channels: usize,
) -> Result<usize> {
    let pool = arg(op, "conv_state");
    pool.float(dtype)?;
    pool.contiguous(layout)?;
    pool.shape_but_first(layout, &[ConvDims::STATE_ROWS, channels])
}

/// Keeps the last three raw rows of (old conv state, accepted path), in place in the pool; slots that no path
/// names keep every bit.
///
/// `conv_state` the contiguous pool `[slots, 3, C]`, f32, bf16 or f16; `x` `[N, C]` verify's raw rows.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, TreeBatch, tree_conv_commit};
/// use candle_core::{Device, Tensor};
///
/// let dev = Device::Cpu;
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap(), &dev)?;
/// let conv_state = Tensor::new(&[[[7f32], [8.], [9.]]], &dev)?;
/// tree_conv_commit(&conv_state, &paths, &Tensor::new(&[[1f32], [10.], [100.]], &dev)?)?;
/// assert_eq!(conv_state.flatten_all()?.to_vec1::<f32>()?, [9., 1., 100.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or an `x` that shares
/// the pool's storage.
pub fn tree_conv_commit(conv_state: &Tensor, paths: &DevicePaths, x: &Tensor) -> Result<()> {
    let channels = x.dims().last().copied().unwrap_or(0);
    check_pool(COMMIT, (conv_state.dtype(), conv_state.layout()), channels)?;
    tree_conv_commit_layers(&conv_state.unsqueeze(0)?, paths, &[x])
}

/// [`tree_conv_commit`] for the layers of a model, which lie one after another in `conv_states` `[layers, slots, 3, C]`; on CUDA one launch for
/// all of them, and rows of the pools' dtype.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, TreeBatch, tree_conv_commit_layers};
/// use candle_core::{Device, Tensor};
///
/// let dev = Device::Cpu;
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = DevicePaths::new(AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap(), &dev)?;
/// let conv_states = Tensor::new(&[7f32, 8., 9., 4., 5., 6.], &dev)?.reshape((2, 1, 3, 1))?; // two layers
/// let (first, second) = (Tensor::new(&[[1f32], [10.], [100.]], &dev)?, Tensor::new(&[[2f32], [20.], [200.]], &dev)?);
/// tree_conv_commit_layers(&conv_states, &paths, &[&first, &second])?;
/// assert_eq!(conv_states.flatten_all()?.to_vec1::<f32>()?, [9., 1., 100., 6., 2., 200.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_conv_commit`], and another number of `xs` than layers.
pub fn tree_conv_commit_layers(conv_states: &Tensor, paths: &DevicePaths, xs: &[&Tensor]) -> Result<()> {
    paths.check_devices(COMMIT, &[("conv_state", conv_states)])?;
    let mut rows = Vec::with_capacity(xs.len());
    for x in xs {
        paths.check_devices(COMMIT, &[("x", x)])?;
        expect_distinct(arg(COMMIT, "x"), x, conv_states)?;
        rows.push(row_major(x)?);
    }
    conv_states.inplace_op1(&TreeConvCommit { paths, xs: rows.iter().map(Carried::new).collect() })
}

struct TreeConvCommit<'a> {
    paths: &'a DevicePaths,
    /// Raw rows of every layer.
    xs: Vec<Carried<'a>>,
}

impl TreeConvCommit<'_> {
    /// Both devices' checks of shapes, dtypes and slots.
    fn check(&self, (dtype, layout): (DType, &Layout)) -> Result<ConvDims> {
        let pool = arg(COMMIT, "conv_state");
        let &[layers, slots, _, channels] = layout.dims() else {
            let got = layout.dims();
            return pool.refuse(format_args!("[layers, slots, 3, C]"), format_args!("{got:?}"));
        };
        pool.float(dtype)?;
        pool.contiguous(layout)?;
        pool.shape(layout, &[layers, slots, ConvDims::STATE_ROWS, channels])?;
        arg(COMMIT, "xs").count(self.xs.len(), layers)?;
        for x in &self.xs {
            arg(COMMIT, "x").float(x.dtype())?;
            arg(COMMIT, "x").shape(x.layout(), &[self.paths.batch_rows(), channels])?;
        }
        self.paths.check_slots(COMMIT, slots)?;
        ConvDims::new(channels).wrap()
    }
}

impl InplaceOp1 for TreeConvCommit<'_> {
    fn name(&self) -> &'static str {
        COMMIT
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, state_l: &Layout) -> Result<()> {
        let dims = self.check((state.dtype(), state_l))?;
        let (paths, pool) = (self.paths.host(), arg(COMMIT, "conv_state"));
        let layer_len = state_l.shape().elem_count() / self.xs.len().max(1);
        let xs = self.xs.iter().map(|x| x.values(arg(COMMIT, "x"))).enumerate();
        if let CpuStorage::F32(_) = state {
            let states = pool_mut(pool, state, state_l)?;
            for (layer, x) in xs {
                let state = &mut states[layer * layer_len..(layer + 1) * layer_len];
                kernel::cpu::commit(dims, paths, &x?, state).wrap()?;
            }
            return Ok(());
        }
        let mut wide = values(pool, state, state_l)?.into_owned();
        for (layer, x) in xs {
            let first = layer * layer_len;
            let wide = &mut wide[first..first + layer_len];
            kernel::cpu::commit(dims, paths, &x?, wide).wrap()?;
            for (_, slot, _) in paths.iter() {
                let rows = slot * dims.state_len()..(slot + 1) * dims.state_len();
                write_back(state, state_l.start_offset() + first + rows.start, &wide[rows])
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
            other => arg(COMMIT, "conv_state").no_kernel(other),
        }
    }
}

#[cfg(feature = "cuda")]
impl TreeConvCommit<'_> {
    /// The launch for one dtype, which rows and pools have.
    fn launch<T: Element + CudaDType + WithDType>(
        &self,
        dims: ConvDims,
        state: (&mut CudaStorage, &Layout),
    ) -> Result<()> {
        let stream = state.0.device().cuda_stream();
        let mut pools = cuda::view_mut::<T>(arg(COMMIT, "conv_state"), state.0, state.1)?;
        let x = arg(COMMIT, "x");
        let xs = self.xs.iter().map(|rows| cuda::view::<T>(x, rows.cuda(x)?, rows.layout()));
        let xs = xs.collect::<Result<Vec<_>>>()?;
        let on_device = self.paths.on_device(COMMIT)?;
        launch::commit(&stream, dims, self.paths.host(), on_device, &xs, &mut pools).wrap()
    }
}
