//! `canopy-server`: parse, load, serve, drain.

use std::sync::Arc;

use anyhow::Context as _;
use canopy_server::config::{Args, Config};
use canopy_server::engine_thread::{self, ThreadOptions};
use canopy_server::pair;
use canopy_server::shutdown;
use canopy_server::state::AppState;
use canopy_server::telemetry::{self, Metrics};
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
    let (engine, when_loaded) =
        engine_thread::spawn(move || pair::load(&loaded), options, Arc::clone(&metrics))?;
    let state = AppState::new(config, engine, metrics);
    let server = tokio::spawn(shutdown::serve(listener, state.clone(), shutdown::signal()));
    when_loaded.await.unwrap_or(Err(engine_thread::StartError::Ended)).context("cannot load the model")?;
    let name = &state.engine().model().map_err(|error| anyhow::anyhow!(error.message))?.name;
    println!("canopy serves {name} on {url}");
    Ok(server.await??)
}
