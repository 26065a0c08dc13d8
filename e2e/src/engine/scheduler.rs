//! Who waits, who runs, which slot is whose.

use std::time::Instant;

use super::accept::Picker;
use super::auto::History;
use super::choose::Rules;
use super::prefix::Saved;
use super::request::refuse;
use super::stream::{Output, PendingFeatures, PromptLogprobs, Stream, ends};
use super::{
    Constraint, Engine, Event, FinishReason, GenerateRequest, Mode, PromptToken, Speculation, StreamId,
    StreamStats, contained,
};
use crate::constrain::Grammar;
use crate::{Error, Result};

/// A checked request without a slot.
pub(super) struct Waiting {
    id: StreamId,
    request: GenerateRequest,
    grammar: Option<Grammar>,
    submitted: Instant,
}

impl Engine {
    /// Checks a request and queues it. It gets a slot in one of the next steps. A constraint is compiled meanwhile.
    ///
    /// # Errors
    /// [`Error::Request`] naming the field that cannot be served; [`Error::Full`] when every slot is taken and the
    /// queue is full.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<StreamId> {
        self.check(&request)?;
        let grammar = self.grammars.compile(&request.constraint)?;
        self.queue(request, grammar)
    }

    /// [`Engine::submit`] with the constraint compiled beforehand by a [`Compiler`](crate::constrain::Compiler) of the
    /// same vocabulary: compiles nothing.
    ///
    /// # Errors
    /// Those of [`Engine::submit`]; [`Error::Request`] naming `constraint` when there is a grammar without a constraint
    /// or a constraint without a grammar.
    pub fn submit_compiled(
        &mut self,
        request: GenerateRequest,
        grammar: Option<Grammar>,
    ) -> Result<StreamId> {
        self.check(&request)?;
        match (&request.constraint, &grammar) {
            (Constraint::None, Some(_)) => return Err(refuse("constraint", "the grammar's", "none")),
            (Constraint::None, None) | (_, Some(_)) => {}
            (_, None) => return Err(refuse("constraint", "its grammar", "none")),
        }
        self.queue(request, grammar)
    }

    fn check(&self, request: &GenerateRequest) -> Result<()> {
        self.limits.check(request)?;
        if self.config.synthetic.is_some() && request.changes_rows() {
            let expected =
                "no penalties, bias, constraint, reasoning or min_tokens with synthetic acceptance";
            return Err(refuse("request", expected, "some"));
        }
        Ok(())
    }

    fn queue(&mut self, request: GenerateRequest, grammar: Option<Grammar>) -> Result<StreamId> {
        if self.waiting.len() >= self.config.max_waiting + self.free.len() {
            return Err(Error::Full { running: self.running.len(), waiting: self.waiting.len() });
        }
        let id = StreamId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Waiting { id, request, grammar, submitted: Instant::now() });
        Ok(id)
    }

    /// Ends a stream; its slot is free before the next step, which reports it as cancelled. Unknown ids are ignored:
    /// the stream may have ended by itself.
    pub fn cancel(&mut self, stream: StreamId) {
        self.end_early(stream, FinishReason::Cancelled);
    }

    fn end_early(&mut self, stream: StreamId, reason: FinishReason) {
        let stats = if let Some(index) = self.waiting.iter().position(|w| w.id == stream) {
            let waiting = self.waiting.remove(index);
            let total = waiting.map_or(0.0, |w| w.submitted.elapsed().as_secs_f64());
            StreamStats { total, ..StreamStats::default() }
        } else if let Some(index) = self.running.iter().position(|s| s.id == stream) {
            let mut stream = self.running.remove(index);
            self.release(stream.slot);
            stream.final_stats()
        } else {
            return;
        };
        self.events.push((stream, Event::Done { reason, stats }));
    }

    /// Ends the streams whose deadline has passed.
    pub(super) fn end_late(&mut self) {
        let waiting = self.waiting.iter().map(|w| (w.id, w.request.deadline));
        let deadlines = waiting.chain(self.running.iter().map(|s| (s.id, s.deadline)));
        let now = Instant::now();
        let late = deadlines.filter(|(_, deadline)| deadline.is_some_and(|at| at <= now));
        for stream in late.map(|(id, _)| id).collect::<Vec<_>>() {
            self.end_early(stream, FinishReason::TimedOut);
        }
    }

    /// Changes how a stream is decoded, from its next round on. Its text stays the same.
    ///
    /// # Errors
    /// [`Error::Request`] when the stream is unknown, the speculation is out of range, or a stream that started as
    /// `ar` (its prompt never reached the drafter) is to draft.
    pub fn set_speculation(&mut self, stream: StreamId, speculation: Speculation) -> Result<()> {
        self.limits.check_speculation(&speculation)?;
        if let Some(waiting) = self.waiting.iter_mut().find(|w| w.id == stream) {
            waiting.request.speculation = speculation;
            return Ok(());
        }
        let Some(running) = self.running.iter_mut().find(|s| s.id == stream) else {
            return Err(refuse("stream", "a running or waiting stream", stream.0));
        };
        if speculation.mode != Mode::Ar && running.features.is_none() && self.drafter.is_some() {
            return Err(refuse("mode", "ar, as the stream started", speculation.mode));
        }
        running.speculation = speculation;
        Ok(())
    }

    /// Streams running and waiting.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Gives free slots to the streams that waited longest.
    pub(super) fn admit(&mut self) {
        while !self.waiting.is_empty() {
            let Some(slot) = self.free.pop() else { return };
            let Some(waiting) = self.waiting.pop_front() else { return };
            let (reuse, save_at) = (waiting.request.reuse_prefix, waiting.request.save_at);
            let mut stream = self.start(waiting, slot);
            if reuse && stream.prompt_logprobs.is_none() && !self.prefixes.is_off() {
                self.reuse(&mut stream, save_at);
            }
            self.running.push(stream);
        }
    }

    fn start(&self, waiting: Waiting, slot: usize) -> Stream {
        let Waiting { id, request, grammar, submitted } = waiting;
        let rules = Rules::new(&request, ends(self.text.as_ref(), &request), grammar);
        // Nothing predicts the first token.
        let first = PromptToken { id: request.prompt[0], logprob: None, top: Vec::new() };
        let limit = request.max_tokens.min(self.limits.context - request.prompt.len());
        let drafts = request.speculation.mode != Mode::Ar && self.drafter.is_some();
        let stats = StreamStats { prompt_tokens: request.prompt.len(), ..StreamStats::default() };
        Stream {
            id,
            slot,
            output: Output::new(&self.text, &request, limit),
            history: History::new(&request.prompt),
            prompt: request.prompt,
            prefilled: 0,
            long_until: 0,
            saves: Vec::new(),
            saved: Vec::new(),
            root: None,
            limit,
            picker: Picker { sampling: request.sampling, logprobs: request.logprobs, rules },
            prompt_logprobs: request.prompt_logprobs.map(|top| PromptLogprobs { top, tokens: vec![first] }),
            speculation: request.speculation,
            report_rounds: request.report_rounds,
            deadline: request.deadline,
            features: drafts.then(PendingFeatures::default),
            tuning: self.tuner.stream(),
            stats,
            submitted,
        }
    }

    /// Puts the longest saved prefix of the prompt into the stream's slot, and plans what of it to save.
    fn reuse(&mut self, stream: &mut Stream, save_at: Option<usize>) {
        let slot = stream.slot;
        let Self { prefixes, target, drafter, .. } = self;
        if let Some((key, saved)) = prefixes.find(&stream.prompt, stream.features.is_some()) {
            let restored = contained(|| {
                target.restore(slot, &saved.target)?;
                match (drafter, &saved.drafter) {
                    (Some(drafter), Some(context)) if stream.features.is_some() => {
                        drafter.restore(slot, context)
                    }
                    _ => Ok(()),
                }
            });
            match restored {
                Ok(()) => (stream.prefilled, stream.stats.cached_tokens) = (key.len, key.len),
                Err(error) => {
                    tracing::error!(slot, %error, "a saved prefix cannot be used");
                    prefixes.remove(key);
                    if let Err(error) = self.empty(slot) {
                        tracing::error!(slot, %error, "its slot cannot be emptied");
                    }
                }
            }
        }
        stream.saves = self.prefixes.points(stream.prompt.len(), stream.prefilled, save_at);
    }

    /// Saves the prompt of a stream that has just committed as much of it as is to be saved.
    pub(super) fn save_prefix(&mut self, index: usize, committed: usize) -> Result<()> {
        let stream = &mut self.running[index];
        if stream.saves.first() != Some(&committed) {
            return Ok(());
        }
        stream.saves.remove(0);
        let prefix = &stream.prompt[..committed];
        let Some(key) = self.prefixes.wanted(prefix, stream.features.is_some()) else { return Ok(()) };
        let drafter = match (&mut stream.features, &mut self.drafter) {
            (Some(features), Some(drafter)) => {
                features.flush(stream.slot, drafter.as_mut())?;
                Some(drafter.snapshot(stream.slot)?)
            }
            _ => None,
        };
        let target = self.target.snapshot(stream.slot)?;
        self.prefixes.insert(key, prefix, Saved { target, drafter });
        stream.saved.push(key);
        Ok(())
    }

    /// Forgets the prefixes that a failed stream saved.
    pub(super) fn forget(&mut self, stream: &Stream) {
        stream.saved.iter().for_each(|&key| self.prefixes.remove(key));
    }

    /// Empties a slot of the target and of the drafter.
    fn empty(&mut self, slot: usize) -> Result<()> {
        contained(|| {
            let target = self.target.reset(slot);
            let drafter = self.drafter.as_mut().map_or(Ok(()), |drafter| drafter.reset(slot));
            target.and(drafter)
        })
    }

    /// Empties a slot and makes it free. A slot that cannot be emptied is never used again.
    pub(super) fn release(&mut self, slot: usize) {
        match self.empty(slot) {
            Ok(()) => self.free.push(slot),
            Err(error) => tracing::error!(slot, %error, "a slot cannot be emptied and is out of use"),
        }
    }

    /// Ends the waiting streams when nothing runs and yet no slot is free: none will ever be.
    pub(super) fn fail_stranded(&mut self) {
        for waiting in std::mem::take(&mut self.waiting) {
            self.events.push((waiting.id, Event::Failed(Error::Round("every slot is out of use".into()))));
        }
    }

    /// Ends every running stream: the pass that they shared failed.
    pub(super) fn fail_all(&mut self, error: &Error) {
        tracing::error!(%error, "a round failed");
        for stream in std::mem::take(&mut self.running) {
            self.forget(&stream);
            self.release(stream.slot);
            self.events.push((stream.id, Event::Failed(Error::Round(error.to_string()))));
        }
    }
}
