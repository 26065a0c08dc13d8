//! Tensors of a checkpoint: one safetensors file or several, mapped from a directory or compiled in.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use canopy_candle::PackedLinear;
use safetensors::tensor::{Dtype, SafeTensors, TensorInfo};
use serde_json::Value;

use crate::{Error, Result};

mod random;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How matrices are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// As stored in the file (f16 is widened to f32).
    #[default]
    Stored,
    /// Rounded to bf16.
    Bf16,
    /// Widened to f32.
    F32,
    /// Rounded to int8 ([`PackedLinear::int8`]): half of bf16's bytes on CUDA.
    Int8,
}

/// One matrix of a packed product: a name and its rows.
pub type Part<'a> = (&'a str, usize);

#[derive(Debug)]
enum Bytes {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    bytes: Bytes,
    data_start: usize,
}

/// The tensors of one checkpoint, each with its own dtype.
#[derive(Debug)]
pub struct Weights {
    root: PathBuf,
    files: Vec<File>,
    tensors: HashMap<String, (usize, TensorInfo)>,
    dtype: WeightDtype,
    /// No files: every tensor that is asked for comes from this seed.
    random: Option<u64>,
    bf16_rows: bool,
}

impl Weights {
    /// Weights of any names and shapes from a seed: a model of the right sizes, for measuring speed without a checkpoint. Matrices are bf16, or int8
    /// made of those.
    pub fn random(seed: u64, dtype: WeightDtype) -> Self {
        Self { random: Some(seed), ..Self::empty(PathBuf::from("random weights"), dtype) }
    }

    /// Maps the checkpoint in `dir`: `model.safetensors`, else the shards of `model.safetensors.index.json`, else
    /// every `*.safetensors` there.
    ///
    /// # Errors
    /// [`Error::Io`] for a missing file; [`Error::Weights`] naming file and tensor for a truncated or
    /// contradictory one.
    pub fn open(dir: &Path, dtype: WeightDtype) -> Result<Self> {
        let mut weights = Self::empty(dir.to_path_buf(), dtype);
        let index = dir.join(INDEX);
        if dir.join(SINGLE).exists() {
            weights.add(map_file(dir.join(SINGLE))?)?;
        } else if index.exists() {
            let json = std::fs::read(&index).map_err(|cause| Error::Io { path: index.clone(), cause })?;
            let map = weight_map(&index, &json)?;
            for name in map.values().collect::<BTreeSet<_>>() {
                weights.add(map_file(dir.join(name))?)?;
            }
            weights.check_index(&map)?;
        } else {
            let names = safetensors_in(dir)?;
            if names.is_empty() {
                let message = format!("expected {SINGLE} or {INDEX}, got neither");
                return Err(weights_error(dir, "(file)", message));
            }
            for path in names {
                weights.add(map_file(path)?)?;
            }
        }
        Ok(weights)
    }

    /// The checkpoint among files in memory; `name` stands for the directory in errors.
    pub fn from_memory(
        name: &str,
        files: &'static [(&'static str, &'static [u8])],
        dtype: WeightDtype,
    ) -> Result<Self> {
        let mut weights = Self::empty(PathBuf::from(name), dtype);
        for (file, bytes) in files.iter().filter(|(file, _)| file.ends_with(".safetensors")) {
            weights.add((Path::new(name).join(file), Bytes::Static(bytes)))?;
        }
        if let Some((file, json)) = files.iter().find(|(file, _)| *file == INDEX) {
            weights.check_index(&weight_map(&Path::new(name).join(file), json)?)?;
        }
        Ok(weights)
    }

    /// Makes products that round their rows to bf16 on CUDA ([`PackedLinear::with_bf16_rows`]).
    #[must_use]
    pub fn with_bf16_rows(mut self, bf16_rows: bool) -> Self {
        self.bf16_rows = bf16_rows;
        self
    }

    fn empty(root: PathBuf, dtype: WeightDtype) -> Self {
        Self { root, files: Vec::new(), tensors: HashMap::new(), dtype, random: None, bf16_rows: false }
    }

    fn add(&mut self, (path, bytes): (PathBuf, Bytes)) -> Result<()> {
        let (header, metadata) = SafeTensors::read_metadata(bytes.get()).map_err(|source| {
            let message =
                format!("expected a whole safetensors file, got {} bytes: {source}", bytes.get().len());
            weights_error(&path, "(header)", message)
        })?;
        let file = self.files.len();
        for (name, info) in metadata.tensors() {
            if let Some((other, _)) = self.tensors.get(&name) {
                let message = format!("expected once, got it also in {}", self.files[*other].path.display());
                return Err(weights_error(&path, &name, message));
            }
            self.tensors.insert(name, (file, info.clone()));
        }
        self.files.push(File { path, bytes, data_start: header + 8 });
        Ok(())
    }

    fn check_index(&self, map: &HashMap<String, String>) -> Result<()> {
        for (name, file) in map {
            let found = self.tensors.get(name).map(|(i, _)| self.files[*i].path.as_path());
            if found.and_then(Path::file_name) != Path::new(file).file_name() {
                let got = found.map_or("none".into(), |path| format!("it in {}", path.display()));
                let message = format!("expected here by {INDEX}, got {got}");
                return Err(weights_error(&self.root.join(file), name, message));
            }
        }
        Ok(())
    }

