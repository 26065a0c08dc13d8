//! `auto`: where a round's draft comes from and how many nodes it has, from what passes cost and what the target accepts.
//!
//! Before the draft every auto stream may get nothing, a chain that is looked up in its own text ([`lookup`]), or the
//! drafter. The lookup costs nothing but the rows that verify it. The drafter has a cost by the rows of its block, and
//! for every length of a block a running mean of the accepted nodes and the nodes taken ([`blocks`]). The streams that
//! draft are the `m` with the most to gain, in blocks of the one length, with `m` and the length at the best of
//! `tokens / seconds` over all, `m = 0` included; the others look up ([`Tuner::choose`]). A stream whose rounds are
//! plain or looked up tries the drafter again as soon as they have lasted long enough that the trial costs at most
//! [`PROBE_SHARE`] of them.
//!
//! After the draft: the drafter's probabilities are corrected by the stream's statistics, and the tree is built from the
//! corrected ones ([`Tuner::build`]). A best-first tree's prefixes are the best trees of their sizes, and each node is
//! worth its probability of being accepted: the nodes of all auto streams are kept, best first, at the `k` with the
//! most `tokens - rate * seconds` ([`Tuner::spend`]). A device, which walks chains faster than it solves trees, may get
//! the streams' chains instead ([`chains`]). Timings decide
//! the speed only: the text is the target's own whatever is drafted.
//!
//! Where the device builds and walks trees itself, and nobody has to look at a draft, the nodes are chosen before it: see [`ahead`].

mod acceptance;
mod ahead;
mod blocks;
mod chains;
mod cost;
mod curves;
#[cfg(test)]
mod device_tests;
mod lookup;
mod spend;
#[cfg(test)]
mod tests;

use acceptance::{Acceptance, Ratios};
use ahead::Depths;
pub(super) use ahead::{Ahead, Bucket, RoundCosts, Walked, shapes};
pub(super) use blocks::block_lengths;
use blocks::{Blocks, Drafted, run_of};
use chains::Chains;
pub(super) use chains::Spent;
pub use cost::CostCurve;
use curves::Curves;
use lookup::Hits;
pub(super) use lookup::{History, Lookup};

use crate::tree::CandidateTree;

/// Share of the time in plain rounds that trials of the drafter may cost.
const PROBE_SHARE: f64 = 0.01;
/// How far one round moves a stream's running means.
const RATE: f64 = 0.1;
/// The same for a trial after plain rounds.
const PROBE_RATE: f64 = 0.2;
/// Accepted nodes added to a mean where the drafter is chosen: a few unlucky rounds must not end drafting, because
/// plain rounds teach nothing about it.
const OPTIMISM: f64 = 0.3;
/// The most of it, as a share of the accepted nodes that pay for a draft: where drafts are cheap, 0.3 nodes would pay for
/// them for ever.
const OPTIMISM_SHARE: f64 = 0.5;
/// The least that one round moves the means that new streams start from; the first rounds move them more.
const SHARED_RATE: f64 = 0.03;
/// Rounds that an engine's first guess counts for.
const GUESS_ROUNDS: f64 = 2.0;

/// What `auto` knows about one stream.
#[derive(Clone, Debug)]
pub(super) struct StreamTuning {
    acceptance: Acceptance,
    blocks: Blocks,
    hits: Hits,
    /// How often its drafter's best token is right, by depth, where rounds are planned ahead.
    depths: Depths,
    /// Seconds of plain rounds since the drafter last ran.
    plain_seconds: f64,
}

/// One auto stream of a round, before the draft.
pub(super) struct Candidate<'a> {
    pub tuning: &'a StreamTuning,
    /// Its tokens so far.
    pub history: &'a mut History,
    /// Depths that the drafter could draft for it; 0 when it cannot this round.
    pub horizon: usize,
    /// Tokens that a looked up chain may have.
    pub depth: usize,
    /// Most nodes that it may draft.
    pub budget: usize,
}

/// Where an auto stream's draft comes from.
#[derive(Debug)]
pub(super) enum Choice {
    /// Nowhere: the root alone is verified.
    Plain,
    /// Its own text.
    Lookup(Lookup),
    /// The drafter.
    Draft,
    /// The drafter, to see what it would bring.
    Trial,
}

/// What is decided before the draft.
#[derive(Debug)]
pub(super) struct Choices {
    pub streams: Vec<Choice>,
    /// Rows of the drafter's blocks.
    pub block_rows: usize,
}

