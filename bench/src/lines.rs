//! Result lines of one run.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::machine;

/// Appends rows to a JSON-lines file, each with the device and the command that made it.
pub struct Lines {
    file: Option<File>,
    before: Value,
    command: String,
}

impl Lines {
    /// Opens `path` for appending; without one, rows go nowhere.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.with_context(|| path.display().to_string())
        };
        let command: Vec<String> = std::env::args().skip(1).collect();
        let before = machine::gpu().unwrap_or(Value::Null);
        Ok(Self {
            file: path.map(open).transpose()?,
            before,
            command: format!("canopy-bench {}", command.join(" ")),
        })
    }

    /// Appends one row.
    ///
    /// # Errors
    /// From the file.
    pub fn write(&mut self, mut row: Value) -> Result<()> {
        row["device"] = self.before["name"].clone();
        row["command"] = self.command.as_str().into();
        self.file.as_mut().map_or(Ok(()), |file| Ok(writeln!(file, "{row}")?))
    }

    /// Appends the device's clocks, temperature and power before the first row and now.
    ///
    /// # Errors
    /// From the file.
    pub fn finish(mut self) -> Result<()> {
        let row = json!({"schema": 1, "case": "machine.gpu", "before": self.before, "after": machine::gpu()});
        self.file.as_mut().map_or(Ok(()), |file| Ok(writeln!(file, "{row}")?))
    }
}
