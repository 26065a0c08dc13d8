//! The second half of a round: verify, accept, commit, report.

use std::time::Instant;

use candle_core::Tensor;

use super::accept::{Accepted, Failure, Judge, walk};
use super::choose::Fault;
use super::plan::{Rows, Source, Work};
use super::stream::{Emission, Stream};
use super::target_rows::{TargetRow, TargetRows, best_tokens, with_host_rows};
use super::{Chosen, Engine, Event, NodeShape, PromptToken, ReportedNode, RoundReport, StageTimes};
use crate::Error;
use crate::sampling::{argmax, log_probs};
use crate::tree::CandidateTree;

/// What a round did to one stream.
pub(super) struct Outcome {
    /// Nodes to commit, root first.
    pub path: Vec<usize>,
    /// Accepted nodes and the token after them, for the report: before the end of the generation cut them.
    pub walked: Option<(Vec<usize>, u32)>,
    /// What became visible; `None` for a prompt chunk that is not the last.
    pub emission: Option<Emission>,
    /// Why the stream cannot go on.
    pub failed: Option<Failure>,
}

impl Outcome {
    pub fn failed(failure: Failure) -> Self {
        Self { path: Vec::new(), walked: None, emission: None, failed: Some(failure) }
    }

    /// The stream takes in what was accepted.
    pub fn accepted(stream: &mut Stream, accepted: Accepted) -> Self {
        let Accepted { path, tokens } = accepted;
        let walked = tokens.last().map(|bonus| (path.clone(), bonus.id));
        let emission = stream.output.push(tokens);
        // A generation that ends inside the path is committed up to its last token.
        let kept = path.len().min(emission.tokens.len() + 1);
        Self { path: path[..kept].to_vec(), walked, emission: Some(emission), failed: None }
    }
}

impl Engine {
    /// One round over all running streams, which have waited `read` seconds for long prompts. On an error no event has been reported.
    pub(super) fn round(&mut self, read: f64) -> crate::Result<()> {
        let mut times = StageTimes::default();
        let plan = self.plan(&mut times)?;
        if plan.work.is_empty() {
            return Ok(());
        }
        let clock = Instant::now();
        let span = tracing::debug_span!("verify").entered();
        let verified = self.verify(&plan)?;
        self.settle(verified.logits.as_ref())?;
        drop(span);
        times.verify = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let span = tracing::debug_span!("accept").entered();
        let (outcomes, committed) = match self.walk_where_verified(&plan.work, &verified)? {
            Some(outcomes) => (outcomes, true),
            None => (self.accept(&plan.work, verified.logits.as_ref(), &verified.logit_rows)?, false),
        };
        drop(span);
        times.accept = clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let span = tracing::debug_span!("commit").entered();
        let paths: Vec<Vec<usize>> = outcomes.iter().map(|outcome| outcome.path.clone()).collect();
        // Who has drafted is likely to draft again: the commit may go on beside that.
        match plan.work.iter().any(Work::drafted) {
            _ if committed => {}
            true => self.target.commit_beside(&paths)?,
            false => self.target.commit(&paths)?,
        }
        self.keep_features(&plan.work, (verified.features.as_ref(), verified.batch.cu_nodes()), &paths)?;
        self.settle(verified.logits.as_ref())?;
        self.save_prefixes(&plan.work, &outcomes)?;
        drop(span);
        times.commit = clock.elapsed().as_secs_f64();
        self.learn(&plan, &outcomes, &times)?;
        times.prefill = read;
        self.report(plan.work, outcomes, times);
        Ok(())
    }

    /// Accepts what the rows of `logits` say, of which those of `work[i]` begin at `logit_rows[i]`.
    pub(super) fn accept(
        &mut self,
        work: &[Work],
        logits: Option<&Tensor>,
        logit_rows: &[usize],
    ) -> crate::Result<Vec<Outcome>> {
        let vocab = self.limits.vocab;
        match logits {
            None => self.accept_all(work, logit_rows, TargetRows::Best(&[])),
            Some(logits) if logits.device().is_cpu() => with_host_rows(logits, |all| {
                self.accept_all(work, logit_rows, TargetRows::Logits(all, vocab))
            })?,
            Some(logits) => {
                let wanted = work.iter().any(|work| self.running[work.index].only_best());
                let best = if wanted { best_tokens(logits)? } else { Vec::new() };
                self.accept_all(work, logit_rows, TargetRows::apart(logits, &best))
            }
        }
    }

    fn accept_all(
        &mut self,
        work: &[Work],
        logit_rows: &[usize],
        all: TargetRows<'_>,
    ) -> crate::Result<Vec<Outcome>> {
        let rows = logit_rows.windows(2).map(|w| all.slice(w[0], w[1]));
        work.iter().zip(rows).map(|(work, rows)| self.accept_one(work, rows)).collect()
    }

    fn accept_one(&mut self, work: &Work, rows: TargetRows<'_>) -> crate::Result<Outcome> {
        let stream = &mut self.running[work.index];
        let rows = if stream.only_best() { rows.best() } else { rows };
        let start = stream.start();
        let judge = Judge::new(self.config.synthetic.as_ref(), stream.picker.sampling.seed);
        Ok(match &work.rows {
            Rows::Prompt(count) => match accept_prompt(stream, *count, rows)? {
                Err(failure) => Outcome::failed(failure),
                Ok(emission) => Outcome { path: (0..*count).collect(), walked: None, emission, failed: None },
            },
            Rows::Tree { tree, .. } => match walk(tree, rows, start, &mut stream.picker, judge)? {
                Err(failure) => Outcome::failed(failure),
                Ok(accepted) => Outcome::accepted(stream, accepted),
            },
        })
    }

