//! Faults stay where they are: a panic ends the requests of its round, a poisoned state its own request, and whoever gets
//! the slot next gets its right text.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor};
use canopy_e2e::Error;
use canopy_e2e::Result;
use canopy_e2e::draft::{DraftRequest, Drafter};
use canopy_e2e::engine::{Engine, EngineConfig, Event, GenerateRequest, Mode, Speculation};
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load};
use canopy_e2e::target::{Snapshot, Target, Verified, VerifyStream};

use crate::embedded::{ids, prompts};
use crate::support;
use crate::toy::ToyText;

/// Where the next fault happens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Verify,
    AfterVerify,
    Commit,
    AfterCommit,
    Draft,
    Extend,
    Reset,
}

/// Calls left until `Place` panics.
#[derive(Default)]
struct Plan {
    place: Mutex<Option<Place>>,
    left: AtomicUsize,
}

impl Plan {
    fn pass(&self, here: Place) {
        let due = {
            let mut place = self.place.lock().unwrap();
            let due = *place == Some(here) && self.left.fetch_sub(1, Ordering::Relaxed) == 1;
            if due {
                *place = None;
            }
            due
        };
        assert!(!due, "the test planned a fault at {here:?}");
    }

    fn panic_at(&self, place: Place, calls: usize) {
        self.left.store(calls, Ordering::Relaxed);
        *self.place.lock().unwrap() = Some(place);
    }
}

struct Faulty<T: ?Sized> {
    plan: Arc<Plan>,
    inner: Box<T>,
}

impl Target for Faulty<dyn Target> {
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }
    fn context_len(&self) -> usize {
        self.inner.context_len()
    }
    fn slots(&self) -> usize {
        self.inner.slots()
    }
    fn committed(&self, slot: usize) -> usize {
        self.inner.committed(slot)
    }
    fn reset(&mut self, slot: usize) -> Result<()> {
        self.plan.pass(Place::Reset);
        self.inner.reset(slot)
    }
    fn set_taps(&mut self, taps: &[usize]) -> Result<()> {
        self.inner.set_taps(taps)
    }
    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
        self.plan.pass(Place::Verify);
        let verified = self.inner.verify(streams);
        self.plan.pass(Place::AfterVerify);
        verified
    }
    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        self.plan.pass(Place::Commit);
        let committed = self.inner.commit(paths);
        self.plan.pass(Place::AfterCommit);
        committed
    }
    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.inner.snapshot(slot)
    }
    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.inner.restore(slot, snapshot)
    }
}

impl Drafter for Faulty<dyn Drafter> {
    fn block_size(&self) -> usize {
        self.inner.block_size()
    }
    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }
    fn context_len(&self, slot: usize) -> usize {
        self.inner.context_len(slot)
    }
    fn reset(&mut self, slot: usize) -> Result<()> {
        self.inner.reset(slot)
    }
    fn extend(&mut self, slot: usize, features: &Tensor) -> Result<()> {
        self.plan.pass(Place::Extend);
        self.inner.extend(slot, features)
    }
    fn extend_packed(&mut self, rows: &[(usize, usize)], features: &Tensor) -> Result<()> {
        self.plan.pass(Place::Extend);
        self.inner.extend_packed(rows, features)
    }
    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Tensor>> {
        self.plan.pass(Place::Draft);
        self.inner.draft(requests)
    }
    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.inner.snapshot(slot)
    }
    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.inner.restore(slot, snapshot)
    }
}

/// The embedded pair in an engine whose calls panic as planned, and three requests.
fn faulty(slots: usize) -> (Engine, Arc<Plan>, Vec<GenerateRequest>) {
    let loaded = load(&LoadOptions { slots, context_len: Some(512), ..LoadOptions::default() }).unwrap();
    let plan = Arc::new(Plan::default());
    let target: Box<dyn Target> = Box::new(Faulty { plan: Arc::clone(&plan), inner: loaded.target });
    let drafter: Box<dyn Drafter> =
        Box::new(Faulty { plan: Arc::clone(&plan), inner: loaded.drafter.unwrap() });
    let config = EngineConfig { calibrate: false, ..EngineConfig::default() };
    let tokenizer = loaded.tokenizer;
    let request = |text: &String| GenerateRequest {
        speculation: Speculation { mode: Mode::Tree, budget: Some(15) },
        ..GenerateRequest::new(tokenizer.encode(text).unwrap(), 24)
    };
    let requests = prompts("fixed", 3).iter().map(request).collect();
    (Engine::new(target, Some(drafter), tokenizer, config).unwrap(), plan, requests)
}

