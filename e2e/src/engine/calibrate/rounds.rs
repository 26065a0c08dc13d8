//! Times whole rounds of every shape on an empty engine, so that `auto` may choose one before the draft: with the launches of its later rounds, and
//! with their recordings made before the clock runs.

use std::time::Instant;

use super::super::auto::{Ahead, RoundCosts, shapes};
use super::super::{Counters, Engine, Event, GenerateRequest, Speculation, StreamId};
use crate::Result;

/// Numbers of streams that are timed, besides every slot at once.
const STREAMS: [usize; 5] = [1, 2, 4, 8, 16];
/// Tokens of the prompts.
const PROMPT: usize = 8;
/// Rounds of a shape before the clock runs: kernel by kernel, recorded, and once as later ones.
const WARM: usize = 3;
/// Rounds that are timed, of which the fastest counts.
const TIMED: usize = 4;
/// Rounds within which short prompts are read.
const READ: usize = 8;

impl Engine {
    /// Whether rounds can be planned before their drafts here.
    pub(in super::super) fn can_plan_ahead(&self) -> bool {
        let wanted = self.config.ahead.unwrap_or_else(|| self.tuner.is_stepped());
        wanted && self.config.calibrate && self.has_drafter() && self.walks() && !self.config.host_build
    }

    /// Times rounds and plans them ahead from now on, unless one failed: then `auto` goes on as without.
    ///
    /// # Errors
    /// When a slot cannot be emptied afterwards.
    pub(in super::super) fn time_rounds(&mut self) -> Result<()> {
        let block = self.drafter.as_ref().map_or(1, |drafter| drafter.block_size());
        // What was timed one by one is in nobody's way any more.
        self.target.forget_recordings();
        if let Some(drafter) = &mut self.drafter {
            drafter.forget_recordings();
        }
        self.tuner.plan_ahead(Some(Ahead::new(block, RoundCosts::default())));
        let costs = self.round_costs(block);
        self.tuner.plan_ahead(None);
        self.running
            .iter()
            .map(|stream| stream.slot)
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|slot| self.release(slot));
        self.running.clear();
        self.waiting.clear();
        self.events.clear();
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        (self.next_id, self.counters) = (0, Counters::default());
        match costs {
            Some(costs) => self.tuner.plan_ahead(Some(Ahead::new(block, costs))),
            None => tracing::warn!("rounds could not be timed: `auto` looks at every draft"),
        }
        Ok(())
    }

    fn round_costs(&mut self, block: usize) -> Option<RoundCosts> {
        let (slots, shapes) = (self.target.slots(), shapes(block));
        let mut costs = RoundCosts { plain: Vec::new(), drafted: vec![Vec::new(); shapes.len()] };
        let counts = STREAMS.into_iter().filter(|&streams| streams < slots.min(STREAMS[4]));
        for streams in counts.chain([slots.min(STREAMS[4])]) {
            costs.plain.push((streams, self.time_shape(None, (streams, block))?));
            for (shape, points) in costs.drafted.iter_mut().enumerate() {
                if shapes[shape].fits(streams) {
                    points.push((streams, self.time_shape(Some(shape), (streams, block))?));
                }
            }
        }
        Some(costs)
    }

    /// Seconds of a round in which `streams` streams draft the shape in blocks of at most `block` rows; `None` when one fails, or the context is
    /// too short to tell.
    fn time_shape(&mut self, shape: Option<usize>, (streams, block): (usize, usize)) -> Option<f64> {
        let most = (WARM + TIMED + 2) * block;
        if self.limits.context < PROMPT + most {
            return None;
        }
        let request = GenerateRequest {
            ignore_eos: true,
            reuse_prefix: false,
            speculation: Speculation::default(),
            ..GenerateRequest::new(vec![0; PROMPT], most)
        };
        self.tuner.force(Some(None));
        let ids: Vec<StreamId> =
            (0..streams).map(|_| self.submit(request.clone())).collect::<Result<_>>().ok()?;
        for _ in 0..READ {
            if self.running.len() == streams && self.running.iter().all(|stream| stream.root.is_some()) {
                break;
            }
            self.timed_step()?;
        }
        self.tuner.force(Some(shape));
        let mut fewest = f64::INFINITY;
        for round in 0..WARM + TIMED {
            let seconds = self.timed_step()?;
            fewest = if round < WARM { fewest } else { fewest.min(seconds) };
        }
        let whole = self.running.len() == streams;
        ids.into_iter().for_each(|id| self.cancel(id));
        self.events.clear();
        whole.then_some(fewest)
    }

    fn timed_step(&mut self) -> Option<f64> {
        let clock = Instant::now();
        let events = self.step().ok()?;
        let seconds = clock.elapsed().as_secs_f64();
        (!events.iter().any(|(_, event)| matches!(event, Event::Failed(_)))).then_some(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;
    use crate::loader::{LoadOptions, load_pair};
    use crate::target::Target;

    #[test]
    fn every_shape_is_timed_and_the_engine_is_as_new() {
        let options = LoadOptions { slots: 2, context_len: Some(256), ..LoadOptions::default() };
        let pair = load_pair(&options).unwrap();
        let drafter = pair.drafter.map(|drafter| Box::new(drafter) as Box<dyn crate::draft::Drafter>);
        let target: Box<dyn Target> = Box::new(pair.target);
        let config = EngineConfig { ahead: Some(true), ..EngineConfig::default() };
        let mut engine = Engine::new(target, drafter, pair.tokenizer.unwrap(), config).unwrap();
        assert!(engine.tuner.plans_ahead());
        let costs = engine.round_costs(16).unwrap();
        let counts = |points: &[(usize, f64)]| points.iter().map(|point| point.0).collect::<Vec<_>>();
        assert!(costs.drafted.iter().chain([&costs.plain]).all(|points| counts(points) == [1, 2]));
        // Every drafted round of every shape went without the host, by one and by two streams.
        let rounds = 2 * shapes(16).len() * (WARM + TIMED);
        assert_eq!(engine.stats().unseen_rounds, rounds as u64);
        // A machine with other work may take longer for every plain round than for one that drafts, but not each time.
        let dearer = costs.added(3, 1) > 0.0;
        let dearer = dearer || (0..20).any(|_| engine.round_costs(16).unwrap().added(3, 1) > 0.0);
        assert!(dearer, "drafts are taken to be free");
        engine.time_rounds().unwrap();
        assert!(engine.tuner.plans_ahead() && engine.stats().rounds == 0 && engine.stats().free_slots == 2);
        assert_eq!((engine.target.committed(0), engine.free.as_slice()), (0, &[1, 0][..]));
    }
}
