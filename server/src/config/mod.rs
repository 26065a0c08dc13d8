//! What was typed ([`Args`]) and what is meant ([`Config`]); every check is in the one conversion.

mod args;
mod file;
mod keys;

use std::net::SocketAddr;
use std::time::Duration;

use canopy_e2e::engine::EngineConfig;
use canopy_e2e::loader::{LoadOptions, ModelSource, RowPrecision};

pub use args::{Args, DtypeArg, LogFormat, RowsArg};
pub use file::{FileError, ParseError, parse};

/// Most non-root nodes of one draft tree: a tree has at most 256 nodes, root included.
pub const MAX_BUDGET: usize = 255;

/// Which other sites' pages may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cors {
    /// None.
    Off,
    /// All.
    Any,
    /// These.
    Origins(Vec<String>),
}

/// Which drafter is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrafterChoice {
    /// The loader's own rule.
    Auto,
    /// No drafter, whatever the target.
    None,
    /// This one.
    Source(ModelSource),
}

/// What the server runs with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The target.
    pub model: ModelSource,
    /// The drafter.
    pub drafter: DrafterChoice,
    /// How weights are kept.
    pub dtype: DtypeArg,
    /// How the drafter's weights are kept; `None` takes int8 on CUDA, else the target's.
    pub drafter_dtype: Option<DtypeArg>,
    /// Where the model runs.
    pub device: String,
    /// What rows are rounded to before products on CUDA.
    pub rows: RowsArg,
    /// Streams that run at once.
    pub slots: usize,
    /// Streams that may wait.
    pub max_waiting: usize,
    /// Context per slot.
    pub context_len: Option<usize>,
    /// Compute threads.
    pub threads: usize,
    /// Prompt tokens per prefill chunk.
    pub prefill_chunk: usize,
    /// Default node budget.
    pub budget: usize,
    /// max_tokens of a request that names none.
    pub default_max_tokens: usize,
    /// Largest request body in bytes.
    pub body_limit: usize,
    /// Open connections.
    pub max_connections: usize,
    /// Longest wait for a request's head.
    pub header_timeout: Duration,
    /// Longest wait for a request body.
    pub body_timeout: Duration,
    /// Longest generation.
    pub request_timeout: Option<Duration>,
    /// Longest silence of a stream.
    pub keep_alive: Duration,
    /// What running streams get to finish.
    pub drain_timeout: Duration,
    /// Updates a stream may be ahead of its reader before it is ended.
    pub update_buffer: usize,
    /// A step longer than this makes `/health` fail.
    pub stall_after: Duration,
    /// Memory for saved prefixes.
    pub cache_bytes: usize,
    /// Bearer keys; none is asked for when there are none.
    pub api_keys: Vec<String>,
    /// Which other sites' pages may ask.
    pub cors: Cors,
    /// Never ask the network.
    pub offline: bool,
    /// Replay recorded CUDA graphs.
    pub graphs: bool,
    /// Shape of the log lines.
    pub log_format: LogFormat,
    /// Log filter.
    pub log: String,
    /// What was typed, keys left out.
    pub typed: Args,
}

/// An argument that cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{argument}: expected {expected}, got {got}")]
pub struct ConfigError {
    argument: &'static str,
    expected: String,
    got: String,
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
        let api_keys = keys::keys(&args)?;
        if let Some(context_len) = args.context_len {
            in_range("context-len", context_len, 2, 1 << 24)?;
        }
        Ok(Self {
            listen: SocketAddr::new(args.host, args.port),
            model: model_source("model", &args.model)?,
            drafter: match args.drafter.as_str() {
                "auto" => DrafterChoice::Auto,
                "none" => DrafterChoice::None,
                name => DrafterChoice::Source(model_source("drafter", name)?),
            },
            dtype: args.dtype,
            drafter_dtype: args.drafter_dtype,
            device: args.device.clone(),
            rows: args.rows,
            slots: in_range("slots", args.slots, 1, 1024)?,
            max_waiting: in_range("max-waiting", args.max_waiting, 0, 1 << 20)?,
            context_len: args.context_len,
            threads: in_range("threads", args.threads.unwrap_or(parallelism), 1, 1024)?,
            prefill_chunk: prefill_chunk(&args)?,
            budget: in_range("budget", args.budget, 0, MAX_BUDGET)?,
            default_max_tokens: in_range("default-max-tokens", args.default_max_tokens, 1, 1 << 24)?,
            body_limit: in_range("body-limit", args.body_limit, 1024, 1 << 30)?,
            max_connections: in_range("max-connections", args.max_connections, 1, 1 << 20)?,
            header_timeout: seconds("header-timeout", args.header_timeout, 1)?,
            body_timeout: seconds("body-timeout", args.body_timeout, 1)?,
            request_timeout: match seconds("request-timeout", args.request_timeout, 0)? {
                Duration::ZERO => None,
                limit => Some(limit),
            },
            keep_alive: seconds("keep-alive", args.keep_alive, 1)?,
            drain_timeout: seconds("drain-timeout", args.drain_timeout, 0)?,
            update_buffer: 4096,
            stall_after: Duration::from_secs(120),
            cache_bytes: in_range("cache-mib", args.cache_mib, 0, 1 << 20)? << 20,
            api_keys,
            cors: cors(&args.cors_origin)?,
            offline: args.offline,
            graphs: !args.no_graphs,
            log_format: args.log_format,
            log: args.log.clone(),
            typed: Args { api_key: Vec::new(), ..args },
        })
    }
}

