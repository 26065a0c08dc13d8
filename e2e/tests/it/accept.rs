//! Sampled text through draft trees follows the target's distribution.
//!
//! A target over five tokens whose distribution depends on the last two is sampled 200,000 times with different seeds.
//! The first four tokens (one from the prompt, three through draft trees) fall into 625 cells whose exact
//! probabilities are products of softmaxes; Pearson's statistic over the cells must stay below its 1e-4 quantile. The
//! drafter is right often and wrong often, so all of accepted nodes, bonus tokens and rejections contribute.

use canopy_e2e::engine::{Engine, GenerateRequest, Mode, Sampling, Speculation};

use crate::toy::{Toy, hashed};

const VOCAB: usize = 5;
const TOKENS: usize = 4;
const PROMPT: [u32; 2] = [3, 1];

/// Probabilities after `history` under temperature, top-k and top-p, written down independently of the engine.
fn probabilities(history: &[u32], sampling: &Sampling) -> Vec<f64> {
    let logits = hashed(history, VOCAB);
    let weights: Vec<f64> = logits.iter().map(|&x| f64::from(x / sampling.temperature).exp()).collect();
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let sum: f64 = order.iter().map(|&id| weights[id]).sum();
    let mut kept = [0.0; VOCAB];
    let mut mass = 0.0;
    for id in order {
        if mass < f64::from(sampling.top_p) {
            kept[id] = weights[id];
            mass += weights[id] / sum;
        }
    }
    let sum: f64 = kept.iter().sum();
    kept.iter().map(|weight| weight / sum).collect()
}

/// Exact probability of every text of [`TOKENS`] tokens, in base-[`VOCAB`] order.
fn exact(sampling: &Sampling) -> Vec<f64> {
    let mut cells = vec![(PROMPT.to_vec(), 1.0)];
    for _ in 0..TOKENS {
        cells = cells
            .into_iter()
            .flat_map(|(history, p)| {
                let next = probabilities(&history, sampling);
                (0..VOCAB).map(move |id| ([history.as_slice(), &[id as u32]].concat(), p * next[id]))
            })
            .collect();
    }
    cells.into_iter().map(|(_, p)| p).collect()
}

fn sample(engine: &mut Engine, speculation: Speculation, sampling: Sampling, draws: u64) -> Vec<usize> {
    let mut counts = vec![0; VOCAB.pow(TOKENS as u32)];
    for first in (0..draws).step_by(1000) {
        let request = |seed| GenerateRequest {
            sampling: Sampling { seed, ..sampling },
            speculation,
            ..GenerateRequest::new(PROMPT.to_vec(), TOKENS)
        };
        let requests = (first..(first + 1000).min(draws)).map(request).collect();
        for generation in engine.run_all(requests).unwrap() {
            let tokens = generation.unwrap().tokens;
            counts[tokens.iter().fold(0, |cell, token| cell * VOCAB + token.id as usize)] += 1;
        }
    }
    counts
}

/// Pearson's statistic and its degrees of freedom; a sample in a cell of probability 0 fails.
fn chi_square(counts: &[usize], exact: &[f64]) -> (f64, f64) {
    let draws: f64 = counts.iter().sum::<usize>() as f64;
    let (mut statistic, mut cells) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(exact) {
        if p < 1e-12 {
            assert_eq!(count, 0, "a token that the truncation removed was emitted");
            continue;
        }
        assert!(draws * p > 5.0, "the cells are too small for the test");
        statistic += (count as f64 - draws * p).powi(2) / (draws * p);
        cells += 1.0;
    }
    (statistic, cells - 1.0)
}

/// The 1 - 1e-4 quantile of chi-square (Wilson and Hilferty).
fn quantile(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 3.719 * spread.sqrt()).powi(3)
}

fn toy_engine() -> Engine {
    let mut toy = Toy::new(VOCAB);
    toy.slots = 16;
    toy.config.max_waiting = 1000;
    toy.engine().0
}

#[test]
fn two_hundred_thousand_samples_follow_the_target_in_every_mode() {
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let exact = exact(&sampling);
    let mut first = None;
    for (mode, budget) in [
        (Mode::Tree, Some(6)),
        (Mode::Ar, None),
        (Mode::Chain, None),
        (Mode::Tree, Some(2)),
        (Mode::Auto, None),
    ] {
        let counts = sample(&mut toy_engine(), Speculation { mode, budget }, sampling, 200_000);
        let (statistic, freedom) = chi_square(&counts, &exact);
        assert!(statistic < quantile(freedom), "{mode}: {statistic} over {freedom}");
        // The same seeds: the very same texts in every mode.
        assert_eq!(first.get_or_insert_with(|| counts.clone()), &counts, "{mode}");
    }
}

#[test]
fn truncated_distributions_are_followed_too() {
    for sampling in [
        Sampling { temperature: 1.4, top_k: 3, ..Sampling::default() },
        Sampling { temperature: 0.8, top_p: 0.7, ..Sampling::default() },
    ] {
        let speculation = Speculation { mode: Mode::Tree, budget: Some(6) };
        let counts = sample(&mut toy_engine(), speculation, sampling, 100_000);
        let (statistic, freedom) = chi_square(&counts, &exact(&sampling));
        assert!(statistic < quantile(freedom), "{sampling:?}: {statistic} over {freedom}");
    }
}

#[test]
fn a_wrong_distribution_is_told_apart() {
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let counts =
        sample(&mut toy_engine(), Speculation { mode: Mode::Tree, budget: Some(6) }, sampling, 100_000);
    let (statistic, freedom) = chi_square(&counts, &exact(&Sampling { temperature: 1.1, ..sampling }));
    assert!(statistic > quantile(freedom), "{statistic} over {freedom}");
}
