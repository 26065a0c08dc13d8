//! The commands that measure: `bench --prompt-tokens`, `chart`, `drift`, `goldens`, `sizes`, `soak`.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::{golden, save, tensors};

fn canopy(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_canopy")).args(args).output().unwrap()
}

fn runs(args: &[&str]) -> String {
    let output = canopy(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn fails(args: &[&str]) -> String {
    let output = canopy(args);
    assert!(!output.status.success(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn rows(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A random pair of small sizes, without a tokenizer.
fn random_pair() -> Vec<String> {
    let dir = |set: &str| golden(set).display().to_string();
    let args =
        ["--model", &dir("qwen35-random"), "--drafter", &dir("dflash-random-new"), "--random-weights", "3"];
    args.map(str::to_owned).to_vec()
}

#[test]
fn a_matrix_of_random_weights_states_its_acceptance_in_every_output() {
    let dir = tempfile::tempdir().unwrap();
    let (json, svg) = (dir.path().join("matrix.jsonl"), dir.path().join("matrix.svg"));
    let pair = random_pair();
    let mut args: Vec<&str> = vec!["bench"];
    args.extend(pair.iter().map(String::as_str));
    args.extend(["--prompt-tokens", "70,90", "--batch", "1,3", "--rounds", "40", "--repeats", "1"]);
    args.extend(["--synthetic-acceptance", "3.5", "--json", json.to_str().unwrap()]);
    let output = runs(&args);
    assert!(output.contains("synthetic acceptance") && output.contains("a slot of"), "{output}");
    let rows = rows(&json);
    assert_eq!(rows.len(), 2 * 2 * 4);
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(row["synthetic"]["acceptance"], 3.5);
        assert!(row["synthetic_line"].as_str().unwrap().starts_with("synthetic"));
        assert!(number("tokens_per_s") > 0.0 && number("ms_round") > 0.0);
        let all = number("tokens_per_s_stream") * number("streams");
        assert!((all / number("tokens_per_s") - 1.0).abs() < 1e-9, "{row}");
        assert!(row["stages_ms_round"]["verify"].as_f64().unwrap() > 0.0);
        match row["mode"].as_str().unwrap() {
            "ar" => {
                assert_eq!((number("acceptance_length"), number("plain_share")), (1.0, 1.0));
                assert!(number("first_token_ms") > 0.0 && number("prompt_tokens_per_s") > 0.0);
            }
            "chain" => assert!((number("acceptance_length") - 3.5).abs() < 1.2, "{row}"),
            _ => {}
        }
    }
    // Seeds, not clocks, decide what is accepted.
    let again = dir.path().join("again.jsonl");
    let last = args.len() - 1;
    args[last] = again.to_str().unwrap();
    runs(&args);
    let lengths = |rows: &[Value]| -> Vec<String> {
        let fixed = rows.iter().filter(|row| row["mode"] != "auto");
        fixed.map(|row| row["acceptance_length"].to_string()).collect()
    };
    assert_eq!(lengths(&rows), lengths(&self::rows(&again)));

    let table = runs(&["chart", json.to_str().unwrap(), "--out", svg.to_str().unwrap()]);
    assert!(table.contains("| 90 | 3 | tree |") && table.contains("synthetic acceptance"), "{table}");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("synthetic acceptance") && svg.contains(">auto<"));
    // Two contexts by streams, two numbers of streams by context, four modes each.
    assert_eq!(svg.matches("<polyline").count(), 4 * 4);
}

#[test]
fn synthetic_acceptance_needs_a_drafter_and_random_prompts() {
    assert!(fails(&["bench", "--synthetic-acceptance", "3"]).contains("--prompt-tokens"));
    let model = golden("qwen35-random").display().to_string();
    let args = ["generate", "--model", &model, "--random-weights", "1", "--prompt-tokens", "4"];
    assert!(fails(&[&args[..], &["--synthetic-curve", "0.5"]].concat()).contains("drafter"));
    let args = ["generate", "--model", &model, "--random-weights", "1", "some text"];
    assert!(fails(&args).contains("tokenizer.json"));
    let pair = random_pair();
    let mut args: Vec<&str> = vec!["generate"];
    args.extend(pair.iter().map(String::as_str));
    args.extend(["--prompt-tokens", "5", "--max-tokens", "6", "--json", "--synthetic-curve", "0.9,0.5"]);
    let answer: Value = serde_json::from_str(&runs(&args)).unwrap();
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 6);
    assert!(answer["synthetic"].as_str().unwrap().contains("0.900,0.500"));
}

#[test]
fn draft_trees_leave_no_drift() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("drift.jsonl");
    let args = ["drift", "--tokens", "120", "--nodes", "12"];
    // The walk has the bits of plain decoding.
    runs(&[&args[..], &["--bound", "0", "--json", json.to_str().unwrap()]].concat());
    let row = rows(&json).remove(0);
    assert_eq!(row["other_picks"], 0);
    assert!(row["rounds"].as_u64().unwrap() < 100);
    // One triangular solve does not, and stays close.
    let solve = [&args[..], &["--variant", "solve"]].concat();
    let output = runs(&solve);
    assert!(output.contains("state") && output.contains("conv_state"), "{output}");
    assert!(fails(&[&solve[..], &["--bound", "0"]].concat()).contains("expected at most 0"));
    let model = golden("qwen35-random").display().to_string();
    runs(&["drift", "--model", &model, "--random-weights", "2", "--prompt-tokens", "9", "--tokens", "50"]);
}

#[test]
fn the_stored_vectors_are_compared_and_a_wrong_one_is_found() {
    let dir = golden("").display().to_string();
    let output = runs(&["goldens", &dir]);
    assert_eq!(output.matches(": ok").count(), 10, "{output}");
    let wrong = tempfile::tempdir().unwrap();
    let sets = [
        "canopy-tiny",
        "dflash-tiny",
        "qwen35-random",
        "dflash-random-old",
        "dflash-random-new",
        "rounds-random",
    ];
    for set in sets {
        std::fs::create_dir(wrong.path().join(set)).unwrap();
        for file in std::fs::read_dir(golden(set)).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), wrong.path().join(set).join(file.file_name())).unwrap();
        }
    }
    let path = wrong.path().join("canopy-tiny/golden.safetensors");
    let mut changed = tensors(&path);
    let logits = (&changed["p1.logits"] * 1.001).unwrap();
    changed.insert("p1.logits".into(), logits);
    save(&changed, &path);
    let message = fails(&["goldens", wrong.path().to_str().unwrap()]);
    assert!(message.contains("canopy-tiny logits") && !message.contains("texts"), "{message}");
}

