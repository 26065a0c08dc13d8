//! From a name to a running target: what a name means, and options that cannot be.

use std::path::PathBuf;

use canopy_e2e::embedded;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, ModelSource, load, load_target, load_tokenizer};

use crate::support::*;

fn source(name: &str) -> canopy_e2e::Result<ModelSource> {
    name.parse()
}

#[test]
fn names_of_models() {
    assert_eq!(source("embedded").unwrap(), ModelSource::Embedded);
    assert_eq!(source("Qwen/Qwen3.5-9B").unwrap(), ModelSource::Hub("Qwen/Qwen3.5-9B".into()));
    let dir = golden("qwen35-random");
    assert_eq!(source(dir.to_str().unwrap()).unwrap(), ModelSource::Directory(dir.clone()));
    for name in ["", "/no/such/dir", "no-such-dir", dir.join("config.json").to_str().unwrap()] {
        let text = source(name).unwrap_err().to_string();
        let wanted =
            format!("model: {name}: expected `embedded`, a directory, or owner/name of a hub repository");
        assert_eq!(text, wanted);
    }
}

#[test]
fn the_embedded_model_by_default() {
    let loaded = load(&LoadOptions::default()).unwrap();
    assert_eq!(loaded.name, embedded::NAME);
    assert_eq!((loaded.target.vocab_size(), loaded.target.slots()), (6144, 4));
    assert_eq!(loaded.target.context_len(), 2048);
    assert_eq!(loaded.tokenizer.stop_tokens(), [6140, 6142]);
    assert_eq!(loaded.drafter.unwrap().taps(), [1, 3, 5, 6]);
}

/// The embedded model, written to a directory, gives the same bits; its name is the directory's.
#[test]
fn a_directory_equals_the_embedded_files() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("my-model");
    std::fs::create_dir(&dir).unwrap();
    let ModelFiles::Memory { files, .. } = embedded::target() else { panic!("embedded files are in memory") };
    for (name, bytes) in files {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    let options =
        LoadOptions { target: ModelSource::Directory(dir.clone()), slots: 1, ..LoadOptions::default() };
    let loaded = load(&options).unwrap();
    assert_eq!(loaded.name, "my-model");
    assert!(loaded.drafter.is_none());
    let ids = [17, 300, 4000, 5];
    let from_directory = append(&mut model(&ModelFiles::Directory(dir), 1, 64), 0, &ids);
    assert_eq!(bits(&from_directory), bits(&append(&mut tiny_model(1), 0, &ids)));
}

#[test]
fn random_weights_need_a_configuration_alone_and_follow_their_seed() {
    let dir = tempfile::tempdir().unwrap();
    let config = embedded::target().require("config.json").unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let files = ModelFiles::Directory(dir.path().to_path_buf());
    let logits = |seed| {
        let options = LoadOptions { random_weights: Some(seed), slots: 1, ..LoadOptions::default() };
        append(&mut load_target(&files, &options).unwrap(), 0, &[17, 300, 4000, 5])
    };
    let one = logits(1);
    assert!(one.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|logit| logit.is_finite()));
    assert_eq!(bits(&one), bits(&logits(1)));
    assert_ne!(bits(&one), bits(&logits(2)));
}

#[test]
fn impossible_options() {
    let error = |options: LoadOptions| load_target(&embedded::target(), &options).unwrap_err().to_string();
    let defaults = LoadOptions::default;
    let long = LoadOptions { context_len: Some(4096), ..defaults() };
    let wanted = "load options: context_len: expected 1 to max_position_embeddings = 2048, got 4096";
    assert_eq!(error(long), wanted);
    let none = LoadOptions { slots: 0, ..defaults() };
    assert_eq!(error(none), "model options: slots: expected at least 1, got 0");
    let device = LoadOptions { device: "cuda:x".into(), ..defaults() };
    assert_eq!(error(device), "device: cuda:x: expected cpu, cuda or cuda:N");
}

#[test]
fn a_device_that_is_not_there() {
    let options = LoadOptions { device: "cuda:99".into(), ..LoadOptions::default() };
    let text = load_target(&embedded::target(), &options).unwrap_err().to_string();
    assert!(text.starts_with("device: cuda:99: "), "{text}");
}

#[test]
fn missing_files_are_named() {
    let error = |target: ModelSource| {
        load(&LoadOptions { target, ..LoadOptions::default() }).err().map(|error| error.to_string()).unwrap()
    };
    let text = error(ModelSource::Directory(PathBuf::from("/no/such/dir")));
    assert!(text.starts_with("/no/such/dir/config.json: "), "{text}");
    let text = error(ModelSource::Directory(golden("qwen35-random")));
    assert!(text.contains("qwen35-random/tokenizer.json: "), "{text}");
}

/// A tokenizer with more ids than the model has embeddings cannot be served.
#[test]
fn a_tokenizer_of_another_model() {
    let config = random_model(1).config().clone();
    let text = load_tokenizer(&embedded::target(), &config).unwrap_err().to_string();
    assert_eq!(text, "embedded/target/tokenizer.json: vocab: expected token ids below 512, got 6143");
}
