//! Runs requests on the engine alone, without HTTP: what `bench/load/overhead.py` compares the server with.
//!
//! `engine_alone FILE [SERVER FLAGS]`, FILE with one JSON object a line: `prompt` and `max_tokens`. Prints one JSON object.

use std::io::Write as _;
use std::time::Instant;

use canopy_e2e::engine::{Engine, GenerateRequest};
use canopy_e2e::loader;
use canopy_server::config::{self, Config};
use serde_json::{Value, json};

fn main() -> anyhow::Result<()> {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let file = words.next().ok_or_else(|| anyhow::anyhow!("the file with the requests is missing"))?;
    let config = Config::try_from(config::parse(std::iter::once(program).chain(words))?)?;
    let pair = loader::load(&config.load_options())?;
    let tokenizer = pair.tokenizer.clone();
    let mut engine = Engine::new(pair.target, pair.drafter, pair.tokenizer, config.engine_config())?;
    let mut requests = Vec::new();
    for line in std::fs::read_to_string(file)?.lines() {
        let body: Value = serde_json::from_str(line)?;
        let prompt = tokenizer.encode(body["prompt"].as_str().unwrap_or_default())?;
        requests.push(GenerateRequest::new(prompt, body["max_tokens"].as_u64().unwrap_or(16) as usize));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads).build()?;
    let started = Instant::now();
    let results = pool.install(|| engine.run_all(requests))?;
    let seconds = started.elapsed().as_secs_f64();
    let mut tokens = 0;
    for result in results {
        tokens += result?.stats.completion_tokens;
    }
    let row = json!({"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens as f64 / seconds});
    writeln!(std::io::stdout(), "{row}")?;
    Ok(())
}
