//! The settings file, under the command line and the environment.
//!
//! A value of the file takes the place of its flag's default, so that the same parser reads all three and the
//! precedence is its own: flag, variable, file, default.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{CommandFactory as _, FromArgMatches as _};

use super::Args;

/// A settings file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {message}", path = path.display())]
pub struct FileError {
    path: PathBuf,
    message: String,
}

/// What was typed cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// Command line or environment, or a question such as `--help`.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// The settings file.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Reads the command line `words` (program name first), the environment and the settings file that they name.
///
/// # Errors
/// The first that cannot be read, naming the flag or the file's key.
pub fn parse(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Args, ParseError> {
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    let typed = Args::from_arg_matches(&Args::command().try_get_matches_from(&words)?)?;
    let Some(path) = typed.config else { return Ok(typed) };
    let command = with_defaults(&path)?;
    // What was typed has been read once, so that only the file can be wrong now.
    let matches = command.try_get_matches_from(&words).map_err(|error| wrong_value(&path, &error))?;
    Ok(Args::from_arg_matches(&matches)?)
}

fn wrong_value(path: &Path, error: &clap::Error) -> FileError {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    FileError { path: path.into(), message: line.strip_prefix("error: ").unwrap_or(line).into() }
}

/// The command with the file's values as defaults.
fn with_defaults(path: &Path) -> Result<clap::Command, FileError> {
    let refuse = |message: String| FileError { path: path.into(), message };
    let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let table: toml::Table =
        toml::from_str(&text).map_err(|error| refuse(error.to_string().trim().replace('\n', " ")))?;
    let mut command = Args::command();
    for (key, value) in &table {
        let known = command.get_arguments().any(|arg| arg.get_id() == key.as_str()) && key != "config";
        if !known {
            return Err(refuse(format!("{key}: no such setting")));
        }
        let values = texts(value).ok_or_else(|| {
            refuse(format!("{key}: expected a text, a number, true, false or a list of them"))
        })?;
        // Settings are read once and live as long as the process.
        let values: Vec<&'static str> = values.into_iter().map(|text| &*text.leak()).collect();
        command = command.mut_arg(key, |arg| arg.default_values(values));
    }
    Ok(command)
}

fn texts(value: &toml::Value) -> Option<Vec<String>> {
    let one = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(on) => Some(on.to_string()),
        _ => None,
    };
    match value {
        toml::Value::Array(values) => values.iter().map(one).collect(),
        value => one(value).map(|text| vec![text]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(file: &str, flags: &[&str]) -> Result<Args, ParseError> {
        let path = tempfile::NamedTempFile::new().unwrap();
        fs::write(path.path(), file).unwrap();
        let named = ["canopy-server", "--config", path.path().to_str().unwrap()];
        parse(named.iter().chain(flags))
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file = "port = 9001\nslots = 2\noffline = true\napi_key = [\"a\", \"b\"]\nhost = \"0.0.0.0\"\n";
        let args = parsed(file, &["--port", "9002"]).unwrap();
        assert_eq!((args.port, args.slots, args.offline), (9002, 2, true));
        assert_eq!((args.api_key, args.host.to_string()), (vec!["a".into(), "b".into()], "0.0.0.0".into()));
        assert_eq!(args.budget, 16);
    }

    #[test]
    fn a_wrong_file_is_one_sentence_that_names_file_and_key() {
        for (file, part) in [
            ("prot = 1", "prot: no such setting"),
            ("config = \"x\"", "config: no such setting"),
            ("port = \"many\"", "--port"),
            ("log_format = \"xml\"", "--log-format"),
            ("port = {a = 1}", "port: expected a text"),
            ("port = ", "TOML parse error"),
        ] {
            let error = parsed(file, &[]).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, ParseError::File(_)), "{message}");
            assert!(message.contains(part) && !message.contains('\n'), "{file}: {message}");
        }
        let missing = parse(["canopy-server", "--config", "no/such/file.toml"]).unwrap_err();
        assert!(missing.to_string().starts_with("no/such/file.toml: "));
    }
}