impl Config {
    /// The engine's limits.
    pub fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            prefill_chunk: self.prefill_chunk,
            // The queue at the door is the limit; the engine only has to be no stricter.
            max_waiting: self.slots + self.max_waiting,
            default_budget: self.budget,
            cache_bytes: self.cache_bytes,
            ..EngineConfig::on(&self.device)
        }
    }

    /// The loader's options.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            target: self.model.clone(),
            drafter: match &self.drafter {
                DrafterChoice::Source(source) => Some(source.clone()),
                DrafterChoice::Auto | DrafterChoice::None => None,
            },
            dtype: self.dtype.into(),
            drafter_dtype: self.drafter_dtype.map(Into::into),
            slots: self.slots,
            context_len: self.context_len,
            offline: self.offline,
            device: self.device.clone(),
            rows: match self.rows {
                RowsArg::Bf16 => RowPrecision::Bf16,
                RowsArg::F32 => RowPrecision::F32,
            },
            graphs: self.graphs,
            ..LoadOptions::default()
        }
    }
}

fn in_range(argument: &'static str, value: usize, low: usize, high: usize) -> Result<usize, ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    Err(ConfigError { argument, expected: format!("{low} to {high}"), got: value.to_string() })
}

/// Prompt tokens of a chunk: few beside the streams that decode, or whole slices in passes of their own.
fn prefill_chunk(args: &Args) -> Result<usize, ConfigError> {
    const SLICE: usize = MAX_BUDGET + 1;
    let rows = args.prefill_chunk.unwrap_or(EngineConfig::on(&args.device).prefill_chunk);
    match rows {
        1..=SLICE => Ok(rows),
        _ if rows.is_multiple_of(SLICE) => in_range("prefill-chunk", rows, 1, EngineConfig::MAX_PREFILL),
        _ => Err(ConfigError {
            argument: "prefill-chunk",
            expected: format!("1 to {SLICE}, or a multiple of it"),
            got: rows.to_string(),
        }),
    }
}

fn seconds(argument: &'static str, value: u64, low: usize) -> Result<Duration, ConfigError> {
    const DAY: usize = 24 * 3600;
    let value = in_range(argument, usize::try_from(value).unwrap_or(usize::MAX), low, DAY)?;
    Ok(Duration::from_secs(value as u64))
}

fn cors(origins: &[String]) -> Result<Cors, ConfigError> {
    let is_origin = |origin: &str| {
        let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        rest.is_some_and(|host| !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic() && b != b'/'))
    };
    match origins {
        [] => Ok(Cors::Off),
        [all] if all == "*" => Ok(Cors::Any),
        origins => match origins.iter().find(|origin| !is_origin(origin)) {
            None => Ok(Cors::Origins(origins.to_vec())),
            Some(bad) => Err(ConfigError {
                argument: "cors-origin",
                expected: "`*` alone, or scheme and host as in https://example.org".into(),
                got: format!("`{bad}`"),
            }),
        },
    }
}

fn model_source(argument: &'static str, name: &str) -> Result<ModelSource, ConfigError> {
    name.parse().map_err(|_| ConfigError {
        argument,
        expected: "`embedded`, an existing directory or `owner/name`".into(),
        got: format!("`{name}`"),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn config(args: &[&str]) -> Result<Config, ConfigError> {
        Config::try_from(Args::parse_from(std::iter::once(&"canopy-server").chain(args)))
    }

    #[test]
    fn the_defaults_are_the_embedded_pair_on_port_8080() {
        let config = config(&[]).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
        assert_eq!((config.model, config.drafter), (ModelSource::Embedded, DrafterChoice::Auto));
    }

    #[test]
    fn a_model_is_embedded_a_directory_or_a_hub_name() {
        assert_eq!(config(&["--model", "."]).unwrap().model, ModelSource::Directory(".".into()));
        assert_eq!(
            config(&["--model", "Qwen/Qwen3.5-9B"]).unwrap().model,
            ModelSource::Hub("Qwen/Qwen3.5-9B".into())
        );
        assert_eq!(config(&["--drafter", "none"]).unwrap().drafter, DrafterChoice::None);
        for bad in ["", "/no/such/directory", "a/b/c", "../x", "name with space/x"] {
            let message = config(&["--model", bad]).unwrap_err().to_string();
            assert!(message.starts_with("--model: expected `embedded`"), "{message}");
        }
    }

    #[test]
    fn a_number_out_of_range_is_named() {
        for (argument, value) in
            [("--slots", "0"), ("--threads", "0"), ("--budget", "256"), ("--prefill-chunk", "0")]
        {
            let message = config(&[argument, value]).unwrap_err().to_string();
            assert!(message.starts_with(argument) && message.ends_with(&format!("got {value}")), "{message}");
        }
    }

    #[test]
    fn an_origin_is_a_scheme_and_a_host() {
        assert_eq!(config(&[]).unwrap().cors, Cors::Off);
        assert_eq!(config(&["--cors-origin", "*"]).unwrap().cors, Cors::Any);
        let two = config(&["--cors-origin", "https://a.org,http://b:80"]).unwrap().cors;
        assert_eq!(two, Cors::Origins(vec!["https://a.org".into(), "http://b:80".into()]));
        for bad in ["a.org", "https://", "https://a.org/", "*,https://a.org"] {
            assert!(config(&["--cors-origin", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn rows_and_device_reach_the_loader() {
        let options = config(&[]).unwrap().load_options();
        assert_eq!((options.device.as_str(), options.rows), ("cpu", RowPrecision::Bf16));
        let options = config(&["--device", "cuda:1", "--rows", "f32"]).unwrap().load_options();
        assert_eq!((options.device.as_str(), options.rows), ("cuda:1", RowPrecision::F32));
    }

    #[test]
    fn no_request_timeout_is_0() {
        assert_eq!(config(&["--request-timeout", "0"]).unwrap().request_timeout, None);
        assert_eq!(config(&[]).unwrap().request_timeout, Some(Duration::from_secs(600)));
    }
}
