//! What was typed: the command line and the environment.

use std::net::IpAddr;
use std::path::PathBuf;

use canopy_e2e::loader::WeightDtype;
use serde::Serialize;
use utoipa::ToSchema;

const EXAMPLES: &str = r#"Examples:
  canopy-server
  canopy-server --slots 8 --max-waiting 256 --api-key secret --log-format json
  CANOPY_SLOTS=2 canopy-server --model embedded --drafter none --context-len 512

and from another terminal:
  curl http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' -d '{"prompt": "def add(a, b):", "max_tokens": 32}'
  curl -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'"#;

/// Command line, environment and settings file. Every flag `--some-name` is also the variable `CANOPY_SOME_NAME` and
/// the key `some_name` of the file; a flag wins over a variable, a variable over the file, the file over the default.
#[derive(Clone, Debug, Serialize, ToSchema, clap::Parser)]
#[command(name = "canopy-server", version, about = "OpenAI-compatible server with tree speculative decoding")]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Settings file in TOML.
    #[arg(long, env = "CANOPY_CONFIG", value_name = "FILE")]
    #[schema(value_type = Option<String>)]
    pub config: Option<PathBuf>,
    /// IP address to listen on, or `localhost`.
    #[arg(long, env = "CANOPY_HOST", default_value = "127.0.0.1", value_parser = host)]
    #[schema(value_type = String)]
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
    /// How the drafter's weights are kept, and the head's that drafts go through; int8 on CUDA, else as the target's, when left out.
    #[arg(long, env = "CANOPY_DRAFTER_DTYPE", value_enum)]
    pub drafter_dtype: Option<DtypeArg>,
    /// Where the model runs: `cpu`, `cuda` or `cuda:N`.
    #[arg(long, env = "CANOPY_DEVICE", default_value = "cpu")]
    pub device: String,
    /// What rows are rounded to before products on CUDA; the CPU always takes them in f32.
    #[arg(long, env = "CANOPY_ROWS", value_enum, default_value_t = RowsArg::Bf16)]
    pub rows: RowsArg,
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
    /// Prompt tokens per prefill chunk: up to 256, or a multiple of 256. When left out 128 on the CPU and 2,048 on CUDA.
    #[arg(long, env = "CANOPY_PREFILL_CHUNK")]
    pub prefill_chunk: Option<usize>,
    /// Node budget of tree mode when a request names none.
    #[arg(long, env = "CANOPY_BUDGET", default_value_t = 16)]
    pub budget: usize,
    /// max_tokens of a request that names none.
    #[arg(long, env = "CANOPY_DEFAULT_MAX_TOKENS", default_value_t = 256)]
    pub default_max_tokens: usize,
    /// Largest request body in bytes; a larger one is answered 413.
    #[arg(long, env = "CANOPY_BODY_LIMIT", default_value_t = 2 << 20)]
    pub body_limit: usize,
    /// Open connections; more wait to be accepted.
    #[arg(long, env = "CANOPY_MAX_CONNECTIONS", default_value_t = 1024)]
    pub max_connections: usize,
    /// Seconds that a connection gets to send a request's head; then it is closed.
    #[arg(long, env = "CANOPY_HEADER_TIMEOUT", default_value_t = 30)]
    pub header_timeout: u64,
    /// Seconds that a request gets to send its body; then it is answered 408.
    #[arg(long, env = "CANOPY_BODY_TIMEOUT", default_value_t = 30)]
    pub body_timeout: u64,
    /// Seconds that a generation may take, waiting included; then it is answered 504. 0 is no limit.
    #[arg(long, env = "CANOPY_REQUEST_TIMEOUT", default_value_t = 600)]
    pub request_timeout: u64,
    /// Seconds of silence after which a stream gets a comment that keeps the connection open.
    #[arg(long, env = "CANOPY_KEEP_ALIVE", default_value_t = 10)]
    pub keep_alive: u64,
    /// Seconds that running streams get to finish after Ctrl-C or SIGTERM.
    #[arg(long, env = "CANOPY_DRAIN_TIMEOUT", default_value_t = 30)]
    pub drain_timeout: u64,
    /// Memory for saved prefixes of prompts, in MiB; 0 saves none.
    #[arg(long, env = "CANOPY_CACHE_MIB", default_value_t = 256)]
    pub cache_mib: usize,
    /// Bearer keys, separated by commas; without any, no key is asked for.
    #[arg(long, env = "CANOPY_API_KEY", value_delimiter = ',', hide_env_values = true)]
    #[serde(skip)]
    pub api_key: Vec<String>,
    /// File with one bearer key a line; empty lines and those that start with # are left out.
    #[arg(long, env = "CANOPY_API_KEY_FILE", value_name = "FILE")]
    #[schema(value_type = Option<String>)]
    pub api_key_file: Option<PathBuf>,
    /// Sites whose pages may ask, as in `https://example.org`, separated by commas; `*` lets every site's.
    #[arg(long, env = "CANOPY_CORS_ORIGIN", value_delimiter = ',', value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Never ask the network for a model.
    #[arg(long, env = "CANOPY_OFFLINE")]
    pub offline: bool,
    /// Launch every kernel by itself on CUDA instead of replaying recorded graphs; the bits are the same.
    #[arg(long, env = "CANOPY_NO_GRAPHS")]
    pub no_graphs: bool,
    /// Log lines as text or as JSON.
    #[arg(long, env = "CANOPY_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log filter, as in `info,canopy_e2e=debug`.
    #[arg(long, env = "CANOPY_LOG", default_value = "info")]
    pub log: String,
}

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DtypeArg {
    /// As stored in the file.
    Stored,
    /// Rounded to bf16.
    Bf16,
    /// Widened to f32.
    F32,
    /// Rounded to int8 with a scale for every 128 inputs of an output: half the memory of bf16 on CUDA (on the CPU the same values in bf16).
    Int8,
}

impl From<DtypeArg> for WeightDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::Stored => Self::Stored,
            DtypeArg::Bf16 => Self::Bf16,
            DtypeArg::F32 => Self::F32,
            DtypeArg::Int8 => Self::Int8,
        }
    }
}

/// What rows are rounded to before products on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RowsArg {
    /// bf16, as checkpoints in bf16 are run elsewhere.
    Bf16,
    /// f32: slower, and close to the CPU.
    F32,
}

/// Shape of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// An address, or `localhost`; other names would need a resolver before the first log line.
fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => text.parse().map_err(|_| "expected an IP address or localhost".to_owned()),
    }
}
