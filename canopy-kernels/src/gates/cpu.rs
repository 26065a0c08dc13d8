//! CPU forward.

use crate::Result;

/// `ab` `[N, 2, Hv]` (plane 0 = a, plane 1 = b), `a_log`, `dt_bias` `[Hv]` -> `out` `[N, 2, Hv]` (g, beta). f32.
pub fn forward(v_heads: usize, ab: &[f32], a_log: &[f32], dt_bias: &[f32], out: &mut [f32]) -> Result<()> {
    let _ = (v_heads, ab, a_log, dt_bias, out);
    unimplemented!()
}