    /// True when the checkpoint holds `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.random.is_some() || self.tensors.contains_key(name)
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The first of `prefixes` under which `name` is found.
    pub fn find_prefix<'p>(&self, prefixes: &[&'p str], name: &str) -> Result<&'p str> {
        prefixes.iter().copied().find(|prefix| self.contains(&format!("{prefix}{name}"))).ok_or_else(|| {
            let message = format!("expected it after one of the prefixes {prefixes:?}, got none");
            weights_error(&self.root, name, message)
        })
    }

    /// A tensor in its stored dtype (bf16, f16 or f32), on the CPU.
    ///
    /// # Errors
    /// [`Error::Weights`] naming file, tensor, expected and got.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        if let Some(seed) = self.random {
            return random::tensor(name, shape, seed);
        }
        let Some((file, info)) = self.tensors.get(name) else {
            return Err(weights_error(
                &self.root,
                name,
                format!("expected shape {shape:?}, got no such tensor"),
            ));
        };
        let file = &self.files[*file];
        if info.shape != shape {
            return Err(weights_error(
                &file.path,
                name,
                format!("expected shape {shape:?}, got {:?}", info.shape),
            ));
        }
        let dtype = match info.dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            other => {
                let message = format!("expected bf16, f16 or f32, got {other:?}");
                return Err(weights_error(&file.path, name, message));
            }
        };
        let (start, end) = info.data_offsets;
        let data = &file.bytes.get()[file.data_start + start..file.data_start + end];
        Ok(Tensor::from_raw_buffer(data, dtype, shape, &Device::Cpu)?)
    }

    /// A tensor widened to f32, on `device`: norm weights, gate parameters, convolution taps.
    pub fn f32(&self, name: &str, shape: &[usize], device: &Device) -> Result<Tensor> {
        Ok(self.tensor(name, shape)?.to_dtype(DType::F32)?.to_device(device)?)
    }

    /// One product over `[rows, inputs]` matrices. Every entry of `parts` is one output, made of the matrices it
    /// lists, stacked.
    pub fn packed(&self, parts: &[&[Part<'_>]], inputs: usize, device: &Device) -> Result<PackedLinear> {
        let linear = self.packed_bf16(parts, inputs, device)?.with_bf16_rows(self.bf16_rows);
        Ok(if self.dtype == WeightDtype::Int8 { linear.int8()? } else { linear })
    }

    /// The same before it becomes int8, where it does.
    fn packed_bf16(&self, parts: &[&[Part<'_>]], inputs: usize, device: &Device) -> Result<PackedLinear> {
        if let Some(seed) = self.random {
            let rows = |part: &&[Part<'_>]| part.iter().map(|(_, rows)| rows).sum();
            let outputs: Vec<usize> = parts.iter().map(rows).collect();
            let name = parts.first().and_then(|part| part.first()).map_or("", |(name, _)| name);
            return Ok(PackedLinear::random(inputs, &outputs, random::matrix(name, inputs, seed), device)?);
        }
        let mut outputs = Vec::with_capacity(parts.len());
        for part in parts {
            let matrices = part.iter().map(|&(name, rows)| self.matrix(name, rows, inputs));
            let matrices = matrices.collect::<Result<Vec<_>>>()?;
            outputs.push(matrices);
        }
        let mixed = outputs.iter().flatten().any(|matrix| matrix.dtype() != outputs[0][0].dtype());
        let mut stacked = Vec::with_capacity(outputs.len());
        for mut matrices in outputs {
            if mixed {
                for matrix in &mut matrices {
                    *matrix = matrix.to_dtype(DType::F32)?;
                }
            }
            stacked.push(match matrices.len() {
                1 => matrices.remove(0),
                _ => Tensor::cat(&matrices, 0)?,
            });
        }
        Ok(PackedLinear::new(&stacked.iter().collect::<Vec<_>>(), device)?)
    }

    /// The product over one `[rows, inputs]` matrix.
    pub fn linear(&self, name: &str, rows: usize, inputs: usize, device: &Device) -> Result<PackedLinear> {
        self.packed(&[&[(name, rows)]], inputs, device)
    }

    fn matrix(&self, name: &str, rows: usize, inputs: usize) -> Result<Tensor> {
        let stored = self.tensor(name, &[rows, inputs])?;
        let dtype = match (self.dtype, stored.dtype()) {
            (WeightDtype::Bf16 | WeightDtype::Int8, _) | (WeightDtype::Stored, DType::BF16) => DType::BF16,
            _ => DType::F32,
        };
        Ok(stored.to_dtype(dtype)?)
    }
}

fn weights_error(path: &Path, tensor: &str, message: String) -> Error {
    Error::Weights { path: path.to_path_buf(), tensor: tensor.into(), message }
}

fn map_file(path: PathBuf) -> Result<(PathBuf, Bytes)> {
    let io = |cause| Error::Io { path: path.clone(), cause };
    let file = std::fs::File::open(&path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        return Ok((path, Bytes::Static(&[])));
    }
    // SAFETY: the map is private and read-only; like every reader of mapped weights this trusts that nobody
    // shortens the file while the model loads.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
    Ok((path, Bytes::Mapped(map)))
}

fn safetensors_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |cause| Error::Io { path: dir.to_path_buf(), cause };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// `tensor -> file` of an index. File names may not leave the directory.
fn weight_map(index: &Path, json: &[u8]) -> Result<HashMap<String, String>> {
    let bad = |message: String| weights_error(index, "weight_map", message);
    let value: Value =
        serde_json::from_slice(json).map_err(|source| bad(format!("expected JSON, got {source}")))?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| bad("expected an object of tensor and file names, got none".into()))?;
    let entry = |(tensor, file): (&String, &Value)| match file.as_str() {
        Some(file) if Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) => {
            Ok((tensor.clone(), file.to_owned()))
        }
        _ => Err(weights_error(index, tensor, format!("expected a file name, got {file}"))),
    };
    map.iter().map(entry).collect()
}
