//! Constraints become grammars beside the engine's thread, so that nobody's tokens wait for it.

use std::sync::Arc;

use canopy_e2e::constrain::Grammar;
use canopy_e2e::engine::Constraint;
use tokio::sync::Semaphore;

use crate::engine_thread::ModelInfo;
use crate::error::ApiError;

/// The compilations that go on. Each takes a core until it is done or its limits of work refuse it.
#[derive(Clone, Debug)]
pub struct Compilations {
    places: Arc<Semaphore>,
}

impl Compilations {
    /// So many at once; the others wait in the order in which they came.
    pub fn new(at_once: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(at_once.max(1))) }
    }

    /// A quarter of this machine's cores, one at least: the rest is the engine's.
    pub fn for_this_machine() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from) / 4)
    }

    /// The grammars of `texts` texts that keep to one constraint; `None` for each without one.
    ///
    /// # Errors
    /// 400 when the constraint cannot be enforced.
    pub async fn grammars(
        &self,
        model: &ModelInfo,
        constraint: &Constraint,
        texts: usize,
    ) -> Result<Vec<Option<Grammar>>, ApiError> {
        if *constraint == Constraint::None {
            return Ok(vec![None; texts]);
        }
        let (compiler, constraint) = (model.grammars.clone(), constraint.clone());
        let compile = move || {
            let grammar = compiler.compile(&constraint)?;
            Ok((0..texts).map(|_| grammar.as_ref().map(Grammar::fork)).collect())
        };
        self.run(compile).await?
    }

    /// Does `work` on a thread of its own once there is a place. Whoever leaves before has asked for nothing; work that
    /// has begun keeps its place to its end, because it keeps a core.
    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(ApiError::internal)?;
        let working = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        working.await.map_err(ApiError::internal)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn one_too_many_waits_and_who_leaves_holds_nothing_up() {
        let compilations = Compilations::new(1);
        let (begun, begins) = mpsc::channel();
        let start = |name: &'static str| {
            let (compilations, begun) = (compilations.clone(), begun.clone());
            let (end, ended) = mpsc::channel::<()>();
            let work = move || {
                begun.send(name).unwrap();
                ended.recv_timeout(LIMIT).unwrap();
            };
            (end, tokio::spawn(async move { compilations.run(work).await }))
        };
        let begins = Arc::new(std::sync::Mutex::new(begins));
        let next = || {
            let begins = Arc::clone(&begins);
            async move {
                let waiting =
                    tokio::task::spawn_blocking(move || begins.lock().unwrap().recv_timeout(LIMIT).unwrap());
                waiting.await.unwrap()
            }
        };
        let (end_first, first) = start("first");
        assert_eq!(next().await, "first");
        // Its reader leaves: the work goes on and keeps its place.
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert_eq!(compilations.places.available_permits(), 0);
        let (_end_second, second) = start("second");
        let (end_third, third) = start("third");
        tokio::task::yield_now().await;
        second.abort();
        assert!(second.await.unwrap_err().is_cancelled());
        end_first.send(()).unwrap();
        assert_eq!(next().await, "third", "who left while waiting is not worked for");
        end_third.send(()).unwrap();
        third.await.unwrap().unwrap();
        assert_eq!(compilations.places.available_permits(), 1);
    }
}
