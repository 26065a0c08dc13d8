//! Which shape a round has, and who drafts it.

use super::pairs::Pairs;
use super::{Ahead, Candidate, Lookup, SHARE};

/// Streams' rounds with trees of which more is known than that before trials have to be saved up for.
const FIRST: f64 = 8.0;
/// Rounds between later trials, at least.
const APART: u64 = 32;
/// Standard errors that a tree's worth may be above what is known of it.
const LUCKY: f64 = 2.0;
/// By how much a round in which some draft must be better than one in which all do: it has launches of its own, which are seldom recorded.
const ALL: f64 = 1.02;

/// What is done in a round.
#[derive(Debug)]
pub(super) struct Decision {
    /// What the drafting streams draft.
    pub shape: Option<usize>,
    /// The streams that do.
    pub drafting: Vec<usize>,
    /// Those of them that do to learn what it brings.
    pub trials: Vec<usize>,
    /// Seconds that the trial of another shape is charged, when it is one.
    pub tried: Option<f64>,
    /// Tokens per second of the best round.
    pub rate: f64,
}

/// The best that a shape can do in a round.
#[derive(Clone, Debug)]
struct Best {
    /// Tokens per second; where every stream drafts [`ALL`] times as many.
    score: f64,
    tokens: f64,
    seconds: f64,
    shape: Option<usize>,
    drafting: Vec<usize>,
}

impl Best {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// A round's streams as shapes look at them.
pub(super) struct Outlook<'a> {
    pub ahead: &'a Ahead,
    pub streams: &'a [Candidate<'a>],
    pub lookups: &'a [Option<Lookup>],
    /// Mean right beginnings of chains, by stream and nodes.
    pub runs: Vec<Vec<f64>>,
    /// All streams, and those that draft whatever is chosen.
    pub count: (usize, usize),
    /// Seconds that looked up nodes add, by their number.
    pub looked_up: &'a dyn Fn(usize) -> f64,
}

