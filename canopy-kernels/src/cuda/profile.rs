//! Where the time of a stream's launches goes.
//!
//! An event is recorded before every launch of this thread, at the moment when its function is asked for; what passes until the next one is
//! the launch's. Copies and fills between two launches count for the one before them, and of a pair whose functions are asked for together
//! the second has both. A launch can then not begin before the one ahead has ended, so the sum is more than the same work takes by itself.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use crate::{Error, Result};

/// The launches of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Its symbol.
    pub symbol: &'static str,
    /// How many.
    pub launches: usize,
    /// Microseconds of all of them.
    pub us: f64,
}

struct Profile {
    stream: Arc<CudaStream>,
    marks: Vec<(&'static str, CudaEvent)>,
}

thread_local!(static PROFILE: RefCell<Option<Profile>> = const { RefCell::new(None) });

fn driver(source: cudarc::driver::DriverError) -> Error {
    Error::Driver { op: "profile", source }
}

fn record(stream: &CudaStream) -> Result<CudaEvent> {
    stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(driver)
}

/// A launch of `symbol` is about to be made.
pub(crate) fn mark(symbol: &'static str) -> Result<()> {
    PROFILE.with_borrow_mut(|profile| {
        let Some(profile) = profile else { return Ok(()) };
        let event = record(&profile.stream)?;
        profile.marks.push((symbol, event));
        Ok(())
    })
}

/// Runs `work`, whose launches go to `stream` from this thread, and gives their times, those that took most first.
///
/// # Errors
/// Those of `work`, and of the driver.
pub fn profiled<T, E: From<Error>>(
    stream: &Arc<CudaStream>,
    work: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<(T, Vec<KernelTime>), E> {
    stream.synchronize().map_err(driver)?;
    PROFILE.set(Some(Profile { stream: stream.clone(), marks: Vec::new() }));
    let value = work();
    let profile = PROFILE.take();
    let value = value?;
    let last = record(stream)?;
    stream.synchronize().map_err(driver)?;
    let marks = profile.map_or_else(Vec::new, |profile| profile.marks);
    let ends = marks.iter().skip(1).map(|(_, event)| event).chain([&last]);
    let mut times = BTreeMap::<&'static str, (usize, f64)>::new();
    for ((symbol, begin), end) in marks.iter().zip(ends) {
        let (launches, us) = times.entry(symbol).or_default();
        *launches += 1;
        *us += 1e3 * f64::from(begin.elapsed_ms(end).map_err(driver)?);
    }
    let time = |(symbol, (launches, us))| KernelTime { symbol, launches, us };
    let mut times: Vec<KernelTime> = times.into_iter().map(time).collect();
    times.sort_by(|a, b| b.us.total_cmp(&a.us));
    Ok((value, times))
}
