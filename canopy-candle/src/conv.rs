//! tree_conv as ops.

use candle_core::{DType, Layout, Result, Tensor};
use canopy_kernels::ConvDims;

use crate::check::arg;
use crate::conv_commit::{self, Along};
use crate::conv_forward::{self, Over};
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
    conv_commit::layer(COMMIT, Along::Paths(paths), conv_state, x)
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
    conv_commit::layers(COMMIT, Along::Paths(paths), conv_states, xs)
}
