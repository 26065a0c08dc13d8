//! Checkpoints: one file or shards, three prefixes, three dtypes, extra tensors; and damaged ones, whose errors
//! name the file, the tensor, what was expected and what came.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, load_target};
use canopy_e2e::weights::{WeightDtype, Weights};
use serde_json::json;

use crate::support::*;

fn weights() -> Tensors {
    tensors(golden("qwen35-random/model.safetensors"))
}

fn files(dir: &Path) -> ModelFiles {
    ModelFiles::Directory(dir.to_path_buf())
}

/// Logits of a few tokens by the checkpoint in `dir`.
fn logits(dir: &Path, dtype: WeightDtype) -> Tensor {
    let options = LoadOptions { slots: 1, context_len: Some(16), dtype, ..LoadOptions::default() };
    append(&mut load_target(&files(dir), &options).unwrap(), 0, &[1, 5, 9, 300, 2])
}

fn error(dir: &Path) -> String {
    load_target(&files(dir), &LoadOptions::default()).unwrap_err().to_string()
}

fn expected() -> Vec<u32> {
    bits(&append(&mut random_model(1), 0, &[1, 5, 9, 300, 2]))
}

#[test]
fn any_prefix_and_foreign_tensors() {
    for prefix in ["model.language_model.", "model.", ""] {
        let dir = checkpoint_dir();
        let rename = |name: String| match name.strip_prefix("model.") {
            Some(rest) => format!("{prefix}{rest}"),
            None => name,
        };
        let mut renamed: Tensors =
            weights().into_iter().map(|(name, tensor)| (rename(name), tensor)).collect();
        let foreign = Tensor::zeros((3, 3), DType::F32, &Device::Cpu).unwrap();
        for name in
            ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"]
        {
            renamed.insert(name.into(), foreign.clone());
        }
        save(&renamed, &dir.path().join("model.safetensors"));
        assert_eq!(bits(&logits(dir.path(), WeightDtype::Stored)), expected(), "prefix {prefix:?}");
    }
}

