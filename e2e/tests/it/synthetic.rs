//! Synthetic acceptance through the engine: the stated mean, the same runs from the same seed, real rounds around it.

use canopy_e2e::Error;
use canopy_e2e::engine::{
    EngineConfig, GenerateRequest, Generation, Mode, Penalties, Sampling, Speculation, SyntheticAcceptance,
};

use crate::toy::{Toy, hashed};

const VOCAB: usize = 20;
/// The toy drafter's block of 8.
const HORIZON: usize = 7;
const TOKENS: usize = 1500;

fn toy(model: &SyntheticAcceptance) -> Toy {
    let mut toy = Toy::new(VOCAB);
    (toy.slots, toy.context) = (2, TOKENS + 100);
    toy.config = EngineConfig { synthetic: Some(model.clone()), ..EngineConfig::default() };
    toy
}

fn run(model: &SyntheticAcceptance, mode: Mode) -> Vec<Generation> {
    let (mut engine, log) = toy(model).engine();
    let request = |seed| GenerateRequest {
        sampling: Sampling { seed, ..Sampling::default() },
        speculation: Speculation { mode, budget: None },
        report_rounds: true,
        ..GenerateRequest::new(vec![1, 2, 3], TOKENS)
    };
    let results = engine.run_all((0..4).map(request).collect()).unwrap();
    let generations: Vec<Generation> = results.into_iter().map(Result::unwrap).collect();
    // What was committed is what was told: the toy drafter refuses features of anything else.
    assert!(log.lock().unwrap().commits.len() > 100);
    generations
}

fn length(generations: &[Generation]) -> f64 {
    let sum = |count: fn(&Generation) -> usize| generations.iter().map(count).sum::<usize>() as f64;
    sum(|generation| generation.stats.committed) / sum(|generation| generation.stats.rounds)
}

#[test]
fn chains_have_the_stated_mean_and_trees_more() {
    for stated in [2.0, 4.0, 6.0] {
        let model = SyntheticAcceptance::from_length(stated, HORIZON).unwrap();
        let chain = length(&run(&model, Mode::Chain));
        assert!((chain - stated).abs() < 0.25, "{stated}: {chain}");
        let tree = length(&run(&model, Mode::Tree));
        assert!(tree > chain, "{stated}: {tree}, chain {chain}");
        assert_eq!(length(&run(&model, Mode::Ar)), 1.0);
    }
}

#[test]
fn runs_repeat_and_seeds_differ() {
    let model = SyntheticAcceptance::from_curve(vec![0.8, 0.7, 0.6]).unwrap();
    for mode in [Mode::Chain, Mode::Tree] {
        let paths = |generations: &[Generation]| {
            let rounds = generations.iter().flat_map(|generation| &generation.rounds);
            rounds.map(|round| round.path.clone()).collect::<Vec<_>>()
        };
        let tokens = |generations: &[Generation]| {
            let tokens = generations.iter().flat_map(|generation| &generation.tokens);
            tokens.map(|token| token.id).collect::<Vec<_>>()
        };
        let (first, second) = (run(&model, mode), run(&model, mode));
        assert_eq!((paths(&first), tokens(&first)), (paths(&second), tokens(&second)), "{mode}");
        assert_ne!(paths(&first), paths(&run(&model.clone().with_seed(1), mode)), "{mode}");
    }
}

#[test]
fn the_bonus_is_the_targets_own_and_the_rest_the_drafters() {
    let model = SyntheticAcceptance::from_length(3.0, HORIZON).unwrap();
    let generation = run(&model, Mode::Tree).remove(0);
    let mut text: Vec<u32> = vec![1, 2, 3];
    text.extend(generation.tokens.iter().map(|token| token.id));
    let mut own = 0;
    for round in &generation.rounds {
        let drafted: Vec<u32> = round.path.iter().map(|&node| round.nodes[node].token).collect();
        assert_eq!(drafted, text[round.start..round.start + drafted.len()]);
        let end = round.start + drafted.len();
        let Some(&bonus) = text.get(end) else { continue };
        assert_eq!(bonus, crate::toy::best(&hashed(&text[..end], VOCAB)));
        own += 1;
    }
    assert!(own > 300, "{own}");
}

#[test]
fn auto_drafts_where_the_stated_acceptance_pays_and_not_where_it_does_not() {
    let share = |curve: Vec<f64>| {
        let generations = run(&SyntheticAcceptance::from_curve(curve).unwrap(), Mode::Auto);
        let looked_up: usize = generations.iter().map(|generation| generation.stats.lookup_rounds).sum();
        assert_eq!(looked_up, 0, "a stream's own text says nothing here");
        let drafted: usize = generations.iter().map(|generation| generation.stats.drafted_rounds).sum();
        drafted as f64 / generations.iter().map(|generation| generation.stats.rounds).sum::<usize>() as f64
    };
    assert!(share(vec![0.0]) < 0.3);
}

#[test]
fn what_changes_the_targets_rows_is_refused() {
    let model = SyntheticAcceptance::from_length(3.0, HORIZON).unwrap();
    let (mut engine, _) = toy(&model).engine();
    let penalties = Penalties { repetition: 1.2, ..Penalties::default() };
    let request = GenerateRequest { penalties, ..GenerateRequest::new(vec![1], 4) };
    assert!(matches!(engine.submit(request), Err(Error::Request { field: "request", .. })));
    assert!(engine.submit(GenerateRequest::new(vec![1], 4)).is_ok());
}
