//! Truth: every prefix of candidates is listed and sorted as the page says. For drafts of few candidates.

use super::Draft;
use crate::top_tokens::{Row, row_words};

/// A prefix: its joint log-probability, its ranks and its tokens, root left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    /// The sum in path order.
    pub joint: f64,
    /// One a depth.
    pub ranks: Vec<u32>,
    /// One a depth.
    pub tokens: Vec<u32>,
}

/// The `budget` best prefixes of a draft, best first; fewer where there are no more.
pub fn prefixes(k: usize, best: &[u32], draft: Draft, stated: Option<&[f64]>, budget: usize) -> Vec<Prefix> {
    let mut all: Vec<Prefix> = Vec::new();
    let mut layer = vec![Prefix { joint: 0.0, ranks: Vec::new(), tokens: Vec::new() }];
    for depth in 0..draft.depths {
        let row = Row::new(&best[(draft.first + depth) * row_words(k)..][..row_words(k)]).expect("a row");
        if !row.is_distribution() {
            break;
        }
        let (best, ln_sum) =
            (row.best().next().map_or(0.0, |best| f64::from(best.1)), f64::from(row.ln_sum()));
        let extended = |prefix: &Prefix| {
            let of_rank = |(rank, (token, logit)): (usize, (u32, f32))| Prefix {
                joint: prefix.joint
                    + stated.map_or((f64::from(logit) - best - ln_sum).min(0.0), |ln| ln[depth * k + rank]),
                ranks: [prefix.ranks.as_slice(), &[rank as u32]].concat(),
                tokens: [prefix.tokens.as_slice(), &[token]].concat(),
            };
            let possible = row.best().enumerate().filter(|(_, (_, logit))| *logit > f32::NEG_INFINITY);
            possible.map(of_rank).collect::<Vec<_>>()
        };
        layer = layer.iter().flat_map(extended).collect();
        all.extend(layer.iter().cloned());
    }
    all.sort_by(|a, b| b.joint.partial_cmp(&a.joint).expect("no NaN").then_with(|| a.ranks.cmp(&b.ranks)));
    all.truncate(budget);
    all
}
