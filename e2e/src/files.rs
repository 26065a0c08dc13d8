//! The files of one model: a directory, or bytes compiled into the binary.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::weights::{WeightDtype, Weights};
use crate::{Error, Result};

/// Where a model's files are read from.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A directory in Hugging Face layout.
    Directory(PathBuf),
    /// Files in memory.
    Memory {
        /// Name in errors.
        name: &'static str,
        /// File name and content.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl ModelFiles {
    /// Path of `file` as errors name it.
    pub fn path(&self, file: &str) -> PathBuf {
        match self {
            Self::Directory(dir) => dir.join(file),
            Self::Memory { name, .. } => Path::new(name).join(file),
        }
    }

    /// Content of `file`, `None` when there is none.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>> {
        match self {
            Self::Directory(dir) => match std::fs::read(dir.join(file)) {
                Ok(bytes) => Ok(Some(bytes.into())),
                Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(cause) => Err(Error::Io { path: dir.join(file), cause }),
            },
            Self::Memory { files, .. } => {
                Ok(files.iter().find(|(name, _)| *name == file).map(|&(_, bytes)| bytes.into()))
            }
        }
    }

    /// Content of `file`.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path when there is none.
    pub fn require(&self, file: &str) -> Result<Cow<'static, [u8]>> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        self.read(file)?.ok_or_else(|| Error::Io { path: self.path(file), cause: missing() })
    }

    /// The model's weights, matrices kept as `dtype` asks.
    pub fn weights(&self, dtype: WeightDtype) -> Result<Weights> {
        match self {
            Self::Directory(dir) => Weights::open(dir, dtype),
            Self::Memory { name, files } => Weights::from_memory(name, files, dtype),
        }
    }
}
