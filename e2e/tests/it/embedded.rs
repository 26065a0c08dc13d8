//! Engines over the embedded pair, and its prompts.

use std::sync::Arc;

use canopy_e2e::engine::{Engine, EngineConfig, GenerateRequest, Generation, Mode, Speculation};
use canopy_e2e::loader::{LoadOptions, load};
use canopy_e2e::tokenizer::Tokenizer;

/// Every mode and budget that must not change a text.
pub const DRAFTED: [Speculation; 7] = [
    Speculation { mode: Mode::Chain, budget: None },
    Speculation { mode: Mode::Tree, budget: Some(1) },
    Speculation { mode: Mode::Tree, budget: Some(7) },
    Speculation { mode: Mode::Tree, budget: Some(15) },
    Speculation { mode: Mode::Tree, budget: Some(31) },
    Speculation { mode: Mode::Tree, budget: Some(63) },
    Speculation { mode: Mode::Auto, budget: None },
];

pub const AR: Speculation = Speculation { mode: Mode::Ar, budget: None };

/// An engine with this many slots.
pub fn engine(slots: usize, context_len: Option<usize>) -> (Engine, Arc<Tokenizer>) {
    engine_with(slots, context_len, EngineConfig::default())
}

/// The same, configured.
pub fn engine_with(
    slots: usize,
    context_len: Option<usize>,
    config: EngineConfig,
) -> (Engine, Arc<Tokenizer>) {
    let loaded = load(&LoadOptions { slots, context_len, ..LoadOptions::default() }).unwrap();
    let tokenizer = loaded.tokenizer;
    let engine = Engine::new(loaded.target, loaded.drafter, tokenizer.clone(), config).unwrap();
    assert!(engine.has_drafter());
    (engine, tokenizer)
}

/// The first `count` prompts of a kind.
pub fn prompts(kind: &str, count: usize) -> Vec<String> {
    let json: serde_json::Value =
        serde_json::from_str(include_str!("../../models/canopy-tiny/prompts.json")).unwrap();
    let of_kind = json.as_array().unwrap().iter().filter(|prompt| prompt["kind"] == kind);
    let texts: Vec<String> = of_kind.map(|p| p["text"].as_str().unwrap().to_owned()).take(count).collect();
    assert_eq!(texts.len(), count, "{kind}");
    texts
}

/// Runs the requests decoded in one way.
pub fn run(engine: &mut Engine, requests: &[GenerateRequest], speculation: Speculation) -> Vec<Generation> {
    let with = |request: &GenerateRequest| GenerateRequest { speculation, ..request.clone() };
    let got = engine.run_all(requests.iter().map(with).collect()).unwrap();
    got.into_iter().map(|generation| generation.unwrap()).collect()
}

/// Ids of a generation.
pub fn ids(generation: &Generation) -> Vec<u32> {
    generation.tokens.iter().map(|token| token.id).collect()
}
