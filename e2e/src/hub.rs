//! Checkpoints from the Hugging Face hub.

use std::path::PathBuf;

use crate::{Error, Result};

/// True for `owner/name` of the hub's characters.
pub fn is_repo_id(name: &str) -> bool {
    let part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(plain) && !part.starts_with('.') && !part.contains("..")
    };
    name.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The directory of `repo`'s files.
pub fn fetch(repo: &str, offline: bool) -> Result<PathBuf> {
    let error = |message: String| Error::Hub { repo: repo.into(), message };
    let (owner, name) = repo.split_once('/').ok_or_else(|| error("expected owner/name".into()))?;
    let client = hf_hub::HFClientSync::new().map_err(|source| error(source.to_string()))?;
    let request = client.model(owner, name).snapshot_download().local_files_only(offline).send();
    request.map_err(|source| error(source.to_string()))
}
