//! Properties of the best tokens, against a full sort in float64.

use super::cpu::forward;
use super::{Row, oracle, row_words};
use crate::test_support::{refusal, values};

fn run(vocab: usize, k: usize, logits: &[f32]) -> Vec<u32> {
    let mut out = vec![u32::MAX; logits.len() / vocab * row_words(k)];
    forward(vocab, k, logits, &mut out).unwrap();
    out
}

#[test]
fn rows_equal_the_oracle() {
    for (seed, vocab) in [1, 5, 16, 127, 128, 129, 1000, 6144, 70_001].into_iter().enumerate() {
        let mut logits = values(seed as u64, 2 * vocab, 9.0);
        if vocab > 600 {
            (logits[600], logits[vocab - 1]) = (logits[3], logits[3]);
        }
        for k in [1, 2, 15, 64, vocab].into_iter().filter(|&k| k <= vocab.min(1000)) {
            let out = run(vocab, k, &logits);
            for (words, logits) in out.chunks(row_words(k)).zip(logits.chunks(vocab)) {
                let row = Row::new(words).unwrap();
                let (best, ln_sum) = oracle::row(logits);
                assert!(row.is_finite() && row.is_distribution());
                assert_eq!(row.best().collect::<Vec<_>>(), best[..k], "vocab {vocab}, k {k}");
                assert!((f64::from(row.ln_sum()) - ln_sum).abs() < 1e-6, "vocab {vocab}");
            }
        }
    }
}

#[test]
fn equal_logits_rank_by_token() {
    let tokens = |logits: &[f32], k: usize| -> Vec<u32> {
        let out = run(logits.len(), k, logits);
        Row::new(&out).unwrap().best().map(|(token, _)| token).collect()
    };
    assert_eq!(tokens(&[0.25; 6144], 40), (0..40).collect::<Vec<u32>>());
    assert_eq!(tokens(&[0.0, -0.0, 1.0, 0.0], 4), [2, 0, 1, 3]);
    let out = run(2, 2, &[-0.0, 0.0]);
    assert!(Row::new(&out).unwrap().best().next().unwrap().1.is_sign_negative());
}

#[test]
fn rows_alone_equal_rows_together() {
    let logits = values(3, 7 * 500, 5.0);
    let together = run(500, 9, &logits);
    for (row, logits) in logits.chunks(500).enumerate() {
        assert_eq!(run(500, 9, logits), together[row * row_words(9)..][..row_words(9)]);
    }
}

#[test]
fn nonfinite_logits_are_flagged() {
    let clean = values(4, 3 * 500, 5.0);
    let together = run(500, 3, &clean);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = clean.clone();
        logits[500 + 77] = bad;
        let out = run(500, 3, &logits);
        let words = row_words(3);
        assert_eq!(out[..words], together[..words]);
        assert_eq!(out[2 * words..], together[2 * words..]);
        let row = Row::new(&out[words..2 * words]).unwrap();
        assert!(!row.is_finite());
        assert_eq!(row.is_distribution(), bad == f32::NEG_INFINITY);
        assert_eq!(row.ln_sum().is_nan(), bad != f32::NEG_INFINITY);
        if bad != f32::NEG_INFINITY {
            assert_eq!(row.best().next().unwrap().0, 77);
        }
    }
    let out = run(4, 2, &[f32::NEG_INFINITY; 4]);
    let row = Row::new(&out).unwrap();
    assert!(!row.is_distribution() && row.ln_sum().is_nan());
    assert_eq!(row.best().map(|(token, _)| token).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn refusals_name_the_argument() {
    let mut out = [0; 16];
    let mut said = |vocab, k, logits: usize, len: usize| {
        refusal(forward(vocab, k, &[0.0; 9][..logits], &mut out[..len]))
    };
    assert_eq!(said(0, 1, 8, 8), "top-tokens: vocab, expected: at least 1, got: 0");
    assert_eq!(said(4, 0, 8, 8), "top-tokens: k, expected: from 1 to the vocabulary's 4, got: 0");
    assert_eq!(said(4, 5, 8, 8), "top-tokens: k, expected: from 1 to the vocabulary's 4, got: 5");
    assert_eq!(said(4, 1, 9, 8), "top-tokens: logits, expected: [2, 4], got: [9]");
    assert_eq!(said(4, 1, 8, 7), "top-tokens: out, expected: [2, 4], got: [7]");
    assert_eq!(refusal(Row::new(&[1, 2]).map(|_| ())), "top-tokens: row, expected: 2 + 2 k words, got: 2");
}
