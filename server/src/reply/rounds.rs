//! Rounds and statistics, as the page and measurements read them.

use std::collections::BTreeMap;

use canopy_e2e::engine::{Chosen, EmittedToken, RoundReport, StageTimes, StreamStats, TokenOrigin};
use canopy_e2e::tokenizer::{Detokenizer, Tokenizer};

use super::choice::Choice;
use crate::engine_thread::Update;
use crate::plan::Plan;
use crate::types::canopy::{
    CanopyStats, CanopyStep, NodeChoice, Round, RoundNode, RoundToken, StageSeconds, TokenPiece,
};

/// One update as a `canopy` event tells it.
pub(super) fn step(
    index: usize,
    tokenizer: &Tokenizer,
    pieces: &mut Detokenizer,
    update: &Update,
) -> CanopyStep {
    let piece = |token: &EmittedToken| TokenPiece {
        id: token.id,
        text: pieces.push(token.id),
        origin: match token.origin {
            TokenOrigin::Drafted => "drafted",
            TokenOrigin::Bonus => "bonus",
        },
    };
    let tokens = update.tokens.iter().map(piece).collect();
    CanopyStep { index, tokens, round: update.round.as_ref().map(|report| round(tokenizer, report)) }
}

fn round(tokenizer: &Tokenizer, report: &RoundReport) -> Round {
    let nodes = report.nodes.iter().map(|node| RoundNode {
        token: node.token,
        text: tokenizer.token_text(node.token),
        parent: node.parent,
        depth: node.depth,
        prob: node.prob,
        log_prob: node.log_prob,
    });
    Round {
        start: report.start,
        nodes: nodes.collect(),
        path: report.path.clone(),
        bonus: RoundToken { token: report.bonus, text: tokenizer.token_text(report.bonus) },
    }
}

/// Statistics over `choices`: counters are summed, seconds are those of the slowest.
pub(super) fn stats(plan: &Plan, choices: &[Choice]) -> CanopyStats {
    let request = &plan.request;
    let sum =
        |count: fn(&StreamStats) -> usize| choices.iter().map(|choice| count(&choice.stats)).sum::<usize>();
    let longest =
        |seconds: fn(&StreamStats) -> f64| choices.iter().map(|c| seconds(&c.stats)).fold(0.0, f64::max);
    let (rounds, committed) = (sum(|s| s.rounds), sum(|s| s.committed));
    let (first_token, total) = (longest(|s| s.first_token), longest(|s| s.total));
    let (decode, tokens) = (total - first_token, sum(|s| s.completion_tokens));
    let mut stages = StageTimes::default();
    choices.iter().for_each(|choice| stages += choice.stats.stages);
    let StageTimes { prefill, draft, build, verify, accept, commit } = stages;
    CanopyStats {
        mode: request.speculation.mode.name(),
        budget: request.speculation.budget,
        seed: request.sampling.seed as i64,
        rounds,
        nodes: sum(|s| s.nodes),
        committed,
        acceptance_length: committed as f64 / rounds.max(1) as f64,
        drafted_tokens: choices.iter().map(|choice| choice.drafted).sum(),
        bonus_tokens: choices.iter().map(|choice| choice.bonus).sum(),
        first_token_seconds: first_token,
        total_seconds: total,
        tokens_per_second: if decode > 0.0 {
            tokens.saturating_sub(choices.len()) as f64 / decode
        } else {
            0.0
        },
        stage_seconds: StageSeconds { prefill, draft, build, verify, accept, commit },
        node_choices: node_choices(choices),
    }
}

fn node_choices(choices: &[Choice]) -> Vec<NodeChoice> {
    let mut all = BTreeMap::new();
    for (&chosen, &rounds) in choices.iter().flat_map(|choice| &choice.stats.choices) {
        *all.entry(chosen).or_insert(0) += rounds;
    }
    let choice = |(Chosen { shape, nodes, reason }, rounds)| NodeChoice {
        shape: shape.name(),
        nodes,
        reason: reason.name(),
        rounds,
    };
    all.into_iter().map(choice).collect()
}
