//! Launches of the CUDA kernels. Every argument is checked before a launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, LaunchConfig};

use super::{MOST_K_ON_CUDA, OP, check};
use crate::cuda::early::Launch;
use crate::error::expect_len;
use crate::{Error, Result};

/// Logits of one segment, and logits of one CTA of the first pass.
const SEGMENT: usize = 128;
const CTA: usize = 2048;
const IMAGE: &str = "top_tokens/top";

/// The largest vocabulary.
const MOST_VOCAB: usize = 1 << 19;

/// Segments of one row of logits; scratch has one key and one sum for each segment of every row.
pub fn segments(vocab: usize) -> usize {
    vocab.div_ceil(SEGMENT)
}

/// What the first pass leaves for the second, `[N, segments]` each.
pub struct Scratch<'a> {
    /// Best logit and its token.
    pub bests: CudaViewMut<'a, u64>,
    /// Sum of the exponentials.
    pub sums: CudaViewMut<'a, f32>,
}

/// `logits` `[N, vocab]` -> `out` `[N, 2 + 2 k]`; see the room's page.
///
/// # Errors
/// A wrong length, k beyond 64 or a vocabulary beyond 524,288, before the launches.
pub fn forward(
    stream: &Arc<CudaStream>,
    (vocab, k): (usize, usize),
    logits: &CudaView<'_, f32>,
    mut scratch: Scratch<'_>,
    out: &mut CudaViewMut<'_, u32>,
) -> Result<()> {
    let rows = check(logits.len(), vocab, k, out.len())?;
    if k > MOST_K_ON_CUDA || vocab > MOST_VOCAB {
        let wanted = format!("the best {k} of {vocab}");
        return Err(Error::Unsupported { op: OP, wanted, built: "the best 64 of 524288" });
    }
    let segments = segments(vocab);
    expect_len(OP, "scratch.bests", &[rows, segments], scratch.bests.len())?;
    expect_len(OP, "scratch.sums", &[rows, segments], scratch.sums.len())?;
    if rows > usize::from(u16::MAX) {
        let expected = format!("at most {} rows", u16::MAX);
        return Err(Error::Value { op: OP, arg: "logits", expected, got: rows.to_string() });
    }
    if rows == 0 {
        return Ok(());
    }
    let (columns, parts, best) = (vocab as u32, segments as u32, k as u32);

    let mut launch = Launch::new(stream, OP, IMAGE, "top_tokens_segments")?;
    launch.value(&columns).value(&parts).read(logits).write(&mut scratch.bests).write(&mut scratch.sums);
    let grid_dim = (vocab.div_ceil(CTA) as u32, rows as u32, 1);
    let config = LaunchConfig { grid_dim, block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: lengths checked above; every segment's key and sum is written.
    unsafe { launch.launch(config) }?;

    let (bests, sums) = (scratch.bests.slice(..), scratch.sums.slice(..));
    let mut launch = Launch::new(stream, OP, IMAGE, "top_tokens_rows")?;
    launch.value(&columns).value(&parts).value(&best).read(logits).read(&bests).read(&sums).write(out);
    let keys = segments.next_power_of_two().max((k.min(segments) * SEGMENT).next_power_of_two());
    let config = LaunchConfig {
        grid_dim: (rows as u32, 1, 1),
        block_dim: (1024, 1, 1),
        shared_mem_bytes: (keys * size_of::<u64>()) as u32,
    };
    // SAFETY: lengths checked above; shared memory holds the keys of both sorts; every word of out is written.
    unsafe { launch.launch(config) }
}
