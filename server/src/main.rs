//! `canopy-server`: parse, load, serve, drain.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use canopy_server::config::{self, Config, ParseError};
use canopy_server::engine_thread::{self, StartError, ThreadOptions};
use canopy_server::state::AppState;
use canopy_server::telemetry::{self, Metrics};
use canopy_server::{pair, serve, shutdown};

/// Exit code after a second signal, as shells have it for Ctrl-C.
const INTERRUPTED: i32 = 130;

/// A pass allocates and frees its activations; this allocator keeps their pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = match config::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(ParseError::Usage(usage)) => canopy_e2e::usage::refuse(usage),
        Err(error) => return failed(&error.into()),
    };
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// One line, whatever the error was made of.
fn failed(error: &anyhow::Error) -> ExitCode {
    let line = format!("{error:#}").replace('\n', " ");
    // Nobody is left to tell when stderr cannot be written.
    let _ = writeln!(std::io::stderr(), "canopy-server: {line}");
    ExitCode::FAILURE
}

fn start(args: config::Args) -> anyhow::Result<()> {
    let config = Config::try_from(args)?;
    telemetry::start_logging(&config.log, config.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(run(config));
    // The engine's thread may be within a step; nothing waits for it.
    runtime.shutdown_background();
    served
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
    tracing::info!(config = ?config.typed, "starting");
    let loaded = config.clone();
    let (engine, when_loaded) =
        engine_thread::spawn(move || pair::load(&loaded), options, Arc::clone(&metrics))?;
    let state = AppState::new(config, engine, metrics);
    let stop = async {
        shutdown::signal().await;
        tokio::spawn(async {
            shutdown::signal().await;
            tracing::warn!("a second signal: exit at once");
            std::process::exit(INTERRUPTED);
        });
    };
    let server = tokio::spawn(serve::serve(listener, state.clone(), stop));
    when_loaded.await.unwrap_or(Err(StartError::Ended)).context("cannot load the model")?;
    let name = &state.engine().model().map_err(|error| anyhow::anyhow!(error.message))?.name;
    // Whoever started the server may have closed its stdout.
    let _ = writeln!(std::io::stdout(), "canopy serves {name} on {url}");
    Ok(server.await??)
}