impl Outlook<'_> {
    /// Accepted nodes of a stream that drafts a shape, `lucky` standard errors above what is known.
    fn gain(&self, shape: usize, stream: usize, lucky: f64) -> f64 {
        let (of, candidate, runs) = (self.ahead.shapes[shape], &self.streams[stream], &self.runs[stream]);
        let depth = of.horizon().min(candidate.horizon);
        if !of.is_tree {
            return runs[depth.min(candidate.budget)];
        }
        let error =
            if lucky > 0.0 { lucky * self.ahead.pairs[shape].error(self.ahead.still_known()) } else { 0.0 };
        (self.ahead.ratio(shape) * runs[depth] + error).min(depth as f64)
    }

    fn allowed(&self, shape: usize) -> bool {
        let of = self.ahead.shapes[shape];
        let cap = self.streams.iter().map(|stream| stream.budget).min().unwrap_or(0);
        let whole = self.ahead.shapes.iter().map(|shape| shape.block_rows).max();
        (!of.is_tree || of.nodes <= cap) && (self.count.1 == 0 || Some(of.block_rows) == whole)
    }

    /// A round in which so many looked up nodes are verified, and so many streams draft the shape.
    fn seconds(&self, shape: Option<usize>, drafting: usize, looked_up: usize) -> f64 {
        let costs = &self.ahead.costs;
        // The others' drafts are taken to be whole chains.
        let whole = || self.ahead.shapes.iter().take_while(|shape| !shape.is_tree).count().saturating_sub(1);
        let drafts = match shape {
            Some(shape) => costs.added(shape, drafting + self.count.1),
            None if self.count.1 > 0 => costs.added(whole(), self.count.1),
            None => 0.0,
        };
        self.ahead.slower * (costs.plain(self.count.0) + drafts) + (self.looked_up)(looked_up)
    }

    /// Streams as they are without a shape.
    fn undrafted(&self) -> Best {
        let tokens =
            self.count.0 as f64 + self.lookups.iter().flatten().map(|lookup| lookup.gain).sum::<f64>();
        let nodes = self.lookups.iter().flatten().map(|lookup| lookup.tokens.len()).sum();
        let seconds = self.seconds(None, 0, nodes);
        Best { score: tokens / seconds, tokens, seconds, shape: None, drafting: Vec::new() }
    }

    /// The streams to draft a shape, if any.
    fn best(&self, plain: &Best, shape: usize, lucky: f64) -> Option<Best> {
        let looked_up = |stream: usize| self.lookups[stream].as_ref().map_or(0.0, |lookup| lookup.gain);
        let mut order: Vec<(usize, f64)> = (0..self.streams.len())
            .filter(|&stream| self.streams[stream].horizon > 0)
            .map(|stream| (stream, self.gain(shape, stream, lucky) - looked_up(stream)))
            .collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut nodes: usize = self.lookups.iter().flatten().map(|lookup| lookup.tokens.len()).sum();
        let (mut tokens, mut best, mut drafting) = (plain.tokens, None::<Best>, 0);
        for (before, &(stream, more)) in order.iter().enumerate() {
            let count = before + 1;
            tokens += more;
            nodes -= self.lookups[stream].as_ref().map_or(0, |lookup| lookup.tokens.len());
            let seconds = self.seconds(Some(shape), count, nodes);
            let score = tokens / seconds * if count == self.streams.len() { ALL } else { 1.0 };
            if seconds.is_finite() && best.as_ref().is_none_or(|best| score > best.score) {
                drafting = count;
                best = Some(Best { score, tokens, seconds, shape: Some(shape), drafting: Vec::new() });
            }
        }
        let first = order[..drafting].iter().map(|stream| stream.0);
        best.map(|best| Best { drafting: first.collect(), ..best })
    }

    /// What to do in the round.
    pub fn decide(&self) -> Decision {
        let plain = self.undrafted();
        let all = (0..self.ahead.shapes.len()).filter(|&shape| self.allowed(shape));
        let drafted: Vec<Best> = all.filter_map(|shape| self.best(&plain, shape, 0.0)).collect();
        let highest = |a: &&Best, b: &&Best| a.score.total_cmp(&b.score);
        let best = drafted.iter().max_by(highest).filter(|best| best.rate() > plain.rate()).unwrap_or(&plain);
        let rate = best.rate();
        let seen = self.ahead.pairs.iter().map(Pairs::count).fold(0.0, f64::max);
        if best.shape.is_some()
            && (seen < FIRST || self.ahead.untried >= APART && self.ahead.credit > 0.0)
            && let Some((Best { shape, drafting, .. }, loss)) = self.trial(&plain, best)
            && (seen < FIRST || self.ahead.credit >= loss)
        {
            let tried = Some(if seen < FIRST { 0.0 } else { loss });
            return Decision { shape, trials: drafting.clone(), drafting, tried, rate };
        }
        // Streams that have long been plain draft too: what the others draft, else a chain, which says most of the drafter for its time.
        let is_chain = |best: &&Best| best.shape.is_some_and(|shape| !self.ahead.shapes[shape].is_tree);
        let probed = best.shape.or_else(|| drafted.iter().filter(is_chain).max_by(highest)?.shape);
        let trials = probed.map_or_else(Vec::new, |shape| self.probes(best, shape));
        let drafting: Vec<usize> = best.drafting.iter().chain(&trials).copied().collect();
        let shape = if drafting.is_empty() { None } else { probed };
        Decision { shape, drafting, trials, tried: None, rate }
    }

    /// Streams that have long been plain and may draft `shape` beside `best`: those that are about as long together, so that they share the draft's time.
    fn probes(&self, best: &Best, shape: usize) -> Vec<usize> {
        let plain = |stream: usize| self.streams[stream].tuning.plain_seconds;
        let open = |&stream: &usize| {
            let may = self.streams[stream].horizon > 0 && self.lookups[stream].is_none();
            may && !best.drafting.contains(&stream)
        };
        let longest = (0..self.streams.len()).filter(open).map(plain).fold(0.0, f64::max);
        let long = |&stream: &usize| open(&stream) && plain(stream) > 0.0 && plain(stream) >= longest / 2.0;
        let probes: Vec<usize> = (0..self.streams.len()).filter(long).collect();
        let count = best.drafting.len();
        let extra = self.seconds(Some(shape), count + probes.len(), 0) - self.seconds(best.shape, count, 0);
        let gain: f64 = probes.iter().map(|&stream| self.gain(shape, stream, 0.0)).sum();
        let due = extra.is_finite() && longest * SHARE >= extra - gain / best.rate();
        if due { probes } else { Vec::new() }
    }

    /// A tree to be tried in place of `best`, and what that is expected to cost.
    fn trial(&self, plain: &Best, best: &Best) -> Option<(Best, f64)> {
        let trees = (0..self.ahead.shapes.len()).filter(|&shape| {
            self.ahead.shapes[shape].is_tree && Some(shape) != best.shape && self.allowed(shape)
        });
        let lucky =
            trees.filter_map(|shape| self.best(plain, shape, LUCKY)).filter(|lucky| lucky.score > best.score);
        let lucky = lucky.max_by(|a, b| a.score.total_cmp(&b.score))?;
        let shape = lucky.shape?;
        let over: f64 = lucky
            .drafting
            .iter()
            .map(|&stream| self.gain(shape, stream, LUCKY) - self.gain(shape, stream, 0.0))
            .sum();
        let loss = lucky.seconds - (lucky.tokens - over) / best.rate();
        Some((lucky, loss.max(0.0)))
    }
}
