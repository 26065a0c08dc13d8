//! The second half of a round: verify, accept, commit, report.

use std::time::Instant;

use candle_core::Tensor;

use super::accept::{Accepted, walk, with_host_rows};
use super::auto::Tuner;
use super::plan::{Plan, Rows, Work};
use super::stream::Emission;
use super::{Engine, Event, ReportedNode, RoundReport, StageTimes};
use crate::target::Verified;
use crate::tree::CandidateTree;
use crate::{Error, Result};

/// What a round did to one stream.
struct Outcome {
    /// Nodes to commit, root first.
    path: Vec<usize>,
    /// Accepted nodes and the token after them, for the report: before the end of the generation cut them.
    walked: Option<(Vec<usize>, u32)>,
    /// What became visible; `None` for a prompt chunk that is not the last.
    emission: Option<Emission>,
    /// Position of the first value that is not finite.
    failed: Option<usize>,
}

impl Outcome {
    fn failed(position: usize) -> Self {
        Self { path: Vec::new(), walked: None, emission: None, failed: Some(position) }
    }
}

impl Engine {
    /// One round over all running streams. On an error no event has been reported.
    pub(super) fn round(&mut self) -> Result<()> {
        let mut times = StageTimes::default();
        let plan = self.plan(&mut times)?;
        let clock = Instant::now();
        let span = tracing::debug_span!("verify").entered();
        let streams = plan.work.iter().map(|work| work.verify(&self.running[work.index]));
        let verified = self.target.verify(&streams.collect::<Result<Vec<_>>>()?)?;
        drop(span);
        times.verify = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let span = tracing::debug_span!("accept").entered();
        let outcomes = self.accept(&plan.work, &verified)?;
        drop(span);
        times.accept = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let span = tracing::debug_span!("commit").entered();
        let paths: Vec<Vec<usize>> = outcomes.iter().map(|outcome| outcome.path.clone()).collect();
        self.target.commit(&paths)?;
        self.keep_features(&plan.work, &verified, &paths)?;
        drop(span);
        times.commit = clock.elapsed().as_secs_f64();
        self.learn(&plan, &outcomes, &times);
        self.report(plan.work, outcomes, times);
        Ok(())
    }

    fn accept(&mut self, work: &[Work], verified: &Verified) -> Result<Vec<Outcome>> {
        let vocab = self.limits.vocab;
        let mut accept_all = |logits: &[f32]| {
            let rows = verified.logit_rows.windows(2).map(|w| &logits[w[0] * vocab..w[1] * vocab]);
            work.iter().zip(rows).map(|(work, rows)| self.accept_one(work, rows)).collect()
        };
        match &verified.logits {
            Some(logits) => with_host_rows(logits, accept_all),
            None => Ok(accept_all(&[])),
        }
    }

    fn accept_one(&mut self, work: &Work, logits: &[f32]) -> Outcome {
        let stream = &mut self.running[work.index];
        match &work.rows {
            Rows::Prompt(count) => {
                let path = (0..*count).collect();
                if logits.is_empty() {
                    return Outcome { path, walked: None, emission: None, failed: None };
                }
                let Some(token) = stream.picker.pick(logits, stream.prompt.len()) else {
                    return Outcome::failed(stream.prompt.len() - 1);
                };
                let emission = Some(stream.output.push(vec![token]));
                Outcome { path, walked: None, emission, failed: None }
            }
            Rows::Tree { tree, .. } => match walk(tree, logits, &stream.picker, stream.start()) {
                Err(position) => Outcome::failed(position),
                Ok(Accepted { path, tokens }) => {
                    let walked = tokens.last().map(|bonus| (path.clone(), bonus.id));
                    let emission = stream.output.push(tokens);
                    // A generation that ends inside the path is committed up to its last token.
                    let kept = path.len().min(emission.tokens.len() + 1);
                    let path = path[..kept].to_vec();
                    Outcome { path, walked, emission: Some(emission), failed: None }
                }
            },
        }
    }

