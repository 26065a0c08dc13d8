//! Rounds that are planned before their drafts, where the device builds and walks trees without the host: one of a few [`Shape`]s for all auto
//! streams that draft, so that the round has the launches, and the recordings, that `chain` and `tree` of those nodes have.
//!
//! A chain is worth what the running rates by depth say. A tree is worth as many times a chain of its depth as it was in rounds that tell both: of
//! a verified tree every smaller one is a prefix, and its leading best tokens are the chain's. Such rounds are trials while chains are used; they
//! cost at most [`SHARE`] of the time, and there are none where even the lucky end of what is known of trees would not pay. What rounds cost was
//! timed at start with their recordings made; a machine that has become slower is so for every shape.

mod depths;
mod outlook;
mod pairs;
mod shapes;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub(super) use depths::Depths;
use outlook::{Decision, Outlook};
use pairs::Pairs;
pub(in super::super) use shapes::{RoundCosts, Shape, shapes};

use super::{Candidate, Choice, Lookup, StreamTuning, Tuner};

/// Share of the time that trials may cost.
const SHARE: f64 = 0.005;
/// Rounds after which what is known of trees is worth half.
const HALF: f64 = 4000.0;
/// What a stream's rates by depth keep of its round before, and those of all streams.
const KEEP: [f64; 2] = [0.98, 0.998];
/// The same of a stream's in a trial after plain rounds.
const KEEP_PLAIN: f64 = 0.5;
/// How far a round moves how slow the machine is taken to be, and the most that it says.
const SLOWER: (f64, f64) = (0.1, 1.25);
/// Rounds of a bucket before one counts: the first ones launch kernel by kernel, and record.
const UNTIMED: u32 = 2;
/// Of rounds with trees one of so many is read back, besides trials.
const READ: u64 = 4;
/// Tokens of chains that are looked up: few sizes come again soon.
const LOOKED_UP: [usize; 5] = [1, 3, 7, 15, 23];

/// A round's launches: its shape, by its place among the shapes, the streams that draft it, and all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(in super::super) struct Bucket {
    shape: Option<usize>,
    drafting: usize,
    streams: usize,
}

/// A round planned ahead.
#[derive(Debug)]
pub(in super::super) struct Planned {
    /// Where each auto stream's draft comes from.
    pub streams: Vec<Choice>,
    /// What the drafting ones draft.
    pub shape: Option<Shape>,
    /// What the round is timed as; `None` for one with more in it.
    pub bucket: Option<Bucket>,
    /// Whether the built trees are to be read back.
    pub reads: bool,
}

/// A tree that was verified.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Walked<'a> {
    /// Ranks and depths of its nodes, root first, in the order in which a builder takes them.
    pub ranks: &'a [u32],
    /// See there.
    pub depths: &'a [u32],
    /// The accepted nodes, root first.
    pub path: &'a [usize],
    /// Depths that were drafted.
    pub horizon: usize,
}

impl Walked<'_> {
    /// Accepted best tokens, and whether the next one was in the tree and wrong.
    fn spine(&self) -> (usize, bool) {
        let right = self.path[1..].iter().take_while(|&&node| self.ranks[node] == 0).count();
        let deepest = self.depths.iter().max().map_or(0, |&depth| depth as usize);
        (right, right + 1 < self.path.len() || right < deepest)
    }

    /// What a tree of so many nodes down to `horizon` would have brought; `None` when this one does not hold it.
    fn smaller(&self, nodes: usize, horizon: usize) -> Option<usize> {
        let kept = (1..self.depths.len()).filter(|&node| self.depths[node] as usize <= horizon);
        let last = kept.take(nodes).enumerate().last().filter(|(count, _)| count + 1 == nodes)?.1;
        let within = |&&node: &&usize| node <= last && self.depths[node] as usize <= horizon;
        Some(self.path[1..].iter().take_while(within).count())
    }
}

