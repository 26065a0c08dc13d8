//! `canopy` given what nobody should give it: one line that names the flag or field, exit code 1 or 2, no panic.

use std::process::Command;

use crate::drafter_golden::golden_dir;

/// The exit code and the first line of stderr.
fn refusal(args: &[&str]) -> (i32, String) {
    let command = Command::new(env!("CARGO_BIN_EXE_canopy")).args(args).env("RUST_BACKTRACE", "1").output();
    let output = command.unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    let code = output.status.code().unwrap();
    assert!(code == 2 || stderr.trim_end().lines().count() == 1, "{args:?}: {stderr}");
    (code, stderr.lines().next().unwrap_or_default().to_owned())
}

#[track_caller]
fn refused(args: &[&str], code: i32, text: &str) {
    let (got, line) = refusal(args);
    assert!(got == code && line.starts_with("error: ") && line.contains(text), "{args:?}: {got}, {line}");
}

#[test]
fn numbers_out_of_range_name_their_flag() {
    for (flag, value, code, text) in [
        ("--max-tokens", "0", 1, "max_tokens: expected at least 1, got 0"),
        ("--max-tokens", "-5", 2, "'-5' for '--max-tokens"),
        ("--max-tokens", "99999999999999999999999", 2, "for '--max-tokens"),
        ("--temperature", "-1", 1, "temperature: expected a finite number of 0 or above"),
        ("--temperature", "nan", 1, "temperature: expected a finite number of 0 or above"),
        ("--top-p", "2", 1, "top_p: expected"),
        ("--top-k", "-1", 2, "'-1' for '--top-k"),
        ("--seed", "-1", 2, "'-1' for '--seed"),
        ("--budget", "100000", 1, "budget: expected at most 255"),
        ("--threads", "0", 2, "'0' for '--threads"),
        ("--context", "0", 1, "context_len: expected 1 to"),
        ("--stop", "", 1, "stop: expected"),
        ("--mode", "bush", 2, "mode: expected ar, chain, tree or auto, got bush"),
    ] {
        refused(&["generate", "hi", flag, value], code, text);
    }
    refused(&["generate", ""], 1, "prompt: expected at least one token");
    let long = "a".repeat(60_000);
    refused(&["generate", &long], 1, "prompt: expected at most 2047 tokens");
    refused(&["bench", "--limit", "0"], 2, "'0' for '--limit");
    refused(
        &["bench", "--kinds", "nope"],
        1,
        "--kinds: expected some of chat, code, fixed, textbook, got nope",
    );
}

#[test]
fn odd_parent_arrays_name_the_node() {
    for (parents, text) in [
        ("-1,0,5", "node 2 has parent 5"),
        ("0,0,0", "node 0 has parent 0"),
        ("-1,-1,0", "node 1 has parent -1"),
        ("-1,0,-2", "node 2 has parent -2"),
        ("-1,2,0", "node 1 has parent 2"),
        ("-1,0", "tokens: expected one token for each of the tree's 2 nodes, got 3"),
    ] {
        let args = ["--tree-tokens", "4,5,6", "--tree-parents", parents, "--out", "out.safetensors"];
        refused(&[&["logits", "--ids", "1,2,3"], &args[..]].concat(), 1, text);
    }
    let path = |path: &str, text: &str| {
        let args =
            ["--tree-tokens", "4,5", "--tree-parents", "-1,0", "--out", "out.safetensors", "--path", path];
        refused(&[&["logits"], &args[..]].concat(), if path == "0,-1" { 2 } else { 1 }, text);
    };
    path("1", "entry 0 is node 1");
    path("0,7", "entry 1 is node 7");
    path("0,-1", "for '--path");
    refused(&["logits", "--ids", "-1", "--out", "out.safetensors"], 2, "'-1' for '--ids");
}

#[test]
fn damaged_and_foreign_files_are_named() {
    let model = golden_dir("qwen35-random");
    let dir = tempfile::tempdir().unwrap();
    let at = |file: &str| dir.path().join(file);
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let run = |text: &str| {
        let out = at("out");
        let args =
            ["logits", "--model", dir.path().to_str().unwrap(), "--ids", "1", "--out", out.to_str().unwrap()];
        refused(&args, 1, text);
    };
    std::fs::write(at("config.json"), &config).unwrap();
    run("safetensors");
    for (cut, what) in [
        (0, "empty"),
        (7, "a part of the length"),
        (100, "a part of the header"),
        (weights.len() / 2, "half"),
    ] {
        std::fs::write(at("model.safetensors"), &weights[..cut]).unwrap();
        println!("{what}");
        run("model.safetensors");
    }
    let mut huge = weights.clone();
    huge[..8].fill(0xff);
    std::fs::write(at("model.safetensors"), &huge).unwrap();
    run("model.safetensors");
    std::fs::write(at("model.safetensors"), &weights).unwrap();
    for (from, to, text) in [
        ("\"hidden_size\"", "\"hidden_sighs\"", "hidden_size"),
        ("{", "[", "config.json"),
        ("\"head_dim\":", "\"head_dim\": -3, \"was\":", "head_dim"),
        ("\"head_dim\":", "\"head_dim\": 1e30, \"was\":", "head_dim"),
        ("\"head_dim\":", "\"head_dim\": 48, \"was\":", "expected"),
        ("\"num_hidden_layers\":", "\"num_hidden_layers\": 4000000000, \"was\":", "num_hidden_layers"),
    ] {
        let changed = config.replacen(from, to, 1);
        assert_ne!(changed, config, "{from}");
        std::fs::write(at("config.json"), changed).unwrap();
        run(text);
    }
    std::fs::write(at("config.json"), b"\xff\xfe{}").unwrap();
    run("config.json");
}

#[test]
fn every_help_has_an_example() {
    for command in [
        &[][..],
        &["generate"],
        &["bench"],
        &["tree"],
        &["logits"],
        &["draft"],
        &["drift"],
        &["goldens"],
        &["soak"],
        &["sizes"],
        &["chart"],
    ] {
        let help = Command::new(env!("CARGO_BIN_EXE_canopy")).args(command).arg("--help").output().unwrap();
        let text = String::from_utf8(help.stdout).unwrap();
        let (_, example) = text.split_once("Example").unwrap_or_else(|| panic!("{command:?}: {text}"));
        assert!(example.contains("canopy "), "{command:?}: {text}");
    }
}
