//! The thread's loop: take commands, cancel what nobody reads, step, deliver.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use canopy_e2e::engine::{Event, FinishReason, StreamId};
use tokio::sync::mpsc;

use super::handle::{Command, Submit};
use super::{End, Health, Rounds, Update};
use crate::error::ApiError;
use crate::queue::Permit;
use crate::telemetry::Metrics;

struct Stream {
    updates: mpsc::Sender<Update>,
    decoding: bool,
    permit: Permit,
}

impl Stream {
    /// Gives the place back, then the last update, so that whoever reads the end finds the place free.
    fn end(self, last: Update) {
        drop(self.permit);
        // A reader that left or fell behind sees its channel end.
        let _ = self.updates.try_send(last);
    }
}

pub(super) struct Runner {
    rounds: Box<dyn Rounds>,
    inbox: mpsc::Receiver<Command>,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    streams: HashMap<StreamId, Stream>,
    /// What every request gets from the time on when all streams were ended.
    closed: Option<ApiError>,
    buffer: usize,
}

impl Runner {
    pub fn new(
        rounds: Box<dyn Rounds>,
        inbox: mpsc::Receiver<Command>,
        health: Arc<Health>,
        metrics: Arc<Metrics>,
        buffer: usize,
    ) -> Self {
        Self { rounds, inbox, health, metrics, streams: HashMap::new(), closed: None, buffer }
    }

    pub fn run(mut self) {
        while self.take_commands() {
            self.cancel_abandoned();
            self.report_load();
            if !self.streams.is_empty() && !self.step() {
                break;
            }
        }
    }

    /// Waits for a command when idle, takes all that wait otherwise. False when every handle is gone.
    fn take_commands(&mut self) -> bool {
        if self.streams.is_empty() {
            // The last step's deliveries may have cancelled streams since the load was told.
            self.report_load();
            match self.inbox.blocking_recv() {
                Some(command) => self.obey(command),
                None => return false,
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submit) => self.submit(*submit),
            Command::EndAll(error) => {
                self.cancel_all(&error);
                self.closed = Some(error);
            }
        }
    }

    fn submit(&mut self, submit: Submit) {
        let Submit { request, grammar, permit, reply } = submit;
        if reply.is_closed() {
            return;
        }
        let submitted = match &self.closed {
            Some(error) => Err(error.clone()),
            None => self.rounds.submit(request, grammar).map_err(ApiError::from),
        };
        let answer = match submitted {
            Err(error) => {
                drop(permit);
                Err(error)
            }
            Ok(stream) => {
                let (updates, receiver) = mpsc::channel(self.buffer);
                self.streams.insert(stream, Stream { updates, decoding: false, permit });
                Ok(receiver)
            }
        };
        // When the caller is gone the receiver is dropped here, and the stream is cancelled before the next step.
        let _ = reply.send(answer);
        self.report_load();
    }

    fn cancel_abandoned(&mut self) {
        let rounds = &mut self.rounds;
        let metrics = &self.metrics;
        self.streams.retain(|&id, stream| {
            let abandoned = stream.updates.is_closed();
            if abandoned {
                rounds.cancel(id);
                metrics.cancelled();
            }
            !abandoned
        });
    }

    /// One step and its news. False after a panic: nothing is known about the engine then.
    fn step(&mut self) -> bool {
        self.health.step_starts();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.rounds.step()));
        self.health.step_ends();
        match outcome {
            Ok(Ok(events)) => self.deliver(events),
            Ok(Err(error)) => {
                tracing::error!(%error, "a step failed; its streams are ended");
                self.cancel_all(&ApiError::internal(error));
            }
            Err(_) => {
                tracing::error!("a step panicked; the engine has stopped");
                self.fail_all(&ApiError::internal("a step panicked"));
                return false;
            }
        }
        true
    }

    fn deliver(&mut self, events: Vec<(StreamId, Event)>) {
        self.report_load();
        if events.is_empty() && self.rounds.load() == (0, 0) {
            self.fail_all(&ApiError::internal("the engine lost its streams"));
            return;
        }
        let mut updates: BTreeMap<StreamId, Update> = BTreeMap::new();
        for (stream, event) in events {
            let update = updates.entry(stream).or_default();
            match event {
                Event::Text { text, tokens } => {
                    update.text.push_str(&text);
                    update.tokens.extend(tokens);
                }
                Event::Prompt(tokens) => update.prompt = tokens,
                Event::Round(round) => update.round = Some(round),
                Event::Done { reason, stats } => {
                    self.metrics.stream_done(reason, &stats);
                    update.end = Some(match reason {
                        FinishReason::TimedOut => End::Failed(ApiError::timed_out()),
                        reason => End::Done { reason, stats },
                    });
                }
                Event::Failed(error) => {
                    tracing::error!(%error, stream = stream.0, "a stream failed");
                    self.metrics.stream_failed();
                    update.end = Some(End::Failed(error.into()));
                }
            }
        }
        for (stream, update) in updates {
            self.send(stream, update);
        }
    }

    fn send(&mut self, id: StreamId, update: Update) {
        self.metrics.tokens(&update.tokens);
        if update.end.is_some() {
            if let Some(stream) = self.streams.remove(&id) {
                stream.end(update);
            }
            return;
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.decoding && !update.tokens.is_empty() {
            self.metrics.acceptance_length(update.tokens.len());
        }
        stream.decoding |= !update.tokens.is_empty();
        if stream.updates.try_send(update).is_err() {
            self.rounds.cancel(id);
            self.metrics.cancelled();
            self.streams.remove(&id);
        }
    }

    fn cancel_all(&mut self, error: &ApiError) {
        for &stream in self.streams.keys() {
            self.rounds.cancel(stream);
        }
        self.fail_all(error);
    }

    fn fail_all(&mut self, error: &ApiError) {
        for (_, stream) in self.streams.drain() {
            stream.end(Update { end: Some(End::Failed(error.clone())), ..Update::default() });
            self.metrics.stream_failed();
        }
    }

    fn report_load(&self) {
        self.metrics.engine(&self.rounds.stats());
    }
}
