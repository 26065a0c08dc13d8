//! The files of one model: a directory, or bytes compiled into the binary.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

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
                Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
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
        let missing = || io::Error::from(io::ErrorKind::NotFound);
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

/// Writes named tensors as a safetensors file. What `path` is already keeps being that: candle's own `save` puts a new file in
/// its place, also of a link, and of `/dev/null` where it may.
///
/// # Errors
/// What the system says of the file, or why the tensors cannot be written.
pub fn save_tensors<K: AsRef<str> + Ord + Display>(
    tensors: &HashMap<K, Tensor>,
    path: &Path,
) -> io::Result<()> {
    std::fs::write(path, safetensors::serialize(tensors, None).map_err(io::Error::other)?)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt, symlink};

    use candle_core::Device;

    use super::*;

    #[test]
    fn saved_tensors_leave_what_they_are_written_to_in_place() {
        let tensors = HashMap::from([("x", Tensor::new(&[1f32, 2.], &Device::Cpu).unwrap())]);
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "what was there").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        save_tensors(&tensors, &link).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        let read = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        assert_eq!(read["x"].to_vec1::<f32>().unwrap(), [1., 2.]);

        // A link of its own to the device: a failing run must not harm the machine's.
        let null = folder.path().join("null");
        symlink("/dev/null", &null).unwrap();
        save_tensors(&tensors, &null).unwrap();
        assert!(std::fs::metadata(&null).unwrap().file_type().is_char_device());
        let missing = save_tensors(&tensors, &folder.path().join("no/file")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
