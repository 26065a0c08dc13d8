//! Times launches as they run in a captured graph: events around replays, kernels being compared interleaved.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, sys};
use serde::Serialize;

/// Replays that a graph gets at least, whatever they take.
const FEWEST: usize = 5;

/// Replays of every graph.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Launches before the first timed one.
    pub warm_ups: usize,
    /// Timed replays.
    pub repeats: usize,
    /// Microseconds of one graph's timed replays after which it gets no more of them.
    pub most_us: f64,
}

impl Pace {
    /// What results are made with: 25 launches as warm-ups.
    pub fn full(repeats: usize) -> Self {
        Self { warm_ups: 25, repeats, most_us: f64::INFINITY }
    }

    /// The same with at most so many milliseconds for one graph's timed replays; 0 is no limit.
    pub fn within(repeats: usize, most_ms: f64) -> Self {
        let most_us = if most_ms > 0.0 { 1e3 * most_ms } else { f64::INFINITY };
        Self { most_us, ..Self::full(repeats) }
    }

    /// Whether a graph that has these samples, of so many launches each, gets no more.
    fn has_enough(self, samples: &[f64], launches: usize) -> bool {
        samples.len() >= FEWEST && samples.iter().sum::<f64>() * launches as f64 > self.most_us
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
    /// Timed replays.
    pub replays: usize,
}

impl Timing {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self { us_p10: at(0.1), us_median: at(0.5), us_p90: at(0.9), replays: samples.len() }
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
    let (start, stop) = (event()?, event()?);
    let mut samples = vec![Vec::with_capacity(pace.repeats); graphs.len()];
    for (graph, launches) in graphs {
        for _ in 0..pace.warm_ups.div_ceil(*launches) {
            graph.launch()?;
        }
    }
    for _ in 0..pace.repeats {
        for ((graph, launches), samples) in graphs.iter().zip(&mut samples) {
            if pace.has_enough(samples, *launches) {
                continue;
            }
            start.record(stream)?;
            graph.launch()?;
            stop.record(stream)?;
            stop.synchronize()?;
            samples.push(f64::from(start.elapsed_ms(&stop)?) * 1e3 / *launches as f64);
        }
    }
    Ok(samples.into_iter().map(Timing::of).collect())
}
