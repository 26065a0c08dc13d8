//! Logs, and the counters behind `/metrics`.

mod metrics;
mod process;

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;
pub use metrics::Metrics;

/// A log filter that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("--log: {0}")]
pub struct LogError(String);

/// Starts logging to stderr. A line that cannot be written (a full disk behind stderr) is lost and nothing else.
pub fn start_logging(filter: &str, format: LogFormat) -> Result<(), LogError> {
    let filter = EnvFilter::try_new(filter).map_err(|error| LogError(error.to_string()))?;
    // The subscriber reports its own errors with eprintln, which panics when stderr is what fails.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false);
    let started = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| LogError(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_is_an_error() {
        assert!(start_logging("canopy=loudest", LogFormat::Text).is_err());
    }
}
