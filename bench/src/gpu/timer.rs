//! Times launches as they run in a captured graph: events around replays, kernels being compared interleaved.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, sys};
use serde::Serialize;

/// Replays of every graph.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Before the first timed one.
    pub warm_ups: usize,
    /// Timed.
    pub repeats: usize,
}

impl Pace {
    /// What results are made with: 25 warm-ups.
    pub fn full(repeats: usize) -> Self {
        Self { warm_ups: 25, repeats }
    }
}

/// Microseconds of one launch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timing {
    /// Tenth percentile.
    pub us_p10: f64,
    /// Median.
    pub us_median: f64,
    /// Ninetieth percentile.
    pub us_p90: f64,
}

impl Timing {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self { us_p10: at(0.1), us_median: at(0.5), us_p90: at(0.9) }
    }
}

/// A stream of a context of its own use: one stream only, so no cross-stream events are recorded (a capture could not hold them).
///
/// # Errors
/// From the driver.
pub fn stream() -> Result<Arc<CudaStream>> {
    let context = CudaContext::new(0)?;
    // SAFETY: every buffer of this context is used on the one stream below.
    unsafe { context.disable_event_tracking() };
    Ok(context.new_stream()?)
}

/// Captures `launches` calls of `launch`, which gets the call's number.
///
/// # Errors
/// From `launch` or the driver.
pub fn capture(
    stream: &Arc<CudaStream>,
    launches: usize,
    mut launch: impl FnMut(usize) -> Result<()>,
) -> Result<CudaGraph> {
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let outcome = (0..launches).try_for_each(&mut launch);
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    outcome?;
    let graph = graph.context("an empty capture")?;
    graph.upload()?;
    Ok(graph)
}

/// Replays the graphs in turn, the timed ones after the warm-ups, and divides by the launches that a graph holds.
///
/// # Errors
/// From the driver.
pub fn interleaved(
    stream: &Arc<CudaStream>,
    graphs: &[(CudaGraph, usize)],
    pace: Pace,
) -> Result<Vec<Timing>> {
    let event = || stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let Pace { warm_ups, repeats } = pace;
    let (start, stop) = (event()?, event()?);
    let mut samples = vec![Vec::with_capacity(repeats); graphs.len()];
    for round in 0..warm_ups + repeats {
        for ((graph, launches), samples) in graphs.iter().zip(&mut samples) {
            start.record(stream)?;
            graph.launch()?;
            stop.record(stream)?;
            stop.synchronize()?;
            if round >= warm_ups {
                samples.push(f64::from(start.elapsed_ms(&stop)?) * 1e3 / *launches as f64);
            }
        }
    }
    Ok(samples.into_iter().map(Timing::of).collect())
}
