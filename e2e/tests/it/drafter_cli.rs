//! `canopy draft` and `canopy tree`: files and text out, against the stored vectors and against the library.

use std::path::Path;
use std::process::{Command, Output};

use candle_core::Tensor;
use canopy_e2e::loader::{LoadOptions, load};
use canopy_e2e::target::Target;
use canopy_e2e::tree::{BuildOptions, build_ddtree};

use crate::drafter_golden::{Golden, check, golden, golden_dir, ids};

fn canopy(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_canopy")).args(args).output().expect("the binary runs")
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn draft(args: &[&str], out: &Path) -> Golden {
    let output = canopy(&[&["draft"], args, &["--out", out.to_str().expect("UTF-8")]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    candle_core::safetensors::load(out, &candle_core::Device::Cpu).expect("safetensors")
}

fn fails(args: &[&str]) -> String {
    let output = canopy(args);
    assert!(!output.status.success());
    String::from_utf8(output.stderr).expect("UTF-8")
}

fn random_pair_args(drafter: &str) -> Vec<String> {
    let dir = |set: &str| golden_dir(set).display().to_string();
    ["--model".into(), dir("qwen35-random"), "--drafter".into(), dir(drafter)].to_vec()
}

#[test]
fn draft_writes_the_stored_vectors() {
    let dir = tempfile::tempdir().expect("directory");
    for set in ["dflash-random-old", "dflash-random-new"] {
        let golden = golden(&format!("{set}/reference.safetensors"));
        let text = [ids(&golden, "r0_ctx_ids"), ids(&golden, "r0_block_ids")[..1].to_vec()].concat();
        let (pair, text) = (random_pair_args(set), join(&text));
        let mut args: Vec<&str> = pair.iter().map(String::as_str).collect();
        args.extend(["--ids", &text]);
        let out = draft(&args, &dir.path().join("out.safetensors"));
        let taps = golden["r0_tap_hidden"].transpose(0, 1).and_then(|t| t.contiguous()).expect("copy");
        check("features", &out["features"], &taps.flatten_from(1).expect("flat"), 1e-3);
        check("context_features", &out["context_features"], &golden["r0_ctx_features"], 1e-3);
        check("logits", &out["logits"], &golden["r0_logits"], 1e-3);
    }
}

#[test]
fn draft_writes_the_stored_tree() {
    let dir = tempfile::tempdir().expect("directory");
    let golden = golden("rounds-random/tree.safetensors");
    let text = join(&[ids(&golden, "prompt"), ids(&golden, "r0_anchor")].concat());
    let pair = random_pair_args("dflash-random-new");
    let mut args: Vec<&str> = pair.iter().map(String::as_str).collect();
    args.extend(["--ids", &text, "--budget", "15"]);
    let out = draft(&args, &dir.path().join("out.safetensors"));
    let column = |column: usize| -> Vec<i64> {
        out["tree"].narrow(1, column, 1).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1()).expect("i64")
    };
    for (index, name) in ["r0_tokens", "r0_parents", "r0_depth"].into_iter().enumerate() {
        assert_eq!(column(index), golden[name].to_vec1::<i64>().expect("i64"), "{name}");
    }
    check("log_prob", &out["log_prob"], &golden["r0_joint_logprob"], 1e-3);
}

#[test]
fn draft_of_a_root_alone() {
    let dir = tempfile::tempdir().expect("directory");
    let out = draft(&["--ids", "565", "--budget", "0"], &dir.path().join("out.safetensors"));
    assert_eq!(out["features"].dims(), [0, 1024]);
    assert_eq!(out["logits"].dims(), [15, 6144]);
    assert_eq!(out["tree"].to_vec2::<i64>().expect("i64"), [[565, -1, 0]]);
    assert_eq!(out["log_prob"].to_vec1::<f32>().expect("f32"), [0.0]);
}

#[test]
fn draft_names_what_is_wrong() {
    let model = golden_dir("qwen35-random").display().to_string();
    let out = ["--out", "never.safetensors"];
    for (args, want) in [
        (&["--ids", "1,6144"][..], "tokens: expected token ids below the vocabulary's 6144, got 6144"),
        (&["--ids", "1,2", "--budget", "256"], "--budget"),
        (&["--ids", "1,x"], "--ids"),
        (&["--ids", "1,2", "--model", &model], "--drafter: expected a drafter for this model, got none"),
        (&[], "--ids"),
    ] {
        let error = fails(&[&["draft"], args, &out].concat());
        assert!(error.contains(want), "{error}\nexpected: {want}");
    }
    let error =
        fails(&["draft", "--ids", "1,2", "--model", &model, "--drafter", "embedded", "--out", "never"]);
    assert!(error.contains("hidden_size: expected the target's 64, got 256"), "{error}");
}

/// The tree that the first round after `prompt` drafts, from the library.
fn first_tree(prompt: &str, budget: usize) -> (canopy_e2e::tree::CandidateTree, Vec<String>) {
    let mut pair = load(&LoadOptions { slots: 1, ..LoadOptions::default() }).expect("the embedded pair");
    let tokens = pair.tokenizer.encode(prompt).expect("tokens");
    let chain = canopy_kernels::DraftTree::chain(tokens.len()).expect("chain");
    let stream = canopy_e2e::target::VerifyStream {
        slot: 0,
        tokens: tokens.clone(),
        tree: chain,
        logits: canopy_e2e::target::LogitRows::Last,
    };
    let verified = Target::verify(&mut *pair.target, &[stream]).expect("verify");
    let mut drafter = pair.drafter.expect("a drafter");
    drafter.extend(0, &verified.features.expect("taps")).expect("extend");
    let root = verified.logits.expect("a row").argmax(1).and_then(|t| t.to_vec1::<u32>()).expect("argmax")[0];
    let request = canopy_e2e::draft::DraftRequest { slot: 0, root, horizon: 15 };
    let logits: Tensor = drafter.draft(&[request]).expect("draft").remove(0);
    let rows: Vec<f32> = logits.flatten_all().and_then(|t| t.to_vec1()).expect("f32");
    let tree = build_ddtree(&rows, 6144, root, BuildOptions { budget, ..Default::default() }).expect("tree");
    let texts = tree.tokens().iter().map(|&id| format!("{:?}", pair.tokenizer.token_text(id))).collect();
    (tree, texts)
}

#[test]
fn tree_prints_every_node_with_its_probabilities() {
    let prompt = "def add(a, b):\n    \"\"\"";
    let output = canopy(&["tree", "--budget", "12", prompt]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines: Vec<&str> = text.lines().collect();
    let (tree, texts) = first_tree(prompt, 12);
    assert_eq!(lines.len(), 1 + 12 + 2, "{text}");
    assert!(lines[0].starts_with(&format!("* {}", texts[0])), "{text}");
    for (node, text_of_node) in texts.iter().enumerate().take(13).skip(1) {
        let joint = 100.0 * tree.joint_log_probs()[node].exp();
        let right = format!("{:5.1} %  {joint:5.1} %", 100.0 * tree.prob(node));
        let found = lines.iter().any(|line| line.contains(text_of_node) && line.ends_with(&right));
        assert!(found, "no line for {text_of_node} {right}\n{text}");
    }
    let marked = lines[..13].iter().filter(|line| line.starts_with('*')).count();
    assert!(lines[13].contains(&format!("12 drafted nodes, {} accepted", marked - 1)), "{text}");
    let expected: f64 = tree.joint_log_probs().iter().map(|joint| joint.exp()).sum();
    assert!(lines[14].starts_with(&format!("tokens gained: {marked};")), "{text}");
    assert!(lines[14].ends_with(&format!(": {expected:.1}")), "{text}");
    let chain = canopy(&["tree", "--chain", "--budget", "12", prompt]);
    let chain = String::from_utf8(chain.stdout).expect("UTF-8");
    assert_eq!(chain.lines().count(), 1 + 12 + 2, "{chain}");
    assert!(chain.lines().take(13).all(|line| !line.contains("├─")), "{chain}");
}

#[test]
fn tree_names_what_is_wrong() {
    assert!(fails(&["tree", ""]).contains("PROMPT: expected at least one token"));
    assert!(fails(&["tree", "--round", "0", "x"]).contains("--round"));
    assert!(fails(&["tree", "--budget", "300", "x"]).contains("--budget"));
}

#[test]
fn help_has_a_worked_example() {
    for command in ["draft", "tree"] {
        let help = String::from_utf8(canopy(&[command, "--help"]).stdout).expect("UTF-8");
        assert!(help.contains("Example") && help.contains(&format!("canopy {command} ")), "{help}");
    }
}
