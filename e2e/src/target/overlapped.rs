//! Commits that go on beside the next draft.
//!
//! A commit waits for memory most of the time, a draft of few rows leaves threads idle, and neither reads what the other
//! writes: a commit beside which a draft is expected is handed to the pool, and whatever needs the target next waits for it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Prefilled, PromptChunk, Snapshot, Target, Verified, VerifyStream};
use crate::{Result, pool};

/// What a commit ended with, a panic included.
type Outcome = std::result::Result<Result<()>, Box<dyn Any + Send>>;

/// Any target on the CPU, with overlapped commits. What goes wrong in one is said by the next verify or commit.
pub struct Overlapped {
    shared: Arc<Shared>,
    vocab_size: usize,
    context_len: usize,
    slots: usize,
}

struct Shared {
    target: Mutex<Box<dyn Target>>,
    /// A commit is going on.
    busy: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is reported as the commit's outcome; whoever hears of it empties the slots.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Overlapped {
    /// Overlaps the commits of `target`.
    pub fn new(target: impl Target + 'static) -> Self {
        let (vocab_size, context_len, slots) = (target.vocab_size(), target.context_len(), target.slots());
        let shared = Shared {
            target: Mutex::new(Box::new(target)),
            busy: AtomicBool::new(false),
            outcome: Mutex::new(None),
        };
        Self { shared: Arc::new(shared), vocab_size, context_len, slots }
    }

    /// The target, once no commit is going on.
    fn target(&self) -> MutexGuard<'_, Box<dyn Target>> {
        if self.shared.busy.load(Ordering::Acquire) {
            // Within a run this thread may do the pool's work, the commit's own included.
            pool::run(|| {
                while self.shared.busy.load(Ordering::Acquire) {
                    if rayon::yield_now() != Some(rayon::Yield::Executed) {
                        std::hint::spin_loop();
                    }
                }
            });
        }
        lock(&self.shared.target)
    }

    /// The same, and what the last commit ended with.
    fn told(&mut self) -> Result<MutexGuard<'_, Box<dyn Target>>> {
        let target = self.target();
        match lock(&self.shared.outcome).take() {
            None | Some(Ok(Ok(()))) => Ok(target),
            Some(Ok(Err(error))) => Err(error),
            Some(Err(panic)) => {
                drop(target);
                resume_unwind(panic)
            }
        }
    }
}

impl Target for Overlapped {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn context_len(&self) -> usize {
        self.context_len
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn committed(&self, slot: usize) -> usize {
        self.target().committed(slot)
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        self.target().reset(slot)
    }

    fn set_taps(&mut self, taps: &[usize]) -> Result<()> {
        self.target().set_taps(taps)
    }

    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
        self.told()?.verify(streams)
    }

    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        self.told()?.commit(paths)
    }

    fn commit_beside(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        if rayon::current_thread_index().is_none() || rayon::current_num_threads() == 1 {
            return self.commit(paths);
        }
        drop(self.told()?);
        let (shared, paths) = (Arc::clone(&self.shared), paths.to_vec());
        shared.busy.store(true, Ordering::Release);
        rayon::spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| lock(&shared.target).commit(&paths)));
            *lock(&shared.outcome) = Some(outcome);
            shared.busy.store(false, Ordering::Release);
        });
        Ok(())
    }

    fn prefill(&mut self, chunks: &[PromptChunk]) -> Result<Prefilled> {
        self.told()?.prefill(chunks)
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.target().snapshot(slot)
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.target().restore(slot, snapshot)
    }
}

#[cfg(test)]
mod tests {
    use canopy_kernels::{DraftTree, TreeBatch};

    use super::*;
    use crate::Error;
    use crate::target::LogitRows;

    /// Counts commits; fails the one whose path has two nodes, panics in the one with three.
    struct Counting(usize);

