//! Tokens of drafted nodes for the host.

use candle_core::{DType, Result, Tensor};
use canopy_kernels::drafted_tokens as kernel;
use canopy_kernels::top_tokens::row_words;

use crate::check::arg;
use crate::wrap::WrapKernelErr;

/// Puts the tokens of drafted nodes into `tokens`, which are on the host: those that `sources` ([`drafted_source`](crate::drafted_source), -1 keeps
/// one) name among `best`, what [`top_tokens`](crate::top_tokens) gave on any device. For a pass on the tokens' own device
/// [`PassInputs::with_drafted_ids`](crate::PassInputs::with_drafted_ids) does the same without a copy.
///
/// ```
/// use canopy_candle::{drafted_source, drafted_tokens, top_tokens};
/// use candle_core::{Device, Tensor};
///
/// let best = top_tokens(&Tensor::new(&[[0f32, 2., 1.], [5., 0., 4.]], &Device::Cpu)?, 2)?;
/// let mut tokens = [7, 0, 0];
/// drafted_tokens(&best, &[-1, drafted_source(0, 0, 2), drafted_source(1, 1, 2)], &mut tokens)?;
/// assert_eq!(tokens, [7, 1, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Arguments whose lengths or dtypes do not fit, and sources outside the best tokens.
pub fn drafted_tokens(best: &Tensor, sources: &[i32], tokens: &mut [u32]) -> Result<()> {
    let name = arg("drafted-tokens", "best");
    name.dtype(best.dtype(), DType::U32)?;
    let &[_, words] = best.dims() else {
        return name.refuse(format_args!("[R, 2 + 2 k]"), format_args!("{:?}", best.dims()));
    };
    let k = words.saturating_sub(row_words(0)) / 2;
    kernel::cpu::forward(k, &best.flatten_all()?.to_vec1()?, sources, tokens).wrap()
}
