//! Shared by the tests of the target: golden files, models, small checkpoints, comparisons.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use canopy_e2e::embedded;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load_target};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_kernels::DraftTree;

pub type Tensors = HashMap<String, Tensor>;

/// `tests/golden/<path>`.
pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

pub fn tensors(path: impl AsRef<Path>) -> Tensors {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

pub fn ints<T: TryFrom<i64>>(tensor: &Tensor) -> Vec<T> {
    let values = tensor.to_dtype(DType::I64).unwrap().flatten_all().unwrap().to_vec1::<i64>().unwrap();
    values.into_iter().map(|value| T::try_from(value).ok().unwrap()).collect()
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bits(tensor: &Tensor) -> Vec<u32> {
    floats(tensor).into_iter().map(f32::to_bits).collect()
}

/// Largest absolute difference; the shapes must be equal and everything finite.
pub fn max_abs(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (floats(a), floats(b));
    assert!(a.iter().chain(&b).all(|value| value.is_finite()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The random model of `tests/golden/qwen35-random` with `slots` slots and a context of 64.
pub fn random_model(slots: usize) -> Qwen35 {
    model(&ModelFiles::Directory(golden("qwen35-random")), slots, 64)
}

/// The embedded target with a context of 512.
pub fn tiny_model(slots: usize) -> Qwen35 {
    model(&embedded::target(), slots, 512)
}

pub fn model(files: &ModelFiles, slots: usize, context_len: usize) -> Qwen35 {
    let options = LoadOptions { slots, context_len: Some(context_len), ..LoadOptions::default() };
    load_target(files, &options).unwrap()
}

pub fn stream(slot: usize, tokens: &[u32], tree: DraftTree) -> VerifyStream {
    VerifyStream { slot, tokens: tokens.to_vec(), tree, logits: LogitRows::All }
}

pub fn chain(slot: usize, tokens: &[u32]) -> VerifyStream {
    stream(slot, tokens, DraftTree::chain(tokens.len()).unwrap())
}

/// Verifies one stream and returns its logits.
pub fn verify(target: &mut Qwen35, stream: VerifyStream) -> Tensor {
    target.verify(&[stream]).unwrap().logits.unwrap()
}

/// Verifies and commits `tokens` as a chain; logits of every one.
pub fn append(target: &mut Qwen35, slot: usize, tokens: &[u32]) -> Tensor {
    let logits = verify(target, chain(slot, tokens));
    target.commit(&[(0..tokens.len()).collect()]).unwrap();
    logits
}

/// Greedy continuation, one token a round.
pub fn greedy(target: &mut Qwen35, slot: usize, mut last_row: Tensor, tokens: usize) -> Vec<u32> {
    let mut out = Vec::new();
    for _ in 0..tokens {
        let next = argmax(&last_row);
        out.push(next);
        last_row = append(target, slot, &[next]);
    }
    out
}

/// Argmax of the last row, ties to the lower id.
pub fn argmax(logits: &Tensor) -> u32 {
    let row = floats(&logits.get(logits.dim(0).unwrap() - 1).unwrap());
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best as u32
}

/// Bits of everything a slot has committed.
pub fn state_bits(target: &Qwen35, slot: usize) -> Vec<(String, Vec<u32>)> {
    let named = target.state_tensors(slot).unwrap();
    named.into_iter().map(|(name, tensor)| (name, bits(&tensor))).collect()
}

/// Writes a safetensors file.
pub fn save(tensors: &Tensors, path: &Path) {
    candle_core::safetensors::save(tensors, path).unwrap();
}

/// A fresh directory with the random model's `config.json`.
pub fn checkpoint_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden("qwen35-random/config.json"), dir.path().join("config.json")).unwrap();
    dir
}
