//! Recorded passes, by what their launches depend on.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream};
use candle_core::{CudaDevice, Error, Result};

use super::graph::{Graph, Recorder};
use super::inputs::{PassKey, Staged};
use super::memory::Plan;
use crate::recorded::{Outcome, PassCounts, PassInputs, Placed, Ran};

/// Keys of passes that ran once, at most; beyond that all are forgotten.
const MOST_SEEN: usize = 1024;

struct Kept<T> {
    graph: Graph,
    upload: Arc<CudaSlice<u32>>,
    value: Arc<T>,
    used: u64,
}

/// Passes of a key before it takes another one's place among the recordings: a recording costs about as much time as so many passes save.
const BEFORE_REPLACING: u32 = 16;

/// How a key has fared that has no recording.
enum Fate {
    /// Its passes ran kernel by kernel so many times, over buffers that came and went so.
    Ran(u32, Plan),
    Refused,
}

/// The recordings of one kind of pass.
pub(crate) struct Recordings<T> {
    stream: Arc<CudaStream>,
    kept: HashMap<PassKey, Kept<T>>,
    fates: HashMap<PassKey, Fate>,
    most: usize,
    clock: u64,
    counts: PassCounts,
    /// Last, since what is kept lies in its arena.
    recorder: Recorder,
}

impl<T> Recordings<T> {
    /// None yet; `most` are kept.
    pub(crate) fn new(device: &CudaDevice, most: usize) -> Result<Self> {
        Ok(Self {
            stream: device.cuda_stream(),
            recorder: Recorder::new(device)?,
            kept: HashMap::new(),
            fates: HashMap::new(),
            most: most.max(1),
            clock: 0,
            counts: PassCounts::default(),
        })
    }

    /// See [`Passes::counts`](crate::Passes::counts).
    pub(crate) fn counts(&self) -> PassCounts {
        PassCounts { kept: self.kept.len(), bytes: self.recorder.bytes(), ..self.counts }
    }

    /// Forgets all recordings.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        self.fates.clear();
    }

    /// See [`Passes::run`](crate::Passes::run).
    pub(crate) fn run<E: From<Error> + std::fmt::Display>(
        &mut self,
        inputs: &PassInputs,
        work: impl Fn(&Placed) -> Outcome<T, E>,
    ) -> Outcome<Ran<T>, E> {
        let staged = Staged::new(&self.stream, inputs)?;
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(staged.key()) {
            kept.used = self.clock;
            staged.replace(&self.stream, &kept.upload)?;
            let placed = staged.place(inputs, &kept.upload);
            placed.fill(inputs)?;
            kept.graph.launch()?;
            self.counts.replayed += 1;
            return Ok(Ran { value: kept.value.clone(), recording: true, refused: None, placed });
        }
        let upload = staged.upload(&self.stream)?;
        let placed = staged.place(inputs, &upload);
        placed.fill(inputs)?;
        let run = || placed.scope(|| work(&placed));
        let mut refused = None;
        if let Some(plan) = self.due(staged.key()) {
            let recorded = self.recorder.record(&plan, run);
            match recorded.and_then(|(graph, value)| Ok((graph.launch().map(|()| graph)?, value))) {
                Ok((graph, value)) => {
                    let value = self.keep(staged.key().clone(), graph, upload, value);
                    return Ok(Ran { value, recording: true, refused: None, placed });
                }
                Err(error) => {
                    self.counts.refused += 1;
                    self.fates.insert(staged.key().clone(), Fate::Refused);
                    refused = Some(error.to_string());
                }
            }
        }
        self.counts.plain += 1;
        let value = Arc::new(self.launch(staged.key(), run)?);
        Ok(Ran { value, recording: false, refused, placed })
    }

    /// Runs a pass kernel by kernel; one of an unknown key is watched.
    fn launch<E>(&mut self, key: &PassKey, work: impl FnOnce() -> Outcome<T, E>) -> Outcome<T, E> {
        match self.fates.get_mut(key) {
            Some(Fate::Ran(passes, _)) => *passes += 1,
            Some(Fate::Refused) => {}
            None => {
                let (worked, plan) = self.recorder.watch(work);
                if self.fates.len() >= MOST_SEEN {
                    self.fates.clear();
                }
                if let (Ok(_), Some(plan)) = (&worked, plan) {
                    self.fates.insert(key.clone(), Fate::Ran(1, plan));
                }
                return worked;
            }
        }
        work()
    }

    /// The plan of a key whose pass is to be recorded.
    fn due(&self, key: &PassKey) -> Option<Plan> {
        let before = if self.kept.len() < self.most { 1 } else { BEFORE_REPLACING };
        match self.fates.get(key) {
            Some(Fate::Ran(passes, plan)) if *passes >= before => Some(plan.clone()),
            _ => None,
        }
    }

    fn keep(&mut self, key: PassKey, graph: Graph, upload: Arc<CudaSlice<u32>>, value: T) -> Arc<T> {
        self.fates.remove(&key);
        if self.kept.len() >= self.most {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(key, _)| key.clone());
            oldest.map(|key| self.kept.remove(&key));
        }
        self.counts.recorded += 1;
        let value = Arc::new(value);
        let kept = Kept { graph, upload, value: value.clone(), used: self.clock };
        self.kept.insert(key, kept);
        value
    }
}