    /// Keeps the committed tokens' target features for the drafter.
    fn keep_features(&mut self, work: &[Work], verified: &Verified, paths: &[Vec<usize>]) -> Result<()> {
        let (Some(features), Some(drafter)) = (&verified.features, self.drafter.as_deref_mut()) else {
            return Ok(());
        };
        for ((work, path), &first) in work.iter().zip(paths).zip(verified.batch.cu_nodes()) {
            let stream = &mut self.running[work.index];
            let Some(pending) = stream.features.as_mut().filter(|_| !path.is_empty()) else { continue };
            let contiguous = path.iter().enumerate().all(|(entry, &node)| entry == node);
            let rows = if contiguous {
                features.narrow(0, first as usize, path.len())?
            } else {
                let rows: Vec<u32> = path.iter().map(|&node| first as u32 + node as u32).collect();
                features.index_select(&Tensor::new(rows, features.device())?, 0)?
            };
            pending.push(rows, stream.slot, drafter)?;
        }
        Ok(())
    }

    /// Tells `auto` what the round cost and brought.
    fn learn(&mut self, plan: &Plan, outcomes: &[Outcome], times: &StageTimes) {
        let mut rows = Some(0);
        for (work, outcome) in plan.work.iter().zip(outcomes) {
            let Rows::Tree { tree, drafted } = &work.rows else {
                // A prompt chunk's rows want no logits: they say little about a round's.
                rows = None;
                continue;
            };
            rows = rows.map(|rows| rows + tree.tokens().len());
            let tuning = &mut self.running[work.index].tuning;
            match &outcome.walked {
                Some((path, _)) if *drafted => self.tuner.observe_path(tuning, tree, path),
                _ => Tuner::observe_plain(tuning, times.total()),
            }
        }
        if let Some(rows) = rows {
            self.tuner.verify.observe(rows, times.verify + times.accept + times.commit);
            if let Some(seconds) = plan.draft_seconds {
                self.tuner.draft.observe(plan.draft_load, seconds);
            }
        }
    }

    /// Moves the streams on, reports what happened to them, and frees the slots of those that ended.
    fn report(&mut self, work: Vec<Work>, outcomes: Vec<Outcome>, times: StageTimes) {
        let mut ended = Vec::new();
        for (work, outcome) in work.into_iter().zip(outcomes) {
            if self.report_one(&work, outcome, times) {
                ended.push(work.index);
            }
        }
        for index in ended.into_iter().rev() {
            let stream = self.running.remove(index);
            self.release(stream.slot);
        }
    }

    /// True when the stream has ended.
    fn report_one(&mut self, work: &Work, outcome: Outcome, times: StageTimes) -> bool {
        let stream = &mut self.running[work.index];
        if let Some(position) = outcome.failed {
            let error = Error::NonFinite { stream: stream.id.0, position };
            self.counters.non_finite += 1;
            self.events.push((stream.id, Event::Failed(error)));
            return true;
        }
        match &work.rows {
            Rows::Prompt(count) => {
                stream.prefilled += count;
                stream.stats.stages.prefill += times.total();
            }
            Rows::Tree { tree, drafted } => {
                let stats = &mut stream.stats;
                stats.stages += times;
                stats.rounds += 1;
                stats.nodes += tree.tokens().len();
                stats.committed += outcome.path.len();
                stats.drafted_rounds += usize::from(*drafted);
                *stats.budgets.entry(tree.budget()).or_default() += 1;
            }
        }
        if let (true, Rows::Tree { tree, .. }, Some((path, bonus))) =
            (stream.report_rounds, &work.rows, outcome.walked)
        {
            let report = RoundReport { start: stream.start(), nodes: reported(tree), path, bonus };
            self.events.push((stream.id, Event::Round(report)));
        }
        let Some(Emission { text, tokens, finish }) = outcome.emission else { return false };
        if stream.stats.completion_tokens == 0 {
            stream.stats.first_token = stream.submitted.elapsed().as_secs_f64();
        }
        stream.stats.completion_tokens += tokens.len();
        stream.root = tokens.last().map(|token| token.id);
        self.events.push((stream.id, Event::Text { text, tokens }));
        let Some(reason) = finish else { return false };
        let stats = stream.final_stats();
        self.events.push((stream.id, Event::Done { reason, stats }));
        true
    }
}

fn reported(tree: &CandidateTree) -> Vec<ReportedNode> {
    let (shape, tokens) = (tree.tree(), tree.tokens());
    let node = |node: usize| ReportedNode {
        token: tokens[node],
        parent: shape.parents()[node],
        depth: shape.depths()[node] as u32,
        prob: tree.prob(node),
        log_prob: tree.joint_log_probs()[node] as f32,
    };
    (0..tokens.len()).map(node).collect()
}
