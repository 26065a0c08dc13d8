//! From the configuration to a running engine over its target and drafter.

use std::sync::Arc;

use canopy_e2e::engine::{Engine, EngineConfig};
use canopy_e2e::loader;

use crate::config::{Config, DrafterChoice};
use crate::engine_thread::{ModelInfo, Rounds};
use crate::routes::unix_now;

/// Loads the pair and starts its engine.
///
/// # Errors
/// The loader's and the engine's.
pub fn load(config: &Config) -> canopy_e2e::Result<(Box<dyn Rounds>, ModelInfo)> {
    let mut pair = loader::load(&config.load_options())?;
    if config.drafter == DrafterChoice::None {
        pair.drafter = None;
    }
    let info = ModelInfo {
        name: pair.name,
        vocab_size: pair.target.vocab_size(),
        context_len: pair.target.context_len(),
        has_drafter: pair.drafter.is_some(),
        tokenizer: Arc::clone(&pair.tokenizer),
        created: unix_now(),
    };
    let engine = EngineConfig {
        prefill_chunk: config.prefill_chunk,
        // The queue at the door is the limit; the engine only has to be no stricter.
        max_waiting: config.slots + config.max_waiting,
        default_budget: config.budget,
        ..EngineConfig::default()
    };
    Ok((Box::new(Engine::new(pair.target, pair.drafter, pair.tokenizer, engine)?), info))
}
