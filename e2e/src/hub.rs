//! Checkpoints from the Hugging Face hub: downloaded once into the hub's own cache, then read from there.

mod download;

use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync};

use crate::{Error, Result};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Files of a checkpoint that are worth a download, besides `*.safetensors`.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Where the hub and its cache are.
#[derive(Clone, Debug, Default)]
pub struct HubOptions {
    /// Use only what the cache holds; the environment variable `HF_HUB_OFFLINE=1` asks for the same.
    pub offline: bool,
    /// Base URL; `None` takes `HF_ENDPOINT` or the public hub.
    pub endpoint: Option<String>,
    /// Cache directory; `None` takes `HF_HUB_CACHE`, `HF_HOME/hub` or the default.
    pub cache_dir: Option<PathBuf>,
}

/// True for `owner/name` in the hub's characters.
pub fn is_repo_id(name: &str) -> bool {
    let part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(plain) && !part.starts_with('.') && !part.contains("..")
    };
    name.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The directory with `repo`'s files, downloaded unless `offline`. See [`fetch_with`].
pub fn fetch(repo: &str, offline: bool) -> Result<PathBuf> {
    fetch_with(repo, &HubOptions { offline, ..HubOptions::default() })
}

/// The directory with `repo`'s files at the head of `main`. An interrupted download goes on where it stopped;
/// files already there are not asked for again. Without a network, a complete cached copy is used.
///
/// # Errors
/// [`Error::Hub`] saying what went wrong and the ways out.
pub fn fetch_with(repo: &str, options: &HubOptions) -> Result<PathBuf> {
    let hub = Hub::new(repo, options)?;
    if options.offline || std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| matches!(&*value, "1" | "true")) {
        return hub.cached().ok_or_else(|| {
            let cache = hub.folder.display();
            hub.error(format!(
                "expected a complete copy in the cache, got none in {cache}; run once without --offline, or give \
                 a directory with --model DIR"
            ))
        });
    }
    match hub.commit() {
        Ok(commit) => hub.download(&commit),
        Err(error) if is_unreachable(&error) => match hub.cached() {
            Some(dir) => {
                tracing::warn!(repo, %error, "the hub cannot be reached; using the cached copy");
                Ok(dir)
            }
            None => Err(hub.unreachable(&error)),
        },
        Err(error) => Err(hub.refused(&error)),
    }
}

/// One repository on the hub and its folder in the cache.
struct Hub {
    name: String,
    endpoint: String,
    repo: HFRepositorySync<RepoTypeModel>,
    /// `<cache>/models--owner--name`.
    folder: PathBuf,
}

/// A file to have: its name and size.
type Wanted = (String, u64);

impl Hub {
    fn new(name: &str, options: &HubOptions) -> Result<Self> {
        let error = |message: String| Error::Hub { repo: name.into(), message };
        if !is_repo_id(name) {
            return Err(error("expected owner/name".into()));
        }
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .user_agent(concat!("canopy/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|source| error(chain(&source)))?;
        let mut builder = HFClient::builder().client(client).retry_max_attempts(2);
        if let Some(endpoint) = &options.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = &options.cache_dir {
            builder = builder.cache_dir(cache);
        }
        let client = builder.build().map_err(|source| error(chain(&source)))?;
        let (endpoint, cache) = (client.endpoint().to_owned(), client.cache_dir().to_owned());
        let client = HFClientSync::from_inner(client).map_err(|source| error(chain(&source)))?;
        let (owner, short) = hf_hub::split_id(name);
        let folder = cache.join(format!("models--{owner}--{short}"));
        Ok(Self { name: name.into(), endpoint, repo: client.model(owner, short), folder })
    }

    fn error(&self, message: String) -> Error {
        Error::Hub { repo: self.name.clone(), message }
    }

    fn unreachable(&self, error: &HFError) -> Error {
        self.error(format!(
            "no answer from {} ({}); check the network and run again (a download resumes), use a cached copy with \
             --offline, or give a directory with --model DIR",
            self.endpoint,
            chain(error)
        ))
    }

    fn refused(&self, error: &HFError) -> Error {
        self.error(format!(
            "{}; check owner/name, set HF_TOKEN for a private or gated repository, or give a directory with \
             --model DIR",
            chain(error)
        ))
    }

    /// The snapshot that `main` points at, when it is all there.
    fn cached(&self) -> Option<PathBuf> {
        let commit = std::fs::read_to_string(self.folder.join("refs/main")).ok()?;
        let dir = self.folder.join("snapshots").join(commit.trim());
        is_complete(&dir).then_some(dir)
    }

    fn commit(&self) -> std::result::Result<String, HFError> {
        let info = self.repo.info().send()?;
        let commit = info.sha.filter(|sha| !sha.is_empty() && sha.chars().all(|c| c.is_ascii_hexdigit()));
        commit.ok_or_else(|| HFError::Other(format!("{} has no commit on main", self.name)))
    }

    fn download(&self, commit: &str) -> Result<PathBuf> {
        let entries = self.repo.list_tree().revision(commit).send();
        let entries = entries.map_err(|error| match is_unreachable(&error) {
            true => self.unreachable(&error),
            false => self.refused(&error),
        })?;
        let wanted: Vec<Wanted> = entries.into_iter().filter_map(wanted).collect();
        let dir = self.folder.join("snapshots").join(commit);
        download::files(self, commit, &dir, &wanted)?;
        if !is_complete(&dir) {
            let message = "expected config.json and safetensors weights in the repository, got no such files";
            return Err(self.error(message.into()));
        }
        let refs = self.folder.join("refs");
        let io = |cause| Error::Io { path: refs.join("main"), cause };
        std::fs::create_dir_all(&refs).map_err(io)?;
        std::fs::write(refs.join("main"), commit).map_err(io)?;
        Ok(dir)
    }
}

fn wanted(entry: RepoTreeEntry) -> Option<Wanted> {
    match entry {
        RepoTreeEntry::File { path, size, .. } if !path.contains(['/', '\\']) => {
            (FILES.contains(&path.as_str()) || path.ends_with(".safetensors")).then_some((path, size))
        }
        _ => None,
    }
}

/// A configuration and every weight file that the index (if any) names.
fn is_complete(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    if !has("config.json") {
        return false;
    }
    let Ok(index) = std::fs::read(dir.join("model.safetensors.index.json")) else {
        let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        return entries.any(|entry| entry.path().extension().is_some_and(|kind| kind == "safetensors"));
    };
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
    let shards = index.get("weight_map").and_then(serde_json::Value::as_object);
    shards.is_some_and(|map| map.values().all(|file| file.as_str().is_some_and(has)))
}

/// No usable answer at all, as against an answer that says no.
fn is_unreachable(error: &HFError) -> bool {
    match error {
        HFError::Request { .. } => true,
        HFError::Http { context } => context.status.is_server_error(),
        _ => false,
    }
}

/// An error with its causes; transport errors hide the reason in their sources.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
