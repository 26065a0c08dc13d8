//! Where a pass runs.
//!
//! A pass is dozens of short parallel steps with short serial ones between them. A thread that has gone to sleep
//! takes longer to wake than such a step lasts, so around a [`run`] the pool's other threads stay awake.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads that stay awake at most; more would find too little to do.
const AWAKE: usize = 15;
/// How long they stay awake with nothing to do: longer than the caller is busy with other things between two passes,
/// and short enough to cost nothing when there is no next pass.
const LINGER: Duration = Duration::from_millis(1);
/// Pauses between two looks for work, together well below a microsecond.
const PAUSES: usize = 16;

/// Calls of [`run`] so far.
static RUNS: AtomicUsize = AtomicUsize::new(0);
/// Calls of [`stay_awake`] that are waiting or going on.
static WATCHES: AtomicUsize = AtomicUsize::new(0);

thread_local!(
    /// This thread is in [`run`] or [`stay_awake`].
    static INSIDE: Cell<bool> = const { Cell::new(false) }
);

/// Marks a thread as inside until dropped.
struct Inside;

impl Inside {
    fn enter() -> Option<Self> {
        (!INSIDE.replace(true)).then_some(Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Runs `work` on a thread of the rayon pool, the caller's own when it is one, while the others are kept awake.
/// Within another `run` it is a plain call.
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if rayon::current_thread_index().is_none() {
        return rayon::scope(|_| run(work));
    }
    let Some(_inside) = Inside::enter() else { return work() };
    RUNS.fetch_add(1, Ordering::Relaxed);
    let others = (rayon::current_num_threads() - 1).min(AWAKE);
    for _ in WATCHES.load(Ordering::Relaxed)..others {
        WATCHES.fetch_add(1, Ordering::Relaxed);
        rayon::spawn(stay_awake);
    }
    work()
}

/// Does the pool's work until there has been neither work nor a new run for a while. Time-limited, because the stack
/// below may hold a job that some other thread waits for.
fn stay_awake() {
    if let Some(_inside) = Inside::enter() {
        let (mut runs, mut busy) = (RUNS.load(Ordering::Relaxed), Instant::now());
        while busy.elapsed() < LINGER {
            let worked = rayon::yield_now() == Some(rayon::Yield::Executed);
            let newest = RUNS.load(Ordering::Relaxed);
            if worked || newest != runs {
                (runs, busy) = (newest, Instant::now());
            } else {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            }
        }
    }
    WATCHES.fetch_sub(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Works in a pool of so many threads until they have all ended, which a thread that stays awake does not. Other tests'
    /// passes keep threads of other pools awake meanwhile.
    fn within(threads: usize, work: impl FnOnce() + Send + 'static) {
        let (told, ended) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build_scoped(|thread| thread.run(), |pool| pool.install(work)).unwrap();
            told.send(()).unwrap();
        });
        match ended.recv_timeout(Duration::from_secs(60)) {
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("a thread stays awake for ever"),
            _ => waiting.join().unwrap(),
        }
    }

    #[test]
    fn threads_wake_work_and_sleep_again() {
        for threads in [1, 2, 5] {
            within(threads, || {
                for _ in 0..50 {
                    let sum = run(|| {
                        let half = |range: std::ops::Range<u32>| range.map(u64::from).sum::<u64>();
                        let (a, b) = rayon::join(|| half(0..500), || run(|| half(500..1000)));
                        a + b
                    });
                    assert_eq!(sum, 499_500);
                }
            });
        }
        assert!(run(|| rayon::current_thread_index().is_some()));
    }

    #[test]
    fn a_panic_leaves_the_pool_usable() {
        within(2, || {
            let caught = std::panic::catch_unwind(|| run(|| panic!("work failed")));
            assert!(caught.is_err());
            let ran = AtomicBool::new(false);
            run(|| ran.store(true, Ordering::Relaxed));
            assert!(ran.into_inner());
        });
    }
}