    /// Saves the prompts that have just been read as far as they are to be saved.
    pub(super) fn save_prefixes(&mut self, work: &[Work], outcomes: &[Outcome]) -> crate::Result<()> {
        for (work, outcome) in work.iter().zip(outcomes) {
            if let (Rows::Prompt(count), None) = (&work.rows, &outcome.failed) {
                self.save_prefix(work.index, self.running[work.index].prefilled + count)?;
            }
        }
        Ok(())
    }

    /// Keeps the committed tokens' target features for the drafter; those of `work[i]` begin at row `cu_rows[i]`.
    pub(super) fn keep_features(
        &mut self,
        work: &[Work],
        (features, cu_rows): (Option<&Tensor>, &[i32]),
        paths: &[Vec<usize>],
    ) -> crate::Result<()> {
        let (Some(features), Some(drafter)) = (features, self.drafter.as_deref_mut()) else {
            return Ok(());
        };
        for ((work, path), &first) in work.iter().zip(paths).zip(cu_rows) {
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

    /// Moves the streams on, reports what happened to them, and frees the slots of those that ended.
    pub(super) fn report(&mut self, work: Vec<Work>, outcomes: Vec<Outcome>, times: StageTimes) {
        let mut ended = Vec::new();
        for (work, outcome) in work.into_iter().zip(outcomes) {
            let failed = outcome.failed.is_some();
            if self.report_one(&work, outcome, times) {
                ended.push((work.index, failed));
            }
        }
        for (index, failed) in ended.into_iter().rev() {
            let stream = self.running.remove(index);
            if failed {
                self.forget(&stream);
            }
            self.release(stream.slot);
        }
    }

    /// True when the stream has ended.
    fn report_one(&mut self, work: &Work, outcome: Outcome, times: StageTimes) -> bool {
        let stream = &mut self.running[work.index];
        if let Some(Failure { position, fault }) = outcome.failed {
            let error = match fault {
                Fault::NonFinite => {
                    self.counters.non_finite += 1;
                    Error::NonFinite { stream: stream.id.0, position }
                }
                Fault::Rules(message) => Error::NoToken { stream: stream.id.0, position, message },
            };
            self.events.push((stream.id, Event::Failed(error)));
            return true;
        }
        match &work.rows {
            Rows::Prompt(count) => {
                stream.prefilled += count;
                stream.stats.stages.prefill += times.total();
            }
            Rows::Tree { tree, source } => {
                let stats = &mut stream.stats;
                stats.stages += times;
                stats.rounds += 1;
                stats.nodes += tree.tokens().len();
                stats.committed += outcome.path.len();
                let accepted = outcome.path.len().saturating_sub(1);
                let shape = match source {
                    Source::Plain => NodeShape::Plain,
                    Source::Lookup { .. } => {
                        stats.lookup_rounds += 1;
                        stats.lookup_tokens += accepted;
                        NodeShape::Lookup
                    }
                    Source::Drafter { .. } => {
                        stats.drafted_rounds += 1;
                        stats.drafted_tokens += accepted;
                        if tree.tree().is_chain() { NodeShape::Chain } else { NodeShape::Tree }
                    }
                };
                let chosen = Chosen { shape, nodes: tree.budget(), reason: work.reason };
                *stats.budgets.entry(tree.budget()).or_default() += 1;
                *stats.choices.entry(chosen).or_default() += 1;
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
            if let Some(prompt) = stream.prompt_logprobs.take() {
                self.events.push((stream.id, Event::Prompt(prompt.tokens)));
            }
        }
        stream.stats.completion_tokens += tokens.len();
        stream.root = tokens.last().map(|token| token.id);
        stream.history.extend(tokens.iter().map(|token| token.id));
        self.events.push((stream.id, Event::Text { text, tokens }));
        let Some(reason) = finish else { return false };
        let stats = stream.final_stats();
        self.events.push((stream.id, Event::Done { reason, stats }));
        true
    }
}

/// Reads the target's rows of a prompt chunk: every row for the prompt's log-probabilities when they are wanted, the last
/// one for the first token.
fn accept_prompt(
    stream: &mut Stream,
    count: usize,
    rows: TargetRows<'_>,
) -> crate::Result<Result<Option<Emission>, Failure>> {
    let length = stream.prompt.len();
    if let Some(wanted) = &mut stream.prompt_logprobs {
        for (index, position) in (stream.prefilled + 1..).enumerate().take(rows.len()) {
            let Some(&id) = stream.prompt.get(position) else { break };
            let TargetRow::Logits(row) = rows.row(index)? else { break };
            if argmax(&row).is_none() {
                return Ok(Err(Failure { position: position - 1, fault: Fault::NonFinite }));
            }
            let (logprob, top) = log_probs(&row, id, wanted.top);
            wanted.tokens.push(PromptToken { id, logprob: Some(logprob), top });
        }
    }
    if stream.prefilled + count < length {
        return Ok(Ok(None));
    }
    let token = stream.picker.pick(rows.row(rows.len() - 1)?, length);
    Ok(token.map(|token| Some(stream.output.push(vec![token]))))
}

fn reported(tree: &CandidateTree) -> Vec<ReportedNode> {
    let (shape, tokens) = (tree.tree(), tree.tokens());
    let node = |node: usize| ReportedNode {
        token: tokens[node],
        parent: shape.parents()[node],
        depth: shape.depths()[node],
        prob: tree.prob(node),
        log_prob: tree.joint_log_probs()[node] as f32,
    };
    (0..tokens.len()).map(node).collect()
}
