//! gates as an op.

use candle_core::{Result, Tensor};

/// `ab` `[N, 2 Hv]` (a, then b), `a_log`, `dt_bias` `[Hv]` -> `[N, 2, Hv]` f32 (g, beta).
pub fn gates(ab: &Tensor, a_log: &Tensor, dt_bias: &Tensor) -> Result<Tensor> {
    let _ = (ab, a_log, dt_bias);
    unimplemented!()
}
