//! What was typed ([`Args`]) and what is meant ([`Config`]); every check is in the one conversion.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use canopy_e2e::loader::{LoadOptions, ModelSource, WeightDtype};
use serde::Serialize;

/// Most non-root nodes of one draft tree: a tree has at most 256 nodes, root included.
pub const MAX_BUDGET: usize = 255;

/// Command line and environment.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "canopy-server", version, about = "OpenAI-compatible server with tree speculative decoding")]
pub struct Args {
    /// Address to listen on.
    #[arg(long, env = "CANOPY_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, env = "CANOPY_PORT", default_value_t = 8080)]
    pub port: u16,
    /// Target: `embedded`, a directory in Hugging Face layout, or `owner/name` on the hub.
    #[arg(long, env = "CANOPY_MODEL", default_value = "embedded")]
    pub model: String,
    /// Drafter: `auto` (the embedded one with the embedded target, else none), `none`, `embedded`, a directory or `owner/name`.
    #[arg(long, env = "CANOPY_DRAFTER", default_value = "auto")]
    pub drafter: String,
    /// How weights are kept.
    #[arg(long, env = "CANOPY_DTYPE", value_enum, default_value_t = DtypeArg::Stored)]
    pub dtype: DtypeArg,
    /// Where the model runs: `cpu`, `cuda` or `cuda:N`.
    #[arg(long, env = "CANOPY_DEVICE", default_value = "cpu")]
    pub device: String,
    /// Streams that run at once.
    #[arg(long, env = "CANOPY_SLOTS", default_value_t = 4)]
    pub slots: usize,
    /// Streams that may wait for a slot; one more is answered 429.
    #[arg(long, env = "CANOPY_MAX_WAITING", default_value_t = 64)]
    pub max_waiting: usize,
    /// Context to allocate per slot, in tokens; the model's own when left out.
    #[arg(long, env = "CANOPY_CONTEXT_LEN")]
    pub context_len: Option<usize>,
    /// Compute threads; the machine's parallelism when left out.
    #[arg(long, env = "CANOPY_THREADS")]
    pub threads: Option<usize>,
    /// Prompt tokens per prefill chunk.
    #[arg(long, env = "CANOPY_PREFILL_CHUNK", default_value_t = 128)]
    pub prefill_chunk: usize,
    /// Node budget of tree mode when a request names none.
    #[arg(long, env = "CANOPY_BUDGET", default_value_t = 16)]
    pub budget: usize,
    /// max_tokens of a request that names none.
    #[arg(long, env = "CANOPY_DEFAULT_MAX_TOKENS", default_value_t = 256)]
    pub default_max_tokens: usize,
    /// Largest request body in bytes; a larger one is answered 413.
    #[arg(long, env = "CANOPY_BODY_LIMIT", default_value_t = 2 << 20)]
    pub body_limit: usize,
    /// Seconds that running streams get to finish after Ctrl-C or SIGTERM.
    #[arg(long, env = "CANOPY_DRAIN_TIMEOUT", default_value_t = 30)]
    pub drain_timeout: u64,
    /// Bearer key that /v1 asks for; no key is asked for when left out.
    #[arg(long, env = "CANOPY_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Never ask the network for a model.
    #[arg(long, env = "CANOPY_OFFLINE")]
    pub offline: bool,
    /// Log lines as text or as JSON.
    #[arg(long, env = "CANOPY_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log filter, as in `info,canopy_e2e=debug`.
    #[arg(long, env = "CANOPY_LOG", default_value = "info")]
    pub log: String,
}

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DtypeArg {
    /// As stored in the file.
    Stored,
    /// Rounded to bf16.
    Bf16,
    /// Widened to f32.
    F32,
}

/// Shape of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
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
    /// Where the model runs.
    pub device: String,
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
    /// What running streams get to finish.
    pub drain_timeout: Duration,
    /// Longest wait for a request body.
    pub body_timeout: Duration,
    /// Updates a stream may be ahead of its reader before it is ended.
    pub update_buffer: usize,
    /// A step longer than this makes `/health` fail.
    pub stall_after: Duration,
    /// Bearer key, if one is asked for.
    pub api_key: Option<String>,
    /// Never ask the network.
    pub offline: bool,
    /// Shape of the log lines.
    pub log_format: LogFormat,
    /// Log filter.
    pub log: String,
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
        let api_key = args.api_key.filter(|key| !key.is_empty());
        if api_key.as_ref().is_some_and(|key| key.trim() != key) {
            return Err(ConfigError {
                argument: "api-key",
                expected: "a key without spaces around it".into(),
                got: "a key with spaces around it".into(),
            });
        }
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
            device: args.device,
            slots: in_range("slots", args.slots, 1, 1024)?,
            max_waiting: in_range("max-waiting", args.max_waiting, 0, 1 << 20)?,
            context_len: args.context_len,
            threads: in_range("threads", args.threads.unwrap_or(parallelism), 1, 1024)?,
            prefill_chunk: in_range("prefill-chunk", args.prefill_chunk, 1, MAX_BUDGET + 1)?,
            budget: in_range("budget", args.budget, 0, MAX_BUDGET)?,
            default_max_tokens: in_range("default-max-tokens", args.default_max_tokens, 1, 1 << 24)?,
            body_limit: in_range("body-limit", args.body_limit, 1024, 1 << 30)?,
            drain_timeout: Duration::from_secs(args.drain_timeout),
            body_timeout: Duration::from_secs(30),
            update_buffer: 4096,
            stall_after: Duration::from_secs(120),
            api_key,
            offline: args.offline,
            log_format: args.log_format,
            log: args.log,
        })
    }
}

impl Config {
    /// The loader's options.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            target: self.model.clone(),
            drafter: match &self.drafter {
                DrafterChoice::Source(source) => Some(source.clone()),
                DrafterChoice::Auto | DrafterChoice::None => None,
            },
            dtype: match self.dtype {
                DtypeArg::Stored => WeightDtype::Stored,
                DtypeArg::Bf16 => WeightDtype::Bf16,
                DtypeArg::F32 => WeightDtype::F32,
            },
            slots: self.slots,
            context_len: self.context_len,
            offline: self.offline,
            device: self.device.clone(),
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
    fn an_empty_key_is_no_key_and_a_padded_one_is_refused() {
        assert_eq!(config(&["--api-key", ""]).unwrap().api_key, None);
        assert!(config(&["--api-key", " k"]).is_err());
    }
}
