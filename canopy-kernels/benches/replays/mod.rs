//! What the CUDA benchmarks of this folder share: replays of captured graphs, and the rates that floors are counted with.

use std::sync::Arc;

use cudarc::driver::{CudaGraph, CudaStream, sys};

pub type Failure = Box<dyn std::error::Error>;
pub type Outcome<T> = Result<T, Failure>;

/// Bytes that one turn through the sets exceeds.
pub const ROTATE: usize = 240 << 20;
/// The copy rate and the bf16 matrix rate that NOTES.md has for one H200.
pub const BYTES_PER_US: f64 = 4.27e6;
pub const FLOPS_PER_US: f64 = 809e6;

/// A graph of so many launches, the n-th given its n.
pub fn capture(
    stream: &Arc<CudaStream>,
    launches: usize,
    mut launch: impl FnMut(usize) -> Outcome<()>,
) -> Outcome<CudaGraph> {
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let outcome = (0..launches).try_for_each(&mut launch);
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    outcome?;
    Ok(graph.ok_or("an empty capture")?)
}

/// Sorted microseconds of one launch: `warm_ups` replays that do not count and `most` that do, fewer (but five) where they take more than a tenth
/// of a second.
pub fn replay(
    stream: &Arc<CudaStream>,
    graph: &CudaGraph,
    launches: usize,
    (warm_ups, most): (usize, usize),
) -> Outcome<Vec<f64>> {
    let event = || stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let (start, stop) = (event()?, event()?);
    let (mut samples, mut spent) = (Vec::new(), 0.0);
    for round in 0..warm_ups + most {
        start.record(stream)?;
        graph.launch()?;
        stop.record(stream)?;
        stop.synchronize()?;
        if round >= warm_ups {
            let us = f64::from(start.elapsed_ms(&stop)?) * 1e3;
            samples.push(us / launches as f64);
            spent += us;
        }
        if spent > 1e5 && samples.len() >= 5 {
            break;
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// The value of sorted times that this share of them does not exceed.
pub fn at(times: &[f64], share: f64) -> f64 {
    times[((times.len() - 1) as f64 * share).round() as usize]
}
