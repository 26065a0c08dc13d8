//! One op's pieces over the threads of the current rayon pool.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `work(piece)` once for every piece of `0..pieces`, on whichever threads are free, and returns when all are
/// done. Each thread walks through a run of neighbours, which reads memory in order, then helps in the others' runs.
pub(crate) fn for_each(pieces: usize, work: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads().min(pieces);
    if threads < 2 {
        return (0..pieces).for_each(work);
    }
    let bound = |run: usize| run * pieces / threads;
    let next: Vec<_> = (0..threads).map(|run| AtomicUsize::new(bound(run))).collect();
    let arrived = AtomicUsize::new(0);
    let walk = || {
        let first = arrived.fetch_add(1, Ordering::Relaxed);
        for run in (first..first + threads).map(|run| run % threads) {
            let taken = std::iter::repeat_with(|| next[run].fetch_add(1, Ordering::Relaxed));
            taken.take_while(|&piece| piece < bound(run + 1)).for_each(&work);
        }
    };
    together(threads - 1, &walk);
}

/// Runs `work` here and offers it to `helpers` other threads.
fn together(helpers: usize, work: &(impl Fn() + Sync)) {
    match helpers {
        0 => work(),
        _ => _ = rayon::join(work, || together(helpers - 1, work)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for pieces in [0, 1, 2, 7, 100] {
                let counts: Vec<_> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                pool.install(|| for_each(pieces, |piece| _ = counts[piece].fetch_add(1, Ordering::Relaxed)));
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {pieces}");
            }
        }
    }
}
