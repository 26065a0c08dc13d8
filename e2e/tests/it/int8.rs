//! int8 weights: what they do to predictions and drafts. On the CPU they have the values that CUDA's have.

use canopy_e2e::embedded;
use canopy_e2e::engine::{Engine, EngineConfig, GenerateRequest, Mode};
use canopy_e2e::loader::{LoadOptions, WeightDtype, load, load_target, load_tokenizer};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::Target;

use crate::embedded::{AR, DRAFTED, ids, prompts, run};
use crate::support::{append, floats};

fn target(dtype: WeightDtype) -> Qwen35 {
    let options = LoadOptions { slots: 1, context_len: Some(600), dtype, ..LoadOptions::default() };
    load_target(&embedded::target(), &options).unwrap()
}

/// Best token and -ln p of the given next token, of every row but the last.
fn predictions(target: &mut Qwen35, tokens: &[u32]) -> Vec<(usize, f64)> {
    target.reset(0).unwrap();
    let vocab = target.vocab_size();
    let mut all = Vec::new();
    for (chunk, next) in tokens[..tokens.len() - 1].chunks(128).zip(tokens[1..].chunks(128)) {
        let logits = floats(&append(target, 0, chunk));
        for (row, &next) in logits.chunks(vocab).zip(next) {
            let best = (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            let sum: f64 = row.iter().map(|&x| f64::from(x - row[best]).exp()).sum();
            all.push((best, sum.ln() - f64::from(row[next as usize] - row[best])));
        }
    }
    all
}

#[test]
fn predictions_are_nearly_those_of_the_stored_weights() {
    let (mut stored, mut int8) = (target(WeightDtype::Stored), target(WeightDtype::Int8));
    let tokenizer = load_tokenizer(&embedded::target(), stored.config()).unwrap();
    let (mut rows, mut same, mut loss) = (0usize, 0usize, [0f64; 2]);
    for text in ["code", "chat", "textbook"].iter().flat_map(|kind| prompts(kind, 6)) {
        let tokens = tokenizer.encode(&text).unwrap();
        if tokens.len() < 2 {
            continue;
        }
        let (a, b) = (predictions(&mut stored, &tokens), predictions(&mut int8, &tokens));
        rows += a.len();
        same += a.iter().zip(&b).filter(|(a, b)| a.0 == b.0).count();
        loss[0] += a.iter().map(|row| row.1).sum::<f64>();
        loss[1] += b.iter().map(|row| row.1).sum::<f64>();
    }
    let ([stored, int8], agreement) = (loss.map(|sum| sum / rows as f64), same as f64 / rows as f64);
    eprintln!(
        "int8: {rows} tokens, perplexity {:.4} against {:.4}, best token equal in {:.2} %",
        int8.exp(),
        stored.exp(),
        100.0 * agreement
    );
    assert!(rows > 300, "{rows}");
    assert!(int8 - stored < 0.01, "loss {int8} against {stored}");
    assert!(agreement > 0.96, "{agreement}");
}

/// The text of every mode is the target's own, whatever the drafter's weights.
#[test]
fn drafts_through_int8_weights_change_no_text() {
    let engine = |dtype, drafter_dtype| {
        let options = LoadOptions {
            dtype,
            drafter_dtype: Some(drafter_dtype),
            context_len: Some(512),
            ..LoadOptions::default()
        };
        let loaded = load(&options).unwrap();
        let tokenizer = loaded.tokenizer;
        let config = EngineConfig::default();
        (Engine::new(loaded.target, loaded.drafter, tokenizer.clone(), config).unwrap(), tokenizer)
    };
    for dtype in [WeightDtype::Stored, WeightDtype::Int8] {
        let (mut stored, tokenizer) = engine(dtype, WeightDtype::Stored);
        let (mut int8, _) = engine(dtype, WeightDtype::Int8);
        let request = |text: &String| GenerateRequest::new(tokenizer.encode(text).unwrap(), 64);
        let requests: Vec<GenerateRequest> = prompts("fixed", 6).iter().map(request).collect();
        let plain = run(&mut stored, &requests, AR);
        for speculation in DRAFTED {
            let [a, b] = [&mut stored, &mut int8].map(|engine| run(engine, &requests, speculation));
            let rounds = |all: &[canopy_e2e::engine::Generation]| {
                all.iter().map(|got| got.stats.rounds).sum::<usize>()
            };
            for ((plain, a), b) in plain.iter().zip(&a).zip(&b) {
                assert_eq!(ids(plain), ids(b), "{dtype:?}, {speculation:?}");
                assert_eq!(ids(plain), ids(a), "{dtype:?}, {speculation:?}");
            }
            let (a, b) = (rounds(&a) as f64, rounds(&b) as f64);
            // `auto` follows the clock
            assert!(
                speculation.mode == Mode::Auto || b < 1.1 * a + 4.0,
                "{dtype:?}, {speculation:?}: {b} rounds against {a}"
            );
        }
    }
}