/// What is known of this machine's rounds and of what the shapes bring.
#[derive(Clone, Debug)]
pub(in super::super) struct Ahead {
    shapes: Vec<Shape>,
    costs: RoundCosts,
    shared: Depths,
    /// By shape; those of chains stay empty.
    pairs: Vec<Pairs>,
    /// Seconds of a round for one when it was timed.
    slower: f64,
    /// Seconds that trials may cost by now.
    credit: f64,
    /// Rounds since trees were last seen.
    since: f64,
    rounds: u64,
    /// Rounds since the last trial of another tree.
    untried: u64,
    seen: HashMap<Bucket, u32>,
    /// The shape of every round, while rounds are timed.
    pub forced: Option<Option<usize>>,
}

impl Ahead {
    /// For a drafter of `block` rows, whose rounds cost so much.
    pub fn new(block: usize, costs: RoundCosts) -> Self {
        let shapes = shapes(block);
        Self {
            pairs: vec![Pairs::default(); shapes.len()],
            shapes,
            costs,
            shared: Depths::default(),
            slower: 1.0,
            credit: 0.0,
            since: 0.0,
            rounds: 0,
            untried: 0,
            seen: HashMap::new(),
            forced: None,
        }
    }

    /// What is known of trees, of which nothing was seen for a while, is worth so much of itself.
    fn still_known(&self) -> f64 {
        0.5f64.powf(self.since / HALF)
    }

    /// A tree's nodes for one of a chain of its depth: no fewer than those of the trees that it holds.
    fn ratio(&self, shape: usize) -> f64 {
        let of = self.shapes[shape];
        let held =
            |other: &Shape| other.is_tree && other.block_rows == of.block_rows && other.nodes <= of.nodes;
        let ratios = self.shapes.iter().zip(&self.pairs).filter(|(other, _)| held(other));
        ratios.map(|(_, pairs)| pairs.ratio()).fold(f64::NEG_INFINITY, f64::max)
    }

    fn observe(&mut self, depths: &mut Depths, (right, ended): (usize, bool), keep: f64) {
        depths.observe(right, ended, keep);
        self.shared.observe(right, ended, KEEP[1]);
    }
}

impl Tuner {
    /// Plans rounds ahead from now on.
    pub fn plan_ahead(&mut self, ahead: Option<Ahead>) {
        self.ahead = ahead;
    }

    /// Whether rounds are planned ahead.
    pub fn plans_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Has every round be of one shape, or plain, and learn nothing; `None` for no longer.
    pub fn force(&mut self, shape: Option<Option<usize>>) {
        if let Some(ahead) = &mut self.ahead {
            ahead.forced = shape;
        }
    }

    /// Where the draft of each auto stream comes from, in a round of `count.0` streams of which `count.1` draft anyway, and what is drafted.
    pub fn choose_ahead(&mut self, streams: &mut [Candidate<'_>], count: (usize, usize)) -> Option<Planned> {
        let lookups: Vec<_> = streams
            .iter_mut()
            .map(|stream| self.look_up(stream, count.0).and_then(|lookup| lookup.cut(&LOOKED_UP)))
            .collect();
        let ahead = self.ahead.as_ref()?;
        let alone = count.0 == streams.len();
        if let Some(forced) = ahead.forced {
            let choice = |stream: &Candidate<'_>| match forced {
                Some(_) if stream.horizon > 0 => Choice::Draft,
                _ => Choice::Plain,
            };
            let shape = forced.map(|shape| ahead.shapes[shape]);
            let streams = streams.iter().map(choice).collect();
            return Some(Planned { streams, shape, bucket: None, reads: false });
        }
        let known = ahead.shared.shared();
        let longest = ahead.shapes.iter().map(|shape| shape.horizon()).max().unwrap_or(0);
        let rates = streams.iter().map(|stream| stream.tuning.depths.leaning(&known));
        let runs = rates.map(|rates| depths::runs(&rates, longest)).collect();
        let looked_up =
            |nodes: usize| self.passes().predict(count.0 + nodes) - self.passes().predict(count.0);
        let streams = &*streams;
        let outlook = Outlook { ahead, streams, lookups: &lookups, runs, count, looked_up: &looked_up };
        let Decision { shape, drafting, trials, tried, rate } = outlook.decide();
        let is_tree = shape.is_some_and(|shape| ahead.shapes[shape].is_tree);
        let looks = (0..lookups.len()).any(|stream| lookups[stream].is_some() && !drafting.contains(&stream));
        let choice = |(stream, lookup): (usize, Option<Lookup>)| match lookup {
            _ if trials.contains(&stream) => Choice::Trial,
            _ if drafting.contains(&stream) => Choice::Draft,
            Some(lookup) => Choice::Lookup(lookup),
            None => Choice::Plain,
        };
        let planned = Planned {
            shape: shape.map(|shape| ahead.shapes[shape]),
            bucket: (alone && !looks).then_some(Bucket { shape, drafting: drafting.len(), streams: count.0 }),
            reads: is_tree && (!trials.is_empty() || ahead.rounds.is_multiple_of(READ)),
            streams: lookups.into_iter().enumerate().map(choice).collect(),
        };
        self.rate = rate;
        let ahead = self.ahead.as_mut()?;
        if let Some(cost) = tried {
            (ahead.credit, ahead.untried) = (ahead.credit - cost, 0);
        }
        ahead.rounds += 1;
        ahead.untried += 1;
        ahead.since += 1.0;
        Some(planned)
    }

