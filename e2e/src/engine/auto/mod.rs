//! `auto`: how many nodes a round drafts, from what passes cost and what the target accepts.
//!
//! Before the draft: every auto stream has a running mean of the accepted nodes that a drafted round brought it and of
//! the nodes it took. The streams that draft are the `m` with the most to gain, with `m` at the best of
//! `tokens / seconds` over all `m`, 0 included ([`Tuner::drafting`]). A stream that is left out is tried again as
//! soon as its plain rounds have lasted long enough that the trial costs at most [`PROBE_SHARE`] of them.
//!
//! After the draft: the drafter's probabilities are corrected by the stream's statistics, and the tree is built from the
//! corrected ones ([`Tuner::build`]). A best-first tree's prefixes are the best trees of their sizes, and each node is
//! worth its probability of being accepted: the nodes of all auto streams are kept, best first, at the `k` with the
//! most `tokens - rate * seconds` ([`Tuner::budgets`]). Timings decide
//! the speed only: the text is the target's own whatever is drafted.

mod acceptance;
mod cost;
#[cfg(test)]
mod tests;

use acceptance::{Acceptance, Ratios};
pub use cost::CostCurve;

use crate::Result;
use crate::tree::{BuildOptions, CandidateTree, Marginals, ddtree_from};

/// Share of the time in plain rounds that trials of the drafter may cost.
const PROBE_SHARE: f64 = 0.02;
/// How far one round moves a stream's running means.
const RATE: f64 = 0.15;
/// The same for a trial after plain rounds.
const PROBE_RATE: f64 = 0.35;
/// The least that one round moves the means that new streams start from; the first rounds move them more.
const SHARED_RATE: f64 = 0.03;
/// Rounds that an engine's first guess counts for.
const GUESS_ROUNDS: f64 = 2.0;
/// Depths that are drafted beyond the deepest one recently used.
const MARGIN: f64 = 3.0;

/// What drafted rounds brought and took, on average.
#[derive(Clone, Copy, Debug)]
struct Means {
    /// Accepted nodes, root not counted.
    gain: f64,
    /// Drafted nodes verified.
    budget: f64,
}

impl Means {
    fn follow(&mut self, rate: f64, gain: f64, budget: f64) {
        self.gain += rate * (gain - self.gain);
        self.budget += rate * (budget - self.budget);
    }
}

/// What `auto` knows about one stream.
#[derive(Clone, Debug)]
pub(super) struct StreamTuning {
    acceptance: Acceptance,
    means: Means,
    /// Deepest depth used, falling slowly.
    reach: f64,
    /// Seconds of plain rounds since the drafter last ran.
    plain_seconds: f64,
}

impl StreamTuning {
    /// Depths worth drafting, at most `horizon`.
    pub fn horizon(&self, horizon: usize) -> usize {
        ((self.reach + MARGIN).ceil() as usize).min(horizon)
    }
}

/// One auto stream of a round, before the draft.
pub(super) struct Candidate<'a> {
    pub tuning: &'a StreamTuning,
    /// Depths it could use; 0 when it cannot draft this round.
    pub horizon: usize,
    /// Most nodes that it may draft.
    pub budget: usize,
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

/// How much one stream adds to a draft call: its block's rows and the rows whose logits are wanted.
pub(super) fn draft_load(block_size: usize, horizon: usize) -> usize {
    block_size + horizon
}

/// Costs of this machine and what streams of this engine have in common.
#[derive(Clone, Debug)]
pub(super) struct Tuner {
    /// Seconds of verify, accept and commit by rows.
    pub verify: CostCurve,
    /// Seconds of draft and build by draft load.
    pub draft: CostCurve,
    block_size: usize,
    shared: Acceptance,
    ratios: Ratios,
    means: Means,
    reach: f64,
    /// Drafted rounds that the means have followed.
    rounds: f64,
    /// Tokens per second of the rounds planned last, at their best.
    rate: f64,
}

impl Tuner {
    pub fn new(verify: CostCurve, draft: CostCurve, block_size: usize) -> Self {
        let horizon = block_size.saturating_sub(1) as f64;
        // A new engine tries the drafter first: half a block accepted.
        let means = Means { gain: horizon / 2.0, budget: horizon };
        let rate = 1.0 / verify.predict(1);
        let (shared, ratios) = (Acceptance::default(), Ratios::default());
        Self { verify, draft, block_size, shared, ratios, means, reach: horizon, rounds: 0.0, rate }
    }

    /// Knowledge for a new stream: what the engine's streams have in common.
    pub fn stream(&self) -> StreamTuning {
        let (means, reach) = (self.means, self.reach);
        StreamTuning { acceptance: Acceptance::default(), means, reach, plain_seconds: 0.0 }
    }

