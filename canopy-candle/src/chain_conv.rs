//! tree_conv over long chains, as ops.

use candle_core::{DType, Result, Tensor};

use crate::DeviceSequences;
use crate::conv_commit::{self, Along};
use crate::conv_forward::{self, Over};

pub(crate) const FORWARD: &str = "chain-conv";
const ADVANCE: &str = "chain-conv-advance";

/// [`tree_conv_to`](crate::tree_conv_to) of long chains, each after the conv state in its slot.
///
/// `x` `[N, C]` raw rows and `weight` `[C, 4]` (tap 3 = the row itself), f32, bf16 or f16 in any layout; `conv_state` the contiguous pool
/// `[slots, 3, C]` (raw rows, oldest first). Gives `[N, C]` in `dtype`; on CUDA that is x's dtype, or bf16 from f32. Bits are those of
/// the rows as trees, wherever a chain is cut.
///
/// ```
/// use canopy_candle::{DeviceSequences, Sequences, chain_conv, chain_conv_advance};
/// use candle_core::{DType, Device, Tensor};
///
/// let dev = Device::Cpu;
/// let chain = DeviceSequences::new(Sequences::new(&[2], vec![0]).unwrap(), &dev)?;
/// let (x, state) = (Tensor::new(&[[1f32], [10.]], &dev)?, Tensor::new(&[[[7f32], [8.], [9.]]], &dev)?);
/// let weight = Tensor::new(&[[0f32, 0., 1., 1.]], &dev)?; // the row and the one before it
/// let y = chain_conv(&chain, &x, &weight, &state, DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((y[0] - 10.).abs() < 1e-2 && (y[1] - 11.).abs() < 1e-2);
/// chain_conv_advance(&state, &chain, &x)?;
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [9., 1., 10.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, or a slot outside the pool.
pub fn chain_conv(
    sequences: &DeviceSequences,
    x: &Tensor,
    weight: &Tensor,
    conv_state: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    conv_forward::conv(FORWARD, Over::Chains(sequences), [x, weight, conv_state], dtype)
}

/// Keeps the last three raw rows of (conv state, chain), in place in the pool; slots that no chain names keep every bit.
///
/// `conv_state` the contiguous pool `[slots, 3, C]`, f32, bf16 or f16; `x` `[N, C]` [`chain_conv`]'s raw rows, on CUDA of the pool's dtype,
/// which is f32 or bf16.
///
/// # Errors
/// A shape, dtype, device or layout that differs from the above, a slot outside the pool, or an `x` that shares the pool's storage.
pub fn chain_conv_advance(conv_state: &Tensor, sequences: &DeviceSequences, x: &Tensor) -> Result<()> {
    conv_commit::layer(ADVANCE, Along::Chains(sequences), conv_state, x)
}
