//! Launches of appending to a pool and of the attention's output gate.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr};

use super::{Rows, quads, rows_of};
use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{AttnDims, Error, Result};

/// An element type that a pool, and what attention makes of it, may have. The constants are kernels' symbols.
pub trait PoolElement: DeviceRepr {
    /// [`kv_append`].
    const APPEND: &'static str;
    /// [`super::qk_norm_rope_append`].
    const ROPE_APPEND: &'static str;
    /// [`attn_gate`].
    const GATE: &'static str;
}

impl PoolElement for f32 {
    const APPEND: &'static str = "glue_kv_append_f32";
    const ROPE_APPEND: &'static str = "glue_qk_norm_rope_append_f32";
    const GATE: &'static str = "glue_attn_gate_f32";
}

impl PoolElement for half::bf16 {
    const APPEND: &'static str = "glue_kv_append_bf16";
    const ROPE_APPEND: &'static str = "glue_qk_norm_rope_append_bf16";
    const GATE: &'static str = "glue_attn_gate_bf16";
}

/// Where in a pool of rows every packed row goes: `slot * capacity + position`, or -1 for nowhere.
#[derive(Clone, Copy)]
pub struct Destinations<'a> {
    /// The list itself.
    pub host: &'a [i32],
    /// The same list on the device.
    pub on_device: &'a CudaView<'a, i32>,
}

impl Destinations<'_> {
    /// Checks the rows and their pool; returns N.
    pub(super) fn check(
        self,
        (arg, pool_arg): (&'static str, &'static str),
        width: usize,
        rows: Rows<'_>,
        pool: usize,
    ) -> Result<usize> {
        const OP: &str = "kv-append";
        let n = self.host.len();
        expect_len(OP, "destinations on the device", &[n], self.on_device.len())?;
        rows.check(OP, arg, n, width)?;
        let pool_rows = rows_of(OP, pool_arg, pool, width)?;
        match self.host.iter().find(|&&to| to < -1 || to >= pool_rows as i32) {
            None => Ok(n),
            Some(to) => {
                let expected = format!("rows of {pool_arg} below {pool_rows}, or -1");
                Err(Error::Value { op: OP, arg: "destinations", expected, got: to.to_string() })
            }
        }
    }
}

/// Writes packed rows of `width` values, narrowed to the pool's type, to their rows of `pool` `[rows, width]`. Two rows of
/// one call must not go to one place.
///
/// # Errors
/// Any wrong length, or a destination outside the pool, before the launch.
pub fn kv_append<T: PoolElement>(
    stream: &Arc<CudaStream>,
    width: usize,
    to: Destinations<'_>,
    rows: Rows<'_>,
    pool: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    const OP: &str = "kv-append";
    let n = to.check(("rows", "cache"), width, rows, pool.len())?;
    if n == 0 || width == 0 {
        return Ok(());
    }
    let (columns, stride, none) = (width as u32, rows.stride as u32, 0u64);
    let mut launch = Launch::new(stream, OP, "glue/append", T::APPEND)?;
    launch
        .value(&columns)
        .value(&stride)
        .value(&stride)
        .read(rows.data)
        .value(&none)
        .read(to.on_device)
        .write(pool)
        .value(&none);
    // SAFETY: lengths and destinations checked above; one plane, so the null pointers are not read.
    unsafe { launch.launch(quads(n, width.div_ceil(4), 1)) }
}

/// [`kv_append`] of keys and values in one launch.
///
/// # Errors
/// As [`kv_append`].
pub fn kv_append_pair<T: PoolElement>(
    stream: &Arc<CudaStream>,
    width: usize,
    to: Destinations<'_>,
    [k, v]: [Rows<'_>; 2],
    [keys, values]: [&mut CudaViewMut<'_, T>; 2],
) -> Result<()> {
    const OP: &str = "kv-append";
    let n = to.check(("k", "keys"), width, k, keys.len())?;
    to.check(("v", "values"), width, v, values.len())?;
    if n == 0 || width == 0 {
        return Ok(());
    }
    let (columns, k_stride, v_stride) = (width as u32, k.stride as u32, v.stride as u32);
    let mut launch = Launch::new(stream, OP, "glue/append", T::APPEND)?;
    launch.value(&columns).value(&k_stride).value(&v_stride).read(k.data).read(v.data).read(to.on_device);
    launch.write(keys).write(values);
    // SAFETY: lengths and destinations checked above.
    unsafe { launch.launch(quads(n, width.div_ceil(4), 2)) }
}

/// As [`super::super::cpu::attn_gate`]; `attn` and the f32 `out` `[N, Hq, D]`, `q_proj` rows of `[Hq, 2 D]`.
///
/// # Errors
/// Any wrong length, before the launch.
pub fn attn_gate<T: PoolElement>(
    stream: &Arc<CudaStream>,
    dims: AttnDims,
    attn: &CudaView<'_, T>,
    q_proj: Rows<'_>,
    out: &mut CudaViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "attn-gate";
    let rows = rows_of(OP, "attn", attn.len(), dims.q_width())?;
    q_proj.check(OP, "q_proj", rows, 2 * dims.q_width())?;
    expect_len(OP, "out", &[rows, dims.q_heads, dims.head_dim], out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let (heads, head_dim, stride) = (dims.q_heads as u32, dims.head_dim as u32, q_proj.stride as u32);
    let mut launch = Launch::new(stream, OP, "glue/gate", T::GATE)?;
    launch.value(&heads).value(&head_dim).value(&stride).read(attn).read(q_proj.data).write(out);
    let all = dims.q_heads * dims.head_dim.div_ceil(4);
    // SAFETY: lengths checked above; every element of out is written.
    unsafe { launch.launch(quads(rows, all, 1)) }
}