    /// Which of the streams draft this round, and sets the rate that [`Self::budgets`] spends by.
    pub fn drafting(&mut self, streams: &[Candidate<'_>], fixed: Fixed) -> Vec<bool> {
        let able: Vec<usize> = (0..streams.len()).filter(|&s| streams[s].horizon > 0).collect();
        let mut order = able;
        order.sort_by(|&a, &b| streams[b].tuning.means.gain.total_cmp(&streams[a].tuning.means.gain));
        let (mut tokens, mut rows, mut load) = (fixed.tokens, fixed.rows as f64, fixed.draft_load);
        let (mut best, mut chosen) = (self.rate_of(tokens, rows, load), 0);
        let plain = best;
        for (count, &index) in order.iter().enumerate() {
            let stream = &streams[index];
            tokens += stream.tuning.means.gain;
            rows += stream.tuning.means.budget.min(stream.budget as f64);
            load += draft_load(self.block_size, stream.horizon);
            let rate = self.rate_of(tokens, rows, load);
            if rate > best {
                (best, chosen) = (rate, count + 1);
            }
        }
        self.rate = best;
        let mut drafting = vec![false; streams.len()];
        for (count, &index) in order.iter().enumerate() {
            drafting[index] = count < chosen || self.probe_is_due(&streams[index], fixed, plain);
        }
        drafting
    }

    fn rate_of(&self, tokens: f64, rows: f64, load: usize) -> f64 {
        tokens / (self.verify.predict(rows.round() as usize) + self.draft.predict(load))
    }

    /// True when the expected loss of a trial is at most [`PROBE_SHARE`] of the plain rounds' time.
    fn probe_is_due(&self, stream: &Candidate<'_>, fixed: Fixed, rate: f64) -> bool {
        let means = stream.tuning.means;
        let rows = fixed.rows + means.budget.min(stream.budget as f64).round() as usize;
        let load = draft_load(self.block_size, stream.horizon);
        let extra = self.verify.predict(rows) - self.verify.predict(fixed.rows) + self.draft.predict(load);
        let loss = extra - means.gain / rate;
        stream.tuning.plain_seconds * PROBE_SHARE >= loss
    }

    /// The best tree by what is accepted from this stream, labelled with the drafter's own probabilities, and each
    /// node's probability of being accepted, root first, never rising.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn build(
        &self,
        tuning: &StreamTuning,
        marginals: &Marginals,
        root: u32,
        options: BuildOptions,
    ) -> Result<(CandidateTree, Vec<f64>)> {
        let ratios = tuning.acceptance.corrected(&self.ratios);
        let mut tree = ddtree_from(&ratios.correct(marginals), root, options)?;
        let worth = tree.joint_log_probs().iter().map(|joint| joint.exp()).collect();
        tree.relabel(marginals);
        Ok((tree, worth))
    }

    /// How many nodes of each stream's tree to verify, given what they are worth, in a pass of `others` further rows,
    /// these streams' roots included.
    pub fn budgets(&self, worth: &[Vec<f64>], others: usize) -> Vec<usize> {
        let mut taken = vec![0usize; worth.len()];
        let mut best = taken.clone();
        let (mut value, mut best_value) = (0.0, -self.rate * self.verify.predict(others));
        let total: usize = worth.iter().map(|w| w.len() - 1).sum();
        for rows in 1..=total {
            let next = |s: &usize| worth[*s].get(taken[*s] + 1).copied();
            let open = (0..worth.len()).filter_map(|s| Some((s, next(&s)?)));
            // The first of equals, so that equal streams do not swap places from run to run.
            let first_best = |a: (usize, f64), b: (usize, f64)| if b.1 > a.1 { b } else { a };
            let Some((stream, _)) = open.reduce(first_best) else { break };
            taken[stream] += 1;
            value += worth[stream][taken[stream]];
            let net = value - self.rate * self.verify.predict(others + rows);
            if net > best_value {
                best_value = net;
                best.clone_from(&taken);
            }
        }
        best
    }

    /// Takes in a drafted and verified tree of a stream and its accepted path.
    pub fn observe_path(&mut self, tuning: &mut StreamTuning, tree: &CandidateTree, path: &[usize]) {
        let gain = path.len() as f64 - 1.0;
        let budget = tree.budget() as f64;
        tuning.acceptance.observe(tree, path, &self.ratios);
        // The first round after plain ones says more about what has come since than the mean from before them.
        let rate = if tuning.plain_seconds > 0.0 { PROBE_RATE } else { RATE };
        tuning.means.follow(rate, gain, budget);
        tuning.reach = (tree.tree().max_depth() as f64).max(tuning.reach * (1.0 - RATE));
        // A trial that paid is followed by another, until the means have caught up or one does not pay.
        let trial = tuning.plain_seconds > 0.0;
        tuning.plain_seconds = if trial && self.paid(gain, tree) { f64::INFINITY } else { 0.0 };
        self.shared.observe(tree, path, &Ratios::default());
        self.ratios = self.shared.corrected(&Ratios::default());
        self.rounds += 1.0;
        let shared_rate = SHARED_RATE.max(1.0 / (self.rounds + GUESS_ROUNDS));
        self.means.follow(shared_rate, gain, budget);
        self.reach += shared_rate * (tuning.reach - self.reach);
    }

    /// True when `gain` accepted nodes were worth the time that a lone stream's tree took.
    fn paid(&self, gain: f64, tree: &CandidateTree) -> bool {
        let load = draft_load(self.block_size, tree.tree().max_depth());
        let plain = self.verify.predict(1);
        let extra = self.verify.predict(tree.tokens().len()) - plain + self.draft.predict(load);
        gain * plain >= extra
    }

    /// Takes in that an auto stream had a plain round of `seconds`.
    pub fn observe_plain(tuning: &mut StreamTuning, seconds: f64) {
        tuning.plain_seconds += seconds;
    }
}