/// The part of a round that `auto` does not decide.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fixed {
    /// Rows of the other streams and of every root.
    pub rows: usize,
    /// Tokens that the round brings without auto's nodes.
    pub tokens: f64,
    /// Draft load of the streams that draft anyway, see [`draft_load`].
    pub draft_load: usize,
}

/// What a round is expected to bring and to hold.
#[derive(Clone, Copy)]
struct Totals {
    tokens: f64,
    rows: f64,
    load: usize,
}

/// How much one stream adds to a draft call: its block's rows and the rows whose logits are wanted.
pub(super) fn draft_load(block_rows: usize, horizon: usize) -> usize {
    block_rows + horizon
}

/// Costs of this machine and what streams of this engine have in common.
#[derive(Clone, Debug)]
pub(super) struct Tuner {
    /// Seconds of verify, accept and commit by rows and streams.
    verify: Curves,
    /// The same of chains, where they differ.
    chains: Option<Chains>,
    /// Seconds of draft and build by draft load.
    pub draft: CostCurve,
    /// Numbers of rows behind which a pass costs a step more; the last is the most of a pass in which nodes are drafted.
    steps: &'static [usize],
    shared: Acceptance,
    ratios: Ratios,
    blocks: Blocks,
    hits: Hits,
    /// Drafted rounds that the means have followed.
    rounds: f64,
    /// Tokens per second of the rounds planned last, at their best without lookups.
    rate: f64,
    /// Plans rounds before their drafts, where the device needs no host between them and the next.
    ahead: Option<Ahead>,
}

impl Tuner {
    pub fn new(verify: CostCurve, draft: CostCurve, block_size: usize) -> Self {
        let rate = 1.0 / verify.predict(1);
        let (shared, ratios) = (Acceptance::default(), Ratios::default());
        let (blocks, hits) = (Blocks::new(block_size), Hits::default());
        let (verify, steps) = (Curves::from(verify), &[][..]);
        let (rounds, chains, ahead) = (0.0, None, None);
        Self { verify, chains, draft, steps, shared, ratios, blocks, hits, rounds, rate, ahead }
    }

    /// For a device: with the costs of passes by their streams, rising, and the numbers of rows behind which they step up.
    #[must_use]
    pub fn with_streams(self, curves: Vec<(usize, CostCurve)>, steps: &'static [usize]) -> Self {
        Self { verify: Curves::new(curves).unwrap_or(self.verify), steps, ..self }
    }

    /// With the costs of passes of chains by their streams, rising: rounds may have chains in place of trees, and nodes behind siblings have
    /// statistics of their own.
    #[must_use]
    pub fn with_chains(self, curves: Vec<(usize, CostCurve)>) -> Self {
        let chains = Curves::new(curves).map(Chains::new);
        let ratios = if chains.is_some() { Ratios::apart() } else { self.ratios };
        Self { chains, ratios, ..self }
    }

    /// Whether its costs are those of a device, which step up.
    pub fn is_stepped(&self) -> bool {
        !self.steps.is_empty()
    }

    /// Sets how many streams the round to be planned has.
    pub fn set_streams(&mut self, streams: usize) {
        self.verify.select(streams);
        if let Some(chains) = &mut self.chains {
            chains.verify.select(streams);
        }
    }

    /// Takes in that a pass of `rows` rows over `streams` streams, `chains` or others, took `seconds`.
    pub fn observe_verify(&mut self, rows: usize, streams: usize, chains: bool, seconds: f64) {
        self.set_streams(streams);
        let trees = self.verify.predict(rows);
        let Some(of_chains) = &mut self.chains else { return self.verify.observe(rows, seconds) };
        // A slower machine is slower for both: what is in use must not look cheaper and cheaper beside the other.
        let walked = of_chains.verify.predict(rows);
        let slower = seconds / if chains { walked } else { trees };
        self.verify.observe(rows, slower * trees);
        of_chains.verify.observe(rows, slower * walked);
    }

    /// What passes cost that are shaped like the last drafted round's.
    fn passes(&self) -> &Curves {
        match &self.chains {
            Some(chains) if chains.are_used() => &chains.verify,
            _ => &self.verify,
        }
    }