    /// Takes in that a planned round took so long.
    pub fn observe_round(&mut self, bucket: Bucket, seconds: f64) {
        let Some(ahead) = self.ahead.as_mut().filter(|ahead| ahead.forced.is_none()) else { return };
        ahead.credit = (ahead.credit + SHARE * seconds).min(seconds);
        let seen = ahead.seen.entry(bucket).or_default();
        *seen += 1;
        let timed = ahead.costs.plain(bucket.streams)
            + bucket.shape.map_or(0.0, |shape| ahead.costs.added(shape, bucket.drafting));
        if *seen > UNTIMED && timed.is_finite() && seconds > 0.0 {
            let (rate, most) = SLOWER;
            let ratio = (seconds / (timed * ahead.slower)).clamp(1.0 / most, most);
            ahead.slower *= 1.0 + rate * (ratio - 1.0);
        }
    }

    /// Takes in that of a chain of `drafted` best tokens the first `right` were accepted.
    pub fn observe_chain(&mut self, tuning: &mut StreamTuning, drafted: usize, right: usize) {
        let Some(ahead) = self.ahead.as_mut().filter(|ahead| ahead.forced.is_none()) else { return };
        ahead.observe(&mut tuning.depths, (right, right < drafted), keep(tuning.plain_seconds));
    }

    /// Takes in a verified tree.
    pub fn observe_tree(&mut self, tuning: &mut StreamTuning, walked: Walked<'_>) {
        let Some(ahead) = self.ahead.as_mut().filter(|ahead| ahead.forced.is_none()) else { return };
        let (right, ended) = walked.spine();
        let rates = tuning.depths.leaning(&ahead.shared.shared());
        for (shape, pairs) in ahead.shapes.iter().zip(&mut ahead.pairs) {
            let horizon = shape.horizon();
            if !shape.is_tree || horizon > walked.horizon {
                continue;
            }
            if let Some(tree) = walked.smaller(shape.nodes, horizon) {
                let more = if ended { 0.0 } else { depths::more(&rates, right, horizon) };
                pairs.observe(tree as f64, right.min(horizon) as f64 + more);
            }
        }
        ahead.since = 0.0;
        ahead.observe(&mut tuning.depths, (right, ended), keep(tuning.plain_seconds));
    }

    /// A planned round's draft of a stream was verified, whatever was learned of it: after plain rounds one that paid is followed by another.
    pub fn observe_planned(&mut self, tuning: &mut StreamTuning, bucket: Option<Bucket>, gain: usize) {
        let trial = tuning.plain_seconds > 0.0;
        let paid = self.ahead.as_ref().zip(bucket).is_some_and(|(ahead, bucket)| {
            let added = bucket.shape.map_or(0.0, |shape| ahead.costs.added(shape, 1));
            gain as f64 * ahead.costs.plain(1) >= added
        });
        tuning.plain_seconds = if trial && paid { f64::INFINITY } else { 0.0 };
    }
}

fn keep(plain_seconds: f64) -> f64 {
    if plain_seconds > 0.0 { KEEP_PLAIN } else { KEEP[0] }
}