#[test]
fn tokens_of_another_run_are_compared_and_a_difference_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let args = ["bench", "--kinds", "fixed", "--limit", "2", "--max-tokens", "24", "--repeats", "1"];
    runs(&[&args[..], &["--modes", "tree", "--keep-tokens", &path("tokens.json")]].concat());
    let against = |file: &str, more: &[&str]| {
        canopy(&[&args[..], &["--modes", "ar,chain", "--against", &path(file)], more].concat())
    };
    let same = against("tokens.json", &[]);
    let output = String::from_utf8(same.stdout).unwrap();
    assert!(same.status.success() && output.contains("2 of 2 prompts have the same tokens"), "{output}");
    let mut kept: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("tokens.json")).unwrap()).unwrap();
    kept[1]["tokens"][7] = 0.into();
    std::fs::write(dir.path().join("changed.json"), kept.to_string()).unwrap();
    let changed = against("changed.json", &["--json", &path("rows.jsonl")]);
    let output = String::from_utf8(changed.stdout).unwrap();
    assert!(output.contains("fixed: token 7 differs, the best two "), "{output}");
    let row = rows(&dir.path().join("rows.jsonl")).pop().unwrap();
    assert_eq!((row["case"].as_str(), row["at"].as_u64()), (Some("e2e.difference"), Some(7)));
    // no rounding closes the gap of a token that the model is sure of
    let gap = row["top2_gap"].as_f64().unwrap();
    assert_eq!(changed.status.success(), gap <= 0.1, "{gap}");
    kept.as_array_mut().unwrap().remove(0);
    std::fs::write(dir.path().join("short.json"), kept.to_string()).unwrap();
    let message = String::from_utf8(against("short.json", &[]).stderr).unwrap();
    assert!(message.contains("--against: expected the fixed prompt"), "{message}");
    let message = String::from_utf8(against("nothing.json", &[]).stderr).unwrap();
    assert!(message.contains("--against") && message.contains("nothing.json"), "{message}");
}

#[test]
fn memory_is_watched_over_many_requests() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("soak.jsonl");
    let args =
        ["soak", "--requests", "20", "--max-tokens", "8", "--prompt-tokens", "40", "--growth-mib", "200"];
    let output = runs(&[&args[..], &["--json", json.to_str().unwrap()]].concat());
    assert!(output.contains("160 tokens"), "{output}");
    let row = rows(&json).remove(0);
    assert_eq!((row["tokens"].as_u64(), row["memory_bytes"].as_array().unwrap().len()), (Some(160), 11));
}

#[test]
fn sizes_come_from_the_configurations_alone() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/models/qwen3.5-9b");
    let output =
        runs(&["sizes", "--model", dir, "--drafter", &format!("{dir}/drafter"), "--contexts", "32768"]);
    assert!(
        output.contains("(8953803264 parameters)") && output.contains("(1291904512 parameters)"),
        "{output}"
    );
    assert!(output.contains("16 slots of  32768"), "{output}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_reader_that_has_gone_or_a_full_disk_ends_a_command_without_a_panic() {
    let run = |out: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_canopy"));
        let done = command.args(["sizes", "--slots", "1"]).stdout(out).output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(run(writer.into()), (Some(141), String::new()));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (code, message) = run(full.into());
    assert!(code == Some(1) && message.starts_with("error: standard output: No space left"), "{message}");
}

#[test]
fn flags_that_would_not_be_looked_at_are_refused() {
    for args in [
        &["bench", "--batch", "2"][..],
        &["bench", "--no-stages"],
        &["bench", "--rounds", "3"],
        &["bench", "--prompt-tokens", "8", "--limit", "2"],
        &["bench", "--prompt-tokens", "8", "--max-tokens", "2"],
    ] {
        let message = fails(args);
        assert!(message.contains("--prompt-tokens"), "{args:?}: {message}");
    }
    let message = fails(&["rounds", "--context-tokens", "5000"]);
    assert!(message.contains("--context-tokens: expected at most"), "{message}");
    let message = fails(&["rounds", "--nodes", "300"]);
    assert!(message.contains("--nodes: expected 1 to 256, got 300"), "{message}");
    assert!(fails(&["bench", "--limit", "0"]).contains("expected a whole number from 1"));
}
