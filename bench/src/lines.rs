//! Result lines of one run.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::machine;

/// Appends rows to a JSON-lines file, each with the device, the build and the command that made it (`bench/results/README.md` lists the fields).
pub struct Lines {
    file: Option<File>,
    before: Value,
    build: [(&'static str, Value); 4],
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
            build: [
                ("toolkit", canopy_kernels::TOOLKIT.into()),
                ("commit", machine::commit().into()),
                ("dirty", machine::dirty().into()),
                ("command", format!("canopy-bench {}", command.join(" ")).into()),
            ],
        })
    }

    /// Appends one row.
    ///
    /// # Errors
    /// From the file.
    pub fn write(&mut self, mut row: Value) -> Result<()> {
        for (field, of) in [("device", "name"), ("sm", "compute_cap"), ("driver", "driver_version")] {
            row[field] = self.before[of].clone();
        }
        for (field, value) in &self.build {
            row[*field] = value.clone();
        }
        self.file.as_mut().map_or(Ok(()), |file| Ok(writeln!(file, "{row}")?))
    }

    /// Appends the device's clocks, temperature and power before the first row and now.
    ///
    /// # Errors
    /// From the file.
    pub fn finish(mut self) -> Result<()> {
        let row = json!({"schema": 1, "case": "machine.gpu", "before": self.before, "after": machine::gpu()});
        self.write(row)
    }
}
