//! From the configuration to a running engine over its target and drafter.

use std::sync::Arc;

use canopy_e2e::constrain::Compiler;
use canopy_e2e::engine::Engine;
use canopy_e2e::loader;

use crate::config::{Config, DrafterChoice};
use crate::engine_thread::{ModelInfo, Rounds};
use crate::routes::unix_now;
use crate::self_check;

/// Loads the pair, starts its engine and lets it generate once.
///
/// # Errors
/// The loader's, the engine's and the self-check's.
pub fn load(config: &Config) -> canopy_e2e::Result<(Box<dyn Rounds>, ModelInfo)> {
    let mut pair = loader::load(&config.load_options())?;
    if config.drafter == DrafterChoice::None {
        pair.drafter = None;
    }
    let mut info = ModelInfo {
        name: pair.name,
        vocab_size: pair.target.vocab_size(),
        context_len: pair.target.context_len(),
        has_drafter: pair.drafter.is_some(),
        tokenizer: Arc::clone(&pair.tokenizer),
        grammars: Compiler::new(Arc::clone(&pair.tokenizer) as _),
        created: unix_now(),
        self_check: String::new(),
    };
    let mut engine = Engine::new(pair.target, pair.drafter, pair.tokenizer, config.engine_config())?;
    info.self_check = self_check::run(&mut engine, &info)?;
    Ok((Box::new(engine), info))
}
