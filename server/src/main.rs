//! `canopy-server`: parse, load, serve, drain.

use std::sync::Arc;

use anyhow::Context as _;
use canopy_e2e::engine::{Engine, EngineConfig};
use canopy_e2e::loader;
use canopy_server::config::{Args, Config, DrafterChoice};
use canopy_server::engine_thread::{self, ModelInfo, Rounds, ThreadOptions};
use canopy_server::routes::unix_now;
use canopy_server::state::AppState;
use canopy_server::telemetry::{self, Metrics};
use canopy_server::shutdown;
use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    let config = Config::try_from(Args::parse())?;
    telemetry::start_logging(&config.log, config.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run(config))
}

async fn run(config: Config) -> anyhow::Result<()> {
    let listen = config.listen;
    let listener =
        tokio::net::TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    let url = format!("http://{}", listener.local_addr()?);
    let metrics = Arc::new(Metrics::new()?);
    let options = ThreadOptions {
        threads: config.threads,
        update_buffer: config.update_buffer,
        command_buffer: config.slots + config.max_waiting + 1,
    };
    let loaded = config.clone();
    let (engine, when_loaded) = engine_thread::spawn(move || load(&loaded), options, Arc::clone(&metrics))?;
    let state = AppState::new(config, engine, metrics);
    let server = tokio::spawn(shutdown::serve(listener, state.clone(), shutdown::signal()));
    when_loaded.await.unwrap_or(Err(engine_thread::StartError::Ended)).context("cannot load the model")?;
    let name = &state.engine().model().map_err(|error| anyhow::anyhow!(error.message))?.name;
    println!("canopy serves {name} on {url}");
    Ok(server.await??)
}

/// Loads the pair and starts its engine.
fn load(config: &Config) -> canopy_e2e::Result<(Box<dyn Rounds>, ModelInfo)> {
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