    /// Knowledge for a new stream: what the engine's streams have in common.
    pub fn stream(&self) -> StreamTuning {
        StreamTuning {
            acceptance: Acceptance::default(),
            blocks: self.blocks.clone(),
            hits: Hits::default(),
            depths: Depths::default(),
            plain_seconds: 0.0,
        }
    }

    /// Where the draft of each stream comes from, and sets the rate that [`Self::spend`] spends by.
    pub fn choose(&mut self, streams: &mut [Candidate<'_>], fixed: Fixed) -> Choices {
        let lookups: Vec<_> = streams.iter_mut().map(|stream| self.look_up(stream, fixed.rows)).collect();
        let plain = Totals { tokens: fixed.tokens, rows: fixed.rows as f64, load: fixed.draft_load };
        let mut all = plain;
        for lookup in lookups.iter().flatten() {
            all.tokens += lookup.gain;
            all.rows += lookup.tokens.len() as f64;
        }
        let plain_rate = self.rate_of(plain);
        let (mut best, mut drafting, mut length) = (self.rate_of(all), Vec::new(), 0);
        self.rate = plain_rate;
        for index in 0..self.blocks.count() {
            let optimism = self.optimism(index, streams.len(), plain_rate);
            let order = self.by_gain(streams, &lookups, index);
            let (mut with, mut alone) = (all, plain);
            for count in 0..order.len() {
                let stream = order[count];
                let added = self.added(&streams[stream], index, optimism);
                alone = alone.plus(added);
                with = with.plus(added);
                if let Some(lookup) = &lookups[stream] {
                    with.tokens -= lookup.gain;
                    with.rows -= lookup.tokens.len() as f64;
                }
                self.rate = self.rate.max(self.cut_rate(alone, plain, count + 1));
                let rate = self.cut_rate(with, all, count + 1);
                if rate > best {
                    (best, drafting, length) = (rate, order[..=count].to_vec(), index);
                }
            }
        }
        let block_rows = self.blocks.rows(length);
        let choices = lookups.into_iter().enumerate().map(|(stream, lookup)| match lookup {
            _ if drafting.contains(&stream) => Choice::Draft,
            Some(lookup) => Choice::Lookup(lookup),
            None if self.probe_is_due(&streams[stream], fixed, length, plain_rate) => Choice::Trial,
            None => Choice::Plain,
        });
        Choices { streams: choices.collect(), block_rows }
    }

    fn look_up(&self, stream: &mut Candidate<'_>, rows: usize) -> Option<Lookup> {
        let extra = |nodes| self.rate * (self.passes().predict(rows + nodes) - self.passes().predict(rows));
        let most = stream.depth.min(stream.budget);
        if most == 0 {
            return None;
        }
        stream.tuning.hits.propose(&self.hits, stream.history, most, extra)
    }

    /// The streams that can draft, those first that gain most over their lookups.
    fn by_gain(&self, streams: &[Candidate<'_>], lookups: &[Option<Lookup>], index: usize) -> Vec<usize> {
        let gain = |&stream: &usize| {
            let looked_up = lookups[stream].as_ref().map_or(0.0, |lookup| lookup.gain);
            streams[stream].tuning.blocks.means(index).gain - looked_up
        };
        let mut order: Vec<usize> = (0..streams.len()).filter(|&s| streams[s].horizon > 0).collect();
        order.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
        order
    }

    /// Accepted nodes added to the means of blocks of the `index`th length when `streams` may draft.
    fn optimism(&self, index: usize, streams: usize, plain_rate: f64) -> f64 {
        let (rows, streams) = (self.blocks.rows(index), streams.max(1));
        let drafts = self.draft.predict(streams * draft_load(rows, rows - 1));
        OPTIMISM.min(OPTIMISM_SHARE * drafts * plain_rate / streams as f64)
    }

    /// What a stream's draft in a block of the `index`th length adds to a round.
    fn added(&self, stream: &Candidate<'_>, index: usize, optimism: f64) -> Totals {
        let means = stream.tuning.blocks.means(index);
        let rows = self.blocks.rows(index);
        let horizon = stream.horizon.min(rows - 1);
        Totals {
            tokens: (means.gain + optimism).min(horizon as f64),
            rows: means.budget.min(stream.budget as f64),
            load: draft_load(rows, horizon),
        }
    }

    fn rate_of(&self, round: Totals) -> f64 {
        round.tokens / (self.passes().predict(round.rows.round() as usize) + self.draft.predict(round.load))
    }

    /// The best rate of a round in which `drafting` streams draft on top of `base`, when nodes that lie behind a step of the
    /// costs may be left out. What a stream gains is taken to be right with one probability per node.
    fn cut_rate(&self, round: Totals, base: Totals, drafting: usize) -> f64 {
        let most = self.steps.last().map_or(f64::INFINITY, |&rows| rows as f64);
        let whole = if round.rows <= most { self.rate_of(round) } else { 0.0 };
        let gain = (round.tokens - base.tokens).max(0.0) / drafting as f64;
        let known = (round.rows - base.rows) / drafting as f64;
        let cut = |rows: f64| {
            let nodes = (rows - base.rows) / drafting as f64;
            let kept = run_of(gain, known, nodes);
            self.rate_of(Totals { tokens: base.tokens + kept * drafting as f64, rows, ..round })
        };
        let steps = self.steps.iter().map(|&rows| rows as f64);
        steps.filter(|&rows| rows > base.rows && rows < round.rows).map(cut).fold(whole, f64::max)
    }

    /// True when the expected loss of a trial is at most [`PROBE_SHARE`] of the plain rounds' time.
    fn probe_is_due(&self, stream: &Candidate<'_>, fixed: Fixed, index: usize, rate: f64) -> bool {
        if stream.horizon == 0 {
            return false;
        }
        let added = self.added(stream, index, 0.0);
        let rows = fixed.rows + added.rows.round() as usize;
        let extra =
            self.passes().predict(rows) - self.passes().predict(fixed.rows) + self.draft.predict(added.load);
        stream.tuning.plain_seconds * PROBE_SHARE >= extra - added.tokens / rate
    }

    /// Takes in a drafted and verified tree of a stream, of `horizon` depths in a block of `block_rows` rows, and its
    /// accepted path.
    pub fn observe_draft(
        &mut self,
        tuning: &mut StreamTuning,
        (block_rows, horizon): (usize, usize),
        tree: &CandidateTree,
        path: &[usize],
    ) {
        let gain = path.len() - 1;
        let drafted = Drafted { horizon, gain, budget: tree.budget() };
        let apart = self.chains.is_some();
        let drafters_own = if apart { Ratios::apart() } else { Ratios::default() };
        if tree.tree().is_chain() {
            self.observe_chain(tuning, tree.budget(), gain);
        }
        tuning.acceptance.observe(tree, path, &self.ratios, apart);
        // The first round after plain ones says more about what has come since than the mean from before them.
        let trial = tuning.plain_seconds > 0.0;
        tuning.blocks.follow(if trial { PROBE_RATE } else { RATE }, drafted);
        // A trial that paid is followed by another, until the means have caught up or one does not pay.
        let paid = self.paid(draft_load(block_rows, horizon), gain as f64, tree);
        tuning.plain_seconds = if trial && paid { f64::INFINITY } else { 0.0 };
        self.shared.observe(tree, path, &drafters_own, apart);
        self.ratios = self.shared.corrected(&drafters_own);
        self.rounds += 1.0;
        self.blocks.follow(SHARED_RATE.max(1.0 / (self.rounds + GUESS_ROUNDS)), drafted);
    }

    /// True when `gain` accepted nodes were worth the time that a lone stream's tree took.
    fn paid(&self, load: usize, gain: f64, tree: &CandidateTree) -> bool {
        let plain = self.passes().predict(1);
        let extra = self.passes().predict(tree.tokens().len()) - plain + self.draft.predict(load);
        gain * plain >= extra
    }

    /// Takes in that of a chain of `proposed` tokens after a match of `matched` the first `accepted` were right.
    pub fn observe_lookup(
        &mut self,
        tuning: &mut StreamTuning,
        matched: usize,
        proposed: usize,
        accepted: usize,
    ) {
        tuning.hits.observe(matched, proposed, accepted);
        self.hits.observe(matched, proposed, accepted);
    }

    /// Takes in that an auto stream had a round without the drafter of `seconds`.
    pub fn observe_plain(tuning: &mut StreamTuning, seconds: f64) {
        tuning.plain_seconds += seconds;
    }
}

impl Totals {
    fn plus(self, other: Self) -> Self {
        let Self { tokens, rows, load } = other;
        Self { tokens: self.tokens + tokens, rows: self.rows + rows, load: self.load + load }
    }
}
