//! Kinds of failure that other software has shown in public and that no other module's subject covers. NOTES.md lists
//! which test holds which case.

use std::io::Write;
use std::sync::{Arc, Mutex};

use canopy_e2e::config::{DraftConfig, TargetConfig};
use canopy_e2e::engine::{GenerateRequest, Mode, Speculation};
use serde_json::Value;

use crate::drafter_golden::golden_dir;
use crate::embedded::{AR, engine, ids, prompts, run};

/// Case 12: prompts as long as the block, one longer, and as long as the budget and its neighbours.
#[test]
fn prompts_as_long_as_the_block_or_the_budget_give_the_plain_text() {
    const BLOCK: usize = 16;
    let (mut engine, tokenizer) = engine(4, Some(512));
    let text = tokenizer.encode(&prompts("code", 8).concat()).unwrap();
    let request = |length: usize| GenerateRequest {
        ignore_eos: true,
        ..GenerateRequest::new(text[..length].to_vec(), 24)
    };
    for budget in [1, 7, BLOCK - 1, 31, 63, 64, 255] {
        let lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, budget - 1, budget, budget + 1];
        let requests: Vec<_> = lengths.into_iter().filter(|&length| length > 0).map(request).collect();
        let plain = run(&mut engine, &requests, AR);
        let chain = Speculation { mode: Mode::Chain, budget: Some(budget.min(BLOCK - 1)) };
        for speculation in [Speculation { mode: Mode::Tree, budget: Some(budget) }, chain] {
            let drafted = run(&mut engine, &requests, speculation);
            for (request, (plain, drafted)) in requests.iter().zip(plain.iter().zip(&drafted)) {
                assert_eq!(ids(plain), ids(drafted), "prompt of {}, {speculation:?}", request.prompt.len());
            }
            assert!(drafted.iter().all(|got| got.stats.nodes > got.stats.rounds), "{speculation:?} drafted");
        }
    }
}

/// Collects what a subscriber writes.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Case 19: the one default that a drafter's config has is told in the log, and nothing is when the key is there.
#[test]
fn default_taps_are_logged_and_given_taps_are_not() {
    let read = |set: &str| std::fs::read(golden_dir(set).join("config.json")).unwrap();
    let target = TargetConfig::from_json("target", &read("qwen35-random")).unwrap();
    let log_of = |config: &Value| {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let config = tracing::subscriber::with_default(subscriber, || {
            DraftConfig::from_json("drafter", config.to_string().as_bytes(), &target).unwrap()
        });
        (config.taps, String::from_utf8(lines.0.lock().unwrap().clone()).unwrap())
    };
    let mut config: Value = serde_json::from_slice(&read("dflash-random-old")).unwrap();
    let (given, log) = log_of(&config);
    assert!(log.is_empty(), "{log}");
    config["dflash_config"].as_object_mut().unwrap().remove("target_layer_ids").unwrap();
    let (taken, log) = log_of(&config);
    assert!(
        log.contains("WARN") && log.contains("target_layer_ids") && log.contains(&format!("{taken:?}")),
        "{log}"
    );
    assert_ne!(given, Vec::<usize>::new());
}
