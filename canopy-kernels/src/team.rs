//! One op's pieces over the threads of the current rayon pool.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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

/// Calls `work(item)` once for every item.
pub(crate) fn for_all<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    let items: Vec<_> = items.map(|item| Mutex::new(Some(item))).collect();
    for_each(items.len(), |index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        item.into_iter().for_each(&work);
    });
}

/// Elements of the pieces in which `len` elements are shared out, whole units of `unit`, of at least `least` elements
/// so that a piece is worth another thread's attention.
pub(crate) fn piece(len: usize, unit: usize, least: usize) -> usize {
    len.div_ceil(rayon::current_num_threads()).max(least).next_multiple_of(unit)
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
    fn every_item_is_taken_once() {
        let mut data = vec![0u8; 100];
        for_all(data.chunks_mut(piece(100, 8, 16)), |chunk| chunk.iter_mut().for_each(|x| *x += 1));
        assert_eq!(data, [1; 100]);
        assert!(piece(100, 8, 16).is_multiple_of(8) && piece(100, 8, 200) >= 100);
    }

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
