//! The rayon pool that everything CPU-bound runs in.
//!
//! Work is cheapest when it starts inside the pool (`pool.install(|| ...)`): nested parallel calls then need no
//! hand-over from a thread outside it.

use std::collections::BTreeSet;
use std::fs;

use crate::{Error, Result};

/// A pool of `threads` threads; `None` takes one per physical core.
///
/// # Errors
/// [`Error::Config`] when `threads` is 0 or the threads cannot be started.
pub fn pool(threads: Option<usize>) -> Result<rayon::ThreadPool> {
    let refuse =
        |message: String| Error::Config { what: "thread pool".into(), key: "threads".into(), message };
    if threads == Some(0) {
        return Err(refuse("expected at least 1, got 0".into()));
    }
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or_else(physical_cores));
    let named = builder.thread_name(|index| format!("canopy-{index}"));
    named.build().map_err(|source| refuse(source.to_string()))
}

/// Physical cores that this process may use: two hyper-threads of a core share its vector units, so that a thread for
/// each is slower than one for both.
pub fn physical_cores() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = fs::read_dir("/sys/devices/system/cpu").map_or(0, |entries| {
        let siblings = entries
            .flatten()
            .filter_map(|cpu| fs::read_to_string(cpu.path().join("topology/thread_siblings_list")).ok());
        siblings.collect::<BTreeSet<_>>().len()
    });
    if cores == 0 { usable } else { cores.min(usable) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_the_threads_asked_for() {
        assert_eq!(pool(Some(3)).unwrap().current_num_threads(), 3);
        let default = pool(None).unwrap().current_num_threads();
        assert!(default >= 1 && default <= std::thread::available_parallelism().unwrap().get());
        assert!(matches!(pool(Some(0)), Err(Error::Config { .. })));
    }
}
