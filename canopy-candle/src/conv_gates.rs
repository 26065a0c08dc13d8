//! The convolution with the gates of the same rows, which on CUDA are one launch.

use candle_core::{DType, Result, Tensor};

use crate::chain_conv::FORWARD;
use crate::conv::VERIFY;
use crate::conv_forward::{self, Over};
use crate::{DeviceSequences, DeviceTree};

/// What [`gates`](crate::gates) reads.
#[derive(Clone, Copy, Debug)]
pub struct GateInputs<'a> {
    /// `[N, 2 Hv]` or `[N, 2, Hv]`: a, then b.
    pub ab: &'a Tensor,
    /// `[Hv]`.
    pub a_log: &'a Tensor,
    /// `[Hv]`.
    pub dt_bias: &'a Tensor,
}

/// [`tree_conv_to`](crate::tree_conv_to) and [`gates`](crate::gates) of the same rows, with the bits of both; on CUDA in one launch.
///
/// Gives the convolution's rows `[N, C]` in `dtype` and the gates `[N, 2, Hv]` f32. On CUDA `ab` is of x's dtype, `a_log` and `dt_bias` f32.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, GateInputs, TreeBatch, tree_conv_gates};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let tree = DeviceTree::new(TreeBatch::single(DraftTree::new(vec![-1, 0]).unwrap(), 0), &dev)?;
/// let (x, ab) = (Tensor::new(&[[1f32], [10.]], &dev)?, Tensor::new(&[[0f32, 0.], [0., 0.]], &dev)?);
/// let weight = Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?; // the node and its parent
/// let (state, head) = (Tensor::zeros((1, 3, 1), DType::F32, &dev)?, Tensor::new(&[0f32], &dev)?);
/// let inputs = GateInputs { ab: &ab, a_log: &head, dt_bias: &head };
/// let (rows, gates) = tree_conv_gates(&tree, &x, &weight, &state, inputs, DType::F32)?;
/// let (rows, gates) = (rows.flatten_all()?.to_vec1::<f32>()?, gates.flatten_all()?.to_vec1::<f32>()?);
/// assert!((rows[1] - 11.).abs() < 1e-3 && (gates[0] + 2f32.ln()).abs() < 1e-6 && gates[1] == 0.5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of both, as errors of the convolution, and an `ab` of other rows than `x`'s.
pub fn tree_conv_gates(
    tree: &DeviceTree,
    x: &Tensor,
    weight: &Tensor,
    conv_state: &Tensor,
    gates: GateInputs<'_>,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    conv_forward::conv_gates(VERIFY, Over::Trees(tree), [x, weight, conv_state], gates, dtype)
}

/// [`tree_conv_gates`] of long chains: [`chain_conv`](crate::chain_conv) and [`gates`](crate::gates).
///
/// ```
/// use canopy_candle::{DeviceSequences, GateInputs, Sequences, chain_conv_gates};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let chain = DeviceSequences::new(Sequences::new(&[2], vec![0]).unwrap(), &dev)?;
/// let (x, ab) = (Tensor::new(&[[1f32], [10.]], &dev)?, Tensor::new(&[[0f32, 0.], [0., 0.]], &dev)?);
/// let (weight, head) = (Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?, Tensor::new(&[0f32], &dev)?);
/// let state = Tensor::new(&[[[7f32], [8.], [9.]]], &dev)?;
/// let inputs = GateInputs { ab: &ab, a_log: &head, dt_bias: &head };
/// let (rows, gates) = chain_conv_gates(&chain, &x, &weight, &state, inputs, DType::F32)?;
/// assert!((rows.get(0)?.to_vec1::<f32>()?[0] - 10.).abs() < 1e-2);
/// assert_eq!(gates.dims(), [2, 2, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`tree_conv_gates`].
pub fn chain_conv_gates(
    sequences: &DeviceSequences,
    x: &Tensor,
    weight: &Tensor,
    conv_state: &Tensor,
    gates: GateInputs<'_>,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    conv_forward::conv_gates(FORWARD, Over::Chains(sequences), [x, weight, conv_state], gates, dtype)
}