    impl Target for Counting {
        fn vocab_size(&self) -> usize {
            7
        }
        fn context_len(&self) -> usize {
            9
        }
        fn slots(&self) -> usize {
            1
        }
        fn committed(&self, _: usize) -> usize {
            self.0
        }
        fn reset(&mut self, _: usize) -> Result<()> {
            self.0 = 0;
            Ok(())
        }
        fn set_taps(&mut self, _: &[usize]) -> Result<()> {
            Ok(())
        }
        fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
            let batch = TreeBatch::single(streams[0].tree.clone(), 0);
            Ok(Verified { batch, logits: None, logit_rows: vec![0, 0], features: None })
        }
        fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
            std::thread::sleep(std::time::Duration::from_millis(5));
            match paths[0].len() {
                2 => return Err(Error::Round("the test failed it".into())),
                3 => panic!("the test planned it"),
                _ => self.0 += 1,
            }
            Ok(())
        }
        fn snapshot(&self, _: usize) -> Result<Snapshot> {
            Ok(Snapshot::new(self.0, 8))
        }
        fn restore(&mut self, _: usize, snapshot: &Snapshot) -> Result<()> {
            self.0 = *snapshot.get().unwrap_or(&0);
            Ok(())
        }
    }

    fn stream(rows: usize) -> [VerifyStream; 1] {
        let tree = DraftTree::chain(rows).unwrap();
        [VerifyStream { slot: 0, tokens: vec![0; rows], tree, logits: LogitRows::None }]
    }

    fn on(threads: usize, work: impl FnOnce(&mut Overlapped) + Send) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| work(&mut Overlapped::new(Counting(0))));
    }

    #[test]
    fn whatever_comes_next_sees_the_commit() {
        for threads in [1, 2, 3] {
            on(threads, |target| {
                for rows in [4, 1, 4, 4] {
                    let before = target.committed(0);
                    target.verify(&stream(rows)).unwrap();
                    target.commit_beside(&[vec![0]]).unwrap();
                    assert_eq!(target.committed(0), before + 1);
                    target.verify(&stream(rows)).unwrap();
                    target.commit(&[vec![0]]).unwrap();
                }
                target.verify(&stream(4)).unwrap();
                target.commit_beside(&[vec![0]]).unwrap();
                let saved = target.snapshot(0).unwrap();
                assert_eq!(saved.get(), Some(&9usize));
                target.verify(&stream(4)).unwrap();
                target.commit_beside(&[vec![0]]).unwrap();
                target.reset(0).unwrap();
                assert_eq!(target.committed(0), 0);
                target.restore(0, &saved).unwrap();
                assert_eq!(target.committed(0), 9);
            });
        }
    }

    #[test]
    fn a_commit_that_fails_is_told_by_the_next_verify_and_not_again() {
        for threads in [1, 2] {
            on(threads, |target| {
                target.verify(&stream(4)).unwrap();
                let failed = target.commit_beside(&[vec![0, 1]]).and_then(|()| target.reset(0));
                let failed = failed.and_then(|()| target.verify(&stream(4)).map(drop));
                assert!(matches!(failed, Err(Error::Round(_))));
                target.verify(&stream(4)).unwrap();
                target.commit_beside(&[vec![0]]).unwrap();
                target.verify(&stream(1)).unwrap();
                assert_eq!(target.committed(0), 1);
            });
        }
    }

    #[test]
    fn a_panic_in_a_commit_comes_out_of_the_next_verify() {
        on(2, |target| {
            target.verify(&stream(4)).unwrap();
            target.commit_beside(&[vec![0, 1, 2]]).unwrap();
            let next = catch_unwind(AssertUnwindSafe(|| target.verify(&stream(4)).map(drop)));
            assert_eq!(next.unwrap_err().downcast_ref::<&str>(), Some(&"the test planned it"));
            target.verify(&stream(4)).unwrap();
            assert_eq!(target.committed(0), 0);
        });
    }
}
