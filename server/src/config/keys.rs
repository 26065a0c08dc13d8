//! The bearer keys of flag, environment and file.

use std::fs;
use std::path::Path;

use super::{Args, ConfigError};

/// Every key of both sources.
pub(super) fn keys(args: &Args) -> Result<Vec<String>, ConfigError> {
    let mut keys = args.api_key.clone();
    // As from a variable that is empty by mistake: it would open a server that was meant to be closed.
    if keys.iter().any(String::is_empty) {
        return Err(ConfigError {
            argument: "api-key",
            expected: "keys of at least one character, or no such setting for an open server".into(),
            got: "an empty key".into(),
        });
    }
    if keys.iter().any(|key| key.trim() != key) {
        return Err(ConfigError {
            argument: "api-key",
            expected: "keys without spaces around them".into(),
            got: "a key with spaces around it".into(),
        });
    }
    if let Some(path) = &args.api_key_file {
        keys.extend(read(path)?);
    }
    Ok(keys)
}

fn read(path: &Path) -> Result<Vec<String>, ConfigError> {
    let refuse = |got: String| ConfigError {
        argument: "api-key-file",
        expected: "a readable file with at least one key".into(),
        got: format!("{}: {got}", path.display()),
    };
    let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    // A file without keys would open a server that was meant to be closed.
    if keys.is_empty() { Err(refuse("no key".into())) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn of(args: &[&str]) -> Result<Vec<String>, ConfigError> {
        keys(&Args::parse_from(std::iter::once(&"canopy-server").chain(args)))
    }

    #[test]
    fn an_empty_key_and_a_padded_one_are_refused() {
        assert_eq!(of(&[]).unwrap(), [""; 0]);
        for empty in ["", "a,", ",a"] {
            assert!(of(&["--api-key", empty]).unwrap_err().to_string().contains("an empty key"), "{empty}");
        }
        assert_eq!(of(&["--api-key", "a,b"]).unwrap(), ["a", "b"]);
        assert!(of(&["--api-key", " k"]).is_err());
    }

    #[test]
    fn a_file_has_a_key_a_line_and_at_least_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "# staging\none\n\n  two  \n").unwrap();
        assert_eq!(of(&["--api-key-file", path, "--api-key", "zero"]).unwrap(), ["zero", "one", "two"]);
        fs::write(path, "# none yet\n").unwrap();
        assert!(of(&["--api-key-file", path]).unwrap_err().to_string().ends_with("no key"));
        assert!(of(&["--api-key-file", "no/such/file"]).is_err());
    }
}