/// Writes the model in two shards; returns the index.
fn shard(dir: &Path) -> serde_json::Value {
    let mut map = serde_json::Map::new();
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut names: Vec<_> = weights().into_iter().collect();
    names.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (name, tensor)) in names.into_iter().enumerate() {
        map.insert(name.clone(), format!("model-0000{}-of-00002.safetensors", i % 2 + 1).into());
        shards[i % 2].insert(name, tensor);
    }
    for (i, tensors) in shards.iter().enumerate() {
        save(tensors, &dir.join(format!("model-0000{}-of-00002.safetensors", i + 1)));
    }
    let index = json!({"metadata": {}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    index
}

#[test]
fn shards_with_and_without_an_index() {
    let dir = checkpoint_dir();
    shard(dir.path());
    assert_eq!(bits(&logits(dir.path(), WeightDtype::Stored)), expected());
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(bits(&logits(dir.path(), WeightDtype::Stored)), expected());
}

#[test]
fn damaged_shards() {
    let dir = checkpoint_dir();
    let mut index = shard(dir.path());
    let second = dir.path().join("model-00002-of-00002.safetensors");
    let whole = std::fs::read(&second).unwrap();
    let rewrite = |index: &serde_json::Value| {
        std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    };

    std::fs::remove_file(&second).unwrap();
    let text = error(dir.path());
    assert!(text.contains("model-00002-of-00002.safetensors") && text.contains("No such file"), "{text}");

    for cut in [0, 5, 4000, whole.len() - 1] {
        std::fs::write(&second, &whole[..cut]).unwrap();
        let text = error(dir.path());
        let wanted = format!("safetensors: (header): expected a whole safetensors file, got {cut} bytes: ");
        assert!(text.contains("model-00002-of-00002") && text.contains(&wanted), "{text}");
    }
    std::fs::write(&second, &whole).unwrap();

    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors".into();
    rewrite(&index);
    let text = error(dir.path());
    let wanted =
        "model-00002-of-00002.safetensors: lm_head.weight: expected here by model.safetensors.index.json";
    assert!(text.contains(wanted) && text.contains("model-00001-of-00002"), "{text}");

    index["weight_map"]["lm_head.weight"] = "../model.safetensors".into();
    rewrite(&index);
    assert!(error(dir.path()).contains("index.json: lm_head.weight: expected a file name, got \"../model"));

    rewrite(&json!({"weight_map": 3}));
    assert!(error(dir.path()).contains("index.json: weight_map: expected an object"));
    std::fs::write(dir.path().join("model.safetensors.index.json"), "{").unwrap();
    assert!(error(dir.path()).contains("index.json: weight_map: expected JSON"));
}

#[test]
fn missing_and_misshapen_tensors() {
    let dir = checkpoint_dir();
    assert!(error(dir.path()).contains("(file): expected model.safetensors or model.safetensors.index.json"));
    let path = dir.path().join("model.safetensors");

    let mut tensors = weights();
    tensors.remove("model.layers.2.mlp.up_proj.weight");
    save(&tensors, &path);
    let text = error(dir.path());
    assert!(
        text.contains("model.layers.2.mlp.up_proj.weight: expected shape [192, 64], got no such tensor"),
        "{text}"
    );

    let mut tensors = weights();
    let name = "model.layers.3.self_attn.k_proj.weight";
    let cut = tensors[name].narrow(0, 0, 32).unwrap().contiguous().unwrap();
    tensors.insert(name.into(), cut);
    save(&tensors, &path);
    let text = error(dir.path());
    let wanted = format!("model.safetensors: {name}: expected shape [64, 64], got [32, 64]");
    assert!(text.contains(&wanted), "{text}");

    let mut tensors = weights();
    let name = "model.layers.0.linear_attn.A_log";
    let ids = Tensor::zeros(4, DType::I64, &Device::Cpu).unwrap();
    tensors.insert(name.into(), ids);
    save(&tensors, &path);
    assert!(error(dir.path()).contains(&format!("{name}: expected bf16, f16 or f32, got I64")));

    let mut tensors = weights();
    tensors.remove("model.embed_tokens.weight");
    save(&tensors, &path);
    assert!(error(dir.path()).contains("embed_tokens.weight: expected it after one of the prefixes"));

    let mut tensors = weights();
    tensors.remove("lm_head.weight");
    save(&tensors, &path);
    assert!(error(dir.path()).contains("lm_head.weight: expected shape [512, 64], got no such tensor"));
}

/// Every matrix in one dtype, the small vectors in f32 as published checkpoints have them.
fn convert(dtype: DType) -> Tensors {
    let keep = |name: &str| name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
    let convert = |(name, tensor): (String, Tensor)| {
        let tensor = if keep(&name) { tensor } else { tensor.to_dtype(dtype).unwrap() };
        (name, tensor)
    };
    weights().into_iter().map(convert).collect()
}

#[test]
fn each_tensor_has_its_own_dtype() {
    let reference = append(&mut random_model(1), 0, &[1, 5, 9, 300, 2]);
    let load = |dtype: DType, keep: WeightDtype| {
        let dir = checkpoint_dir();
        save(&convert(dtype), &dir.path().join("model.safetensors"));
        logits(dir.path(), keep)
    };
    let half = load(DType::F16, WeightDtype::Stored);
    assert!(max_abs(&half, &reference) < 0.02);
    assert_eq!(bits(&half), bits(&load(DType::F16, WeightDtype::F32)));
    let brain = load(DType::BF16, WeightDtype::Stored);
    assert!(max_abs(&brain, &reference) < 0.15);
    assert!(max_abs(&brain, &reference) > 1e-4);
    assert!(max_abs(&brain, &load(DType::BF16, WeightDtype::F32)) < 1e-5);
    assert_eq!(bits(&load(DType::F32, WeightDtype::F32)), bits(&reference));
}

/// Rounding at load equals a checkpoint whose matrices were rounded before.
#[test]
fn rounding_at_load() {
    let (asked, rounded) = (checkpoint_dir(), checkpoint_dir());
    save(&weights(), &asked.path().join("model.safetensors"));
    let round = |(name, tensor): (String, Tensor)| {
        let matrix = tensor.rank() == 2;
        let tensor = if matrix { tensor.to_dtype(DType::BF16).unwrap() } else { tensor };
        (name, tensor)
    };
    let tensors: Tensors = weights().into_iter().map(round).collect();
    save(&tensors, &rounded.path().join("model.safetensors"));
    let kept = logits(rounded.path(), WeightDtype::Stored);
    assert_eq!(bits(&logits(asked.path(), WeightDtype::Bf16)), bits(&kept));
    assert!(max_abs(&logits(rounded.path(), WeightDtype::F32), &kept) < 1e-5);
}

/// Matrices of one product stored in different dtypes are all widened.
#[test]
fn one_product_of_mixed_dtypes() {
    let dir = checkpoint_dir();
    let mut tensors = weights();
    let name = "model.layers.3.self_attn.v_proj.weight";
    let rounded = tensors[name].to_dtype(DType::BF16).unwrap();
    tensors.insert(name.into(), rounded.clone());
    save(&tensors, &dir.path().join("model.safetensors"));
    let mixed = logits(dir.path(), WeightDtype::Stored);
    tensors.insert(name.into(), rounded.to_dtype(DType::F32).unwrap());
    save(&tensors, &dir.path().join("model.safetensors"));
    assert_eq!(bits(&mixed), bits(&logits(dir.path(), WeightDtype::Stored)));
}

#[test]
fn a_tensor_may_not_come_twice() {
    let dir = checkpoint_dir();
    save(&weights(), &dir.path().join("a.safetensors"));
    save(&weights(), &dir.path().join("b.safetensors"));
    let text = Weights::open(dir.path(), WeightDtype::Stored).unwrap_err().to_string();
    assert!(text.contains("b.safetensors") && text.contains("expected once, got it also in"), "{text}");
}