#[test]
fn a_panic_in_a_step_ends_its_streams_and_later_ones_are_right() {
    let (mut engine, plan, requests) = faulty(2);
    let alone: Vec<Vec<u32>> = requests.iter().map(|r| ids(&engine.run(r.clone()).unwrap())).collect();
    let places =
        [Place::Verify, Place::AfterVerify, Place::Commit, Place::AfterCommit, Place::Draft, Place::Extend];
    for (failed, (place, calls)) in places.into_iter().flat_map(|p| [(p, 1), (p, 3)]).enumerate() {
        plan.panic_at(place, calls);
        let got = engine.run_all(requests.clone()).unwrap();
        let errors: Vec<&Error> = got.iter().filter_map(|result| result.as_ref().err()).collect();
        assert!((1..=2).contains(&errors.len()), "{place:?} in call {calls}: {errors:?}");
        let told = |error: &&Error| matches!(error, Error::Round(why) if why.contains("the test planned"));
        assert!(errors.iter().all(told), "{errors:?}");
        for (got, alone) in got.iter().zip(&alone) {
            assert!(got.as_ref().map_or(true, |got| ids(got) == *alone), "{place:?} in call {calls}");
        }
        let stats = engine.stats();
        assert_eq!((stats.free_slots, stats.failed_rounds), (2, failed as u64 + 1));
        for (request, alone) in requests.iter().zip(&alone) {
            assert_eq!(&ids(&engine.run(request.clone()).unwrap()), alone, "after {place:?} in call {calls}");
        }
    }
}

#[test]
fn a_slot_that_cannot_be_emptied_is_not_used_again() {
    let (mut engine, plan, requests) = faulty(2);
    let alone = ids(&engine.run(requests[0].clone()).unwrap());
    plan.panic_at(Place::Reset, 1);
    assert_eq!(ids(&engine.run(requests[0].clone()).unwrap()), alone);
    assert_eq!(engine.stats().free_slots, 1);
    assert_eq!(ids(&engine.run(requests[0].clone()).unwrap()), alone);
    plan.panic_at(Place::Reset, 1);
    engine.run(requests[0].clone()).unwrap();
    assert!(
        matches!(engine.run(requests[0].clone()), Err(Error::Round(_))),
        "no slot is left, and that is said"
    );
}

#[test]
fn no_event_of_a_failed_round_is_told() {
    let (mut engine, plan, requests) = faulty(2);
    for request in &requests[..2] {
        engine.submit(request.clone()).unwrap();
    }
    engine.step().unwrap();
    plan.panic_at(Place::Commit, 1);
    let events = engine.step().unwrap();
    assert!(events.iter().all(|(_, event)| matches!(event, Event::Failed(_))), "{events:?}");
    assert_eq!((events.len(), engine.load()), (2, (0, 0)));
}

/// The token whose embedding is NaN.
const POISON: u32 = 5;

/// An engine over the random model with a poisoned embedding row: every state, conv row, key and value that such a token
/// touches is NaN from there on.
fn poisoned(slots: usize) -> Engine {
    let dir = support::checkpoint_dir();
    let mut tensors = support::tensors(support::golden("qwen35-random/model.safetensors"));
    let name = tensors.keys().find(|name| name.ends_with("embed_tokens.weight")).unwrap().clone();
    let table = tensors[&name].to_dtype(DType::F32).unwrap();
    let (rows, width) = table.dims2().unwrap();
    let mut values = support::floats(&table);
    values[POISON as usize * width..(POISON as usize + 1) * width].fill(f32::NAN);
    let dtype = tensors[&name].dtype();
    let table = Tensor::from_vec(values, (rows, width), table.device()).unwrap().to_dtype(dtype).unwrap();
    tensors.insert(name, table);
    support::save(&tensors, &dir.path().join("model.safetensors"));
    let target = support::model(&ModelFiles::Directory(dir.path().into()), slots, 64);
    let pieces = (0..target.vocab_size()).map(|id| vec![b'a' + (id % 26) as u8]).collect();
    let text = Arc::new(ToyText { pieces, stop_tokens: Vec::new() });
    Engine::with_text(Box::new(target), None, text, EngineConfig::default()).unwrap()
}

#[test]
fn a_poisoned_state_ends_its_own_request_and_its_slot_is_scrubbed() {
    let mut engine = poisoned(2);
    let mut healthy = GenerateRequest::new(vec![1, 2, 3, 4], 12);
    healthy.logit_bias = vec![(POISON, f32::NEG_INFINITY)];
    let sick = GenerateRequest { prompt: vec![1, 2, POISON, 3, 4, 6, 7, 8], ..healthy.clone() };
    let alone = engine.run(healthy.clone()).unwrap();
    for _ in 0..3 {
        let got = engine.run_all(vec![sick.clone(), healthy.clone(), sick.clone(), healthy.clone()]).unwrap();
        for (index, got) in got.iter().enumerate() {
            match got {
                Ok(got) => assert_eq!((index % 2, ids(got)), (1, ids(&alone))),
                Err(error) => assert!(
                    index % 2 == 0 && matches!(error, Error::NonFinite { position: 7, .. }),
                    "{index}: {error}"
                ),
            }
        }
    }
    assert_eq!((engine.stats().non_finite, engine.stats().free_slots), (6, 2));
}
