//! `canopy logits`: files in and files out, against the golden rounds and against the library.

use std::path::Path;
use std::process::{Command, Output};

use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, WeightDtype, load_target};
use canopy_e2e::target::Target;
use canopy_kernels::DraftTree;
use serde_json::json;

use crate::support::*;

fn canopy(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_canopy")).args(args).output().unwrap()
}

fn join<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

fn run(args: &[&str], out: &Path) -> Tensors {
    let output = canopy(&[&["logits"], args, &["--out", out.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tensors(out)
}

fn fails(args: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let output = canopy(&[&["logits"], args, &["--out", out.to_str().unwrap()]].concat());
    assert!(!output.status.success() && !out.exists());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_text_a_tree_and_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let ids = [260, 751, 12, 9, 33];
    let (tokens, parents, path) = ([4, 5, 6, 7], [-1, 0, 0, 2], [0, 2, 3]);
    let out = run(
        &[
            "--ids",
            &join(&ids),
            "--chunk",
            "2",
            "--tree-tokens",
            &join(&tokens),
            "--tree-parents",
            &join(&parents),
            "--path",
            &join(&path),
        ],
        &dir.path().join("out.safetensors"),
    );
    let mut target = tiny_model(1);
    assert_eq!(bits(&out["logits"]), bits(&append(&mut target, 0, &ids)));
    assert_eq!(out["logits"].dims(), [5, 6144]);
    let tree = DraftTree::new(parents.to_vec()).unwrap();
    assert_eq!(bits(&out["tree_logits"]), bits(&verify(&mut target, stream(0, &tokens, tree))));
    target.commit(&[path.to_vec()]).unwrap();
    let states = target.state_tensors(0).unwrap();
    assert_eq!(out.len(), 2 + states.len());
    for (name, tensor) in states {
        assert_eq!(out[&name].dims(), tensor.dims());
        assert_eq!(bits(&out[&name]), bits(&tensor), "{name}");
    }
    assert_eq!(out["layer3.k"].dims(), [8, 2, 256]);
    assert_eq!(out["layer0.state"].dims(), [4, 128, 128]);
    assert_eq!(out["layer0.conv_state"].dims(), [3, 1024]);
}

#[test]
fn golden_rounds_from_a_file() {
    let golden_rounds = tensors(golden("qwen35-random/spec_rounds.safetensors"));
    let dir = tempfile::tempdir().unwrap();
    let rounds: Vec<_> = (0..3)
        .map(|r| {
            let list = |part: &str| ints::<i64>(&golden_rounds[&format!("r{r}_{part}")]);
            json!({"tokens": list("tokens"), "parents": list("parents"), "path": list("path")})
        })
        .collect();
    let file = dir.path().join("rounds.json");
    std::fs::write(&file, json!(rounds).to_string()).unwrap();
    let model = golden("qwen35-random");
    let prompt = join(&ints::<i64>(&golden_rounds["prompt"]));
    let common = ["--model", model.to_str().unwrap(), "--ids", &prompt, "--rounds", file.to_str().unwrap()];
    for extra in [["--dtype", "f32"], ["--chunk", "5"], ["--variant", "solve"]] {
        let out = run(&[&common[..], &extra].concat(), &dir.path().join("out.safetensors"));
        for round in 0..3 {
            let error = max_abs(
                &out[&format!("round{round}.tree_logits")],
                &golden_rounds[&format!("r{round}_logits")],
            );
            assert!(error < 2e-4, "round {round}: {error}");
        }
        let state = golden_rounds["final_layer6_S"].transpose(1, 2).unwrap();
        assert!(max_abs(&out["layer6.state"], &state) < 1e-4);
        assert!(max_abs(&out["layer7.v"], &golden_rounds["final_layer7_v"]) < 1e-4);
    }
}

#[test]
fn a_tree_alone_and_bf16() {
    let reference = tensors(golden("qwen35-random/reference.safetensors"));
    let dir = tempfile::tempdir().unwrap();
    let model = golden("qwen35-random");
    let tokens = join(&ints::<i64>(&reference["tree_tokens"]));
    let parents = join(&ints::<i64>(&reference["tree_parents"]));
    let args = ["--model", model.to_str().unwrap(), "--tree-tokens", &tokens, "--tree-parents", &parents];
    let out = run(&args, &dir.path().join("a.safetensors"));
    assert_eq!(out.len(), 1);
    assert!(max_abs(&out["tree_logits"], &reference["tree_logits"]) < 2e-4);
    let rounded = run(&[&args[..], &["--dtype", "bf16"]].concat(), &dir.path().join("b.safetensors"));
    let options = LoadOptions { dtype: WeightDtype::Bf16, ..LoadOptions::default() };
    let mut target = load_target(&ModelFiles::Directory(model.clone()), &options).unwrap();
    let tree = DraftTree::new(ints(&reference["tree_parents"])).unwrap();
    let own = verify(&mut target, stream(0, &ints::<u32>(&reference["tree_tokens"]), tree));
    assert_eq!(bits(&rounded["tree_logits"]), bits(&own));
    assert_ne!(bits(&rounded["tree_logits"]), bits(&out["tree_logits"]));
}

#[test]
fn bad_arguments_are_named() {
    assert!(fails(&[]).contains("--ids: expected token ids or a tree, got neither"));
    assert!(fails(&["--ids", "1,x"]).contains("'x' for '--ids"));
    assert!(
        fails(&["--ids", "6144"])
            .contains("tokens: expected token ids below the vocabulary's 6144, got 6144")
    );
    assert!(fails(&["--ids", "1", "--tree-tokens", "1"]).contains("--tree-parents"));
    assert!(
        fails(&["--tree-tokens", "1,2", "--tree-parents", "-1"])
            .contains("tokens: expected one token for each")
    );
    assert!(fails(&["--tree-tokens", "1,2", "--tree-parents", "-1,1"]).contains("node 1 has parent 1"));
    let path = ["--tree-tokens", "1,2,3", "--tree-parents", "-1,0,0", "--path", "0,1,2"];
    assert!(fails(&path).contains("entry 2 is node 2"));
    let long = vec!["1"; 2049].join(",");
    assert!(
        fails(&["--ids", &long])
            .contains("context_len: expected 1 to max_position_embeddings = 2048, got 2049")
    );
    assert!(
        fails(&["--ids", "1", "--model", "/no/such/model"]).contains("expected `embedded`, a directory, or")
    );
    assert!(fails(&["--ids", "1", "--device", "tpu"]).contains("device: tpu: expected cpu, cuda or cuda:N"));
    assert!(fails(&["--ids", "1", "--rounds", "/no/such.json"]).contains("/no/such.json"));

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rounds.json");
    std::fs::write(&file, r#"[{"tokens": [1], "parent": [-1]}]"#).unwrap();
    assert!(fails(&["--ids", "1", "--rounds", file.to_str().unwrap()]).contains("unknown field `parent`"));
}

#[test]
fn help_shows_a_worked_example() {
    let output = canopy(&["logits", "--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("canopy logits --model embedded --ids") && text.contains("A rounds file is a list")
    );
}
