//! The best tokens of rows of logits: tokens and logits equal to a full sort in every bit, the log-sum-exp within 1e-6 of float64.

use std::sync::Arc;

use canopy_kernels::top_tokens::{self, Row, launch, oracle, row_words};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Random, text};

pub const TESTS: &[(&str, Check)] = &[
    ("top_tokens::rows_equal_a_full_sort", full_sort),
    ("top_tokens::equal_logits_rank_by_token", ties),
    ("top_tokens::rows_alone_equal_rows_together", alone),
    ("top_tokens::nonfinite_logits_are_flagged_as_on_the_cpu", nonfinite),
];

const QWEN: usize = 248_320;

/// The logits start `shift` elements into their allocation.
fn run(
    stream: &Arc<CudaStream>,
    vocab: usize,
    k: usize,
    logits: &[f32],
    shift: usize,
) -> Result<Vec<u32>, String> {
    let rows = logits.len() / vocab;
    let mut all = vec![f32::NAN; shift];
    all.extend_from_slice(logits);
    let all = stream.clone_htod(&all).map_err(text)?;
    let segments = rows * launch::segments(vocab);
    let mut bests = stream.clone_htod(&vec![u64::MAX; segments]).map_err(text)?;
    let mut sums = stream.clone_htod(&vec![f32::NAN; segments]).map_err(text)?;
    let mut out = stream.clone_htod(&vec![u32::MAX; rows * row_words(k)]).map_err(text)?;
    let scratch = launch::Scratch { bests: bests.as_view_mut(), sums: sums.as_view_mut() };
    launch::forward(stream, (vocab, k), &all.slice(shift..), scratch, &mut out.as_view_mut())
        .map_err(text)?;
    stream.clone_dtoh(&out).map_err(text)
}

fn check(vocab: usize, k: usize, logits: &[f32], out: &[u32]) -> Result<(), String> {
    for (index, (words, logits)) in out.chunks(row_words(k)).zip(logits.chunks(vocab)).enumerate() {
        let what = format!("row {index}, vocab {vocab}, k {k}");
        let row = Row::new(words).map_err(text)?;
        let (best, ln_sum) = oracle::row(logits);
        let bits = |best: &[(u32, f32)]| best.iter().map(|&(t, x)| (t, x.to_bits())).collect::<Vec<_>>();
        if !row.is_finite() || bits(&row.best().collect::<Vec<_>>()) != bits(&best[..k]) {
            return Err(format!(
                "{what}: flags {}, {:?}, expected {:?}",
                words[0],
                row.best().next(),
                best[0]
            ));
        }
        let off = (f64::from(row.ln_sum()) - ln_sum).abs();
        if off.is_nan() || off > 1e-6 {
            return Err(format!("{what}: ln_sum {}, expected {ln_sum}", row.ln_sum()));
        }
    }
    Ok(())
}

fn full_sort(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut random = Random::new(51);
    for (vocab, rows) in
        [(1, 3), (5, 2), (127, 2), (128, 2), (129, 2), (1000, 3), (6144, 17), (QWEN, 3), (70_001, 2)]
    {
        let mut logits: Vec<f32> = random.normals(rows * vocab).into_iter().map(|x| 4.0 * x).collect();
        if vocab > 600 {
            (logits[600], logits[vocab - 1]) = (logits[3], logits[3]);
            // The best ones of the second row lie side by side.
            logits[vocab + 300..vocab + 420].iter_mut().for_each(|x| *x += 30.0);
        }
        for k in [1, 2, 5, 16, 63, 64].into_iter().filter(|&k| k <= vocab) {
            for shift in [0, 1] {
                check(vocab, k, &logits, &run(stream, vocab, k, &logits, shift)?)?;
            }
        }
    }
    Ok(())
}

fn ties(stream: &Arc<CudaStream>) -> Result<(), String> {
    for vocab in [4, 200, 6144, QWEN] {
        let mut logits = vec![0.25f32; vocab];
        check(vocab, 4, &logits, &run(stream, vocab, 4, &logits, 0)?)?;
        let k = vocab.min(64);
        check(vocab, k, &logits, &run(stream, vocab, k, &logits, 0)?)?;
        (logits[0], logits[1], logits[2], logits[3]) = (0.0, -0.0, 1.0, 0.0);
        for x in &mut logits[4..] {
            *x = -0.0;
        }
        check(vocab, k, &logits, &run(stream, vocab, k, &logits, 0)?)?;
    }
    Ok(())
}

fn alone(stream: &Arc<CudaStream>) -> Result<(), String> {
    let logits = Random::new(53).normals(9 * 6144);
    let together = run(stream, 6144, 20, &logits, 0)?;
    for (row, logits) in logits.chunks(6144).enumerate() {
        if run(stream, 6144, 20, logits, 0)? != together[row * row_words(20)..][..row_words(20)] {
            return Err(format!("row {row}: other words alone"));
        }
    }
    Ok(())
}

fn nonfinite(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (vocab, k) = (6144, 7);
    let clean = Random::new(55).normals(3 * vocab);
    for bad in [&[f32::NAN][..], &[f32::INFINITY], &[f32::NEG_INFINITY], &[f32::NAN, f32::NEG_INFINITY]] {
        for place in [0, 130, vocab - 2] {
            let mut logits = clean.clone();
            logits[vocab + place..][..bad.len()].copy_from_slice(bad);
            let got = run(stream, vocab, k, &logits, 0)?;
            let mut cpu = vec![0; got.len()];
            top_tokens::cpu::forward(vocab, k, &logits, &mut cpu).map_err(text)?;
            for (got, cpu) in got.chunks(row_words(k)).zip(cpu.chunks(row_words(k))) {
                let (got, cpu) = (Row::new(got).map_err(text)?, Row::new(cpu).map_err(text)?);
                let tokens = |row: Row<'_>| row.best().map(|best| best.0).collect::<Vec<_>>();
                let same_sum = (got.ln_sum() - cpu.ln_sum()).abs() < 1e-6
                    || (got.ln_sum().is_nan() && cpu.ln_sum().is_nan());
                let same_flags =
                    got.is_finite() == cpu.is_finite() && got.is_distribution() == cpu.is_distribution();
                if tokens(got) != tokens(cpu) || !same_sum || !same_flags {
                    return Err(format!("{bad:?} at {place}: {got:?}, expected {cpu:?}"));
                }
            }
        }
    }
    let none = vec![f32::NEG_INFINITY; vocab];
    let got = run(stream, vocab, 3, &none, 0)?;
    let row = Row::new(&got).map_err(text)?;
    match !row.is_distribution() && row.best().map(|best| best.0).eq([0, 1, 2]) {
        true => Ok(()),
        false => Err(format!("only -infinity: {got:?}")),
    }
}
