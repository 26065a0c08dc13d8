//! Properties of the product.

use half::bf16;

use super::cpu::{Isa, PackedWeight, forward, forward_on};
use super::{K_SPAN, oracle};
use crate::Error;

/// Repeatable values in [-1, 1).
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn bf16s(seed: u64, len: usize) -> Vec<bf16> {
    values(seed, len).into_iter().map(bf16::from_f32).collect()
}

fn one(weight: &PackedWeight, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / weight.inputs() * weight.outputs()[0]];
    forward(weight, x, &mut [&mut out]).unwrap();
    out
}

fn assert_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i}: {a} and {b}");
    }
}

/// Widths around every panel, group and span edge.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (5, 3), (16, 16), (17, 31), (33, 65), (100, 256), (64, 1024), (40, 1025), (18, 2 * K_SPAN + 7)];

#[test]
fn oracle_bound() {
    for (outputs, inputs) in SHAPES {
        let w = bf16s(1, outputs * inputs);
        let wide: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
        let w64: Vec<f64> = wide.iter().map(|&w| w.into()).collect();
        let weights = [
            PackedWeight::from_bf16(inputs, &[&w]).unwrap(),
            PackedWeight::from_f32(inputs, &[&wide]).unwrap(),
        ];
        for rows in [1, 2, 3, 4, 5, 6, 7, 13, 33] {
            let x = values(2 + rows as u64, rows * inputs);
            let x64: Vec<f64> = x.iter().map(|&x| x.into()).collect();
            let want = oracle::forward(inputs, &w64, &x64);
            let abs = |v: &[f64]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let scale = oracle::forward(inputs, &abs(&w64), &abs(&x64));
            for got in weights.iter().map(|weight| one(weight, &x)) {
                for ((got, want), scale) in got.iter().zip(&want).zip(&scale) {
                    let bound = inputs as f64 * 2f64.powi(-23) * scale;
                    let error = (f64::from(*got) - want).abs();
                    assert!(error <= bound, "[{outputs}, {inputs}] x {rows}: {error} > {bound}");
                }
            }
        }
    }
}

#[test]
fn sums_are_chains_in_input_order() {
    for (outputs, inputs) in SHAPES {
        let w = bf16s(15, outputs * inputs);
        let weight = PackedWeight::from_bf16(inputs, &[&w]).unwrap();
        let x = values(16, 5 * inputs);
        let fused = cfg!(target_arch = "aarch64") || is_fused();
        let chain =
            |x: &[f32], w: &[bf16]| {
                x.iter().zip(w).fold(0f32, |sum, (&x, w)| {
                    if fused { x.mul_add(w.to_f32(), sum) } else { x * w.to_f32() + sum }
                })
            };
        let dot = |x: &[f32], w: &[bf16]| {
            let spans = x.chunks(K_SPAN).zip(w.chunks(K_SPAN)).map(|(x, w)| chain(x, w));
            spans.reduce(|sum, span| sum + span).unwrap()
        };
        let want: Vec<f32> =
            x.chunks(inputs).flat_map(|x| w.chunks(inputs).map(move |w| dot(x, w))).collect();
        assert_bits(&one(&weight, &x), &want, &format!("[{outputs}, {inputs}]"));
    }
}

#[cfg(target_arch = "x86_64")]
fn is_fused() -> bool {
    super::avx2::available()
}

#[cfg(not(target_arch = "x86_64"))]
fn is_fused() -> bool {
    false
}

#[test]
fn portable_tiles_agree() {
    for (outputs, inputs) in SHAPES {
        let w = bf16s(17, outputs * inputs);
        let wide: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
        let x = values(18, 13 * inputs);
        for weight in [PackedWeight::from_bf16(inputs, &[&w]), PackedWeight::from_f32(inputs, &[&wide])] {
            let weight = weight.unwrap();
            for rows in [1, 2, 3, 4, 5, 6, 13] {
                let (x, best) = (&x[..rows * inputs], one(&weight, &x[..rows * inputs]));
                let mut portable = vec![f32::NAN; rows * outputs];
                // SAFETY: every CPU has the portable tiles.
                unsafe { forward_on(Isa::Portable, &weight, x, &mut [&mut portable]) }.unwrap();
                let bound = inputs as f32 * 2f32.powi(-23) * inputs as f32;
                let differs = best.iter().zip(&portable).any(|(a, b)| (a - b).abs() > bound);
                assert!(!differs && portable.iter().all(|y| y.is_finite()), "[{outputs}, {inputs}] x {rows}");
            }
        }
    }
}

#[test]
fn rows_alone_equal_rows_together() {
    for (outputs, inputs) in SHAPES {
        let weight = PackedWeight::from_bf16(inputs, &[&bf16s(3, outputs * inputs)]).unwrap();
        let x = values(4, 40 * inputs);
        let alone: Vec<f32> = x.chunks(inputs).flat_map(|row| one(&weight, row)).collect();
        for rows in 1..=40 {
            let what = format!("[{outputs}, {inputs}] x {rows}");
            assert_bits(&one(&weight, &x[..rows * inputs]), &alone[..rows * outputs], &what);
            let last = (40 - rows) * inputs;
            assert_bits(&one(&weight, &x[last..]), &alone[(40 - rows) * outputs..], &what);
        }
    }
}

#[test]
fn parts_equal_separate_weights() {
    let inputs = 256;
    let widths = [48, 17, 4, 4, 100];
    let parts: Vec<Vec<bf16>> = widths.iter().map(|&out| bf16s(out as u64, out * inputs)).collect();
    let refs: Vec<&[bf16]> = parts.iter().map(Vec::as_slice).collect();
    let weight = PackedWeight::from_bf16(inputs, &refs).unwrap();
    assert_eq!(weight.outputs(), widths);
    for rows in [1, 2, 3, 17] {
        let x = values(5, rows * inputs);
        let mut outs: Vec<Vec<f32>> = widths.iter().map(|&out| vec![f32::NAN; rows * out]).collect();
        let mut slices: Vec<&mut [f32]> = outs.iter_mut().map(Vec::as_mut_slice).collect();
        forward(&weight, &x, &mut slices).unwrap();
        for (part, out) in parts.iter().zip(&outs) {
            let separate = PackedWeight::from_bf16(inputs, &[part]).unwrap();
            assert_bits(out, &one(&separate, &x), "part");
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let (outputs, inputs) = (1000, 700);
    let weight = PackedWeight::from_bf16(inputs, &[&bf16s(6, outputs * inputs)]).unwrap();
    for rows in [1, 3, 17] {
        let x = values(7, rows * inputs);
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| one(&weight, &x))
        };
        let single = with(1);
        for threads in [2, 3, 5] {
            assert_bits(&with(threads), &single, "threads");
        }
    }
}

#[test]
fn bf16_weights_are_exact() {
    let inputs = 7;
    let w = bf16s(8, 20 * inputs);
    let weight = PackedWeight::from_bf16(inputs, &[&w]).unwrap();
    for k in 0..inputs {
        let mut x = vec![0f32; inputs];
        x[k] = 1.0;
        let want: Vec<f32> = w.chunks(inputs).map(|row| row[k].to_f32()).collect();
        assert_eq!(one(&weight, &x), want);
    }
    let wide: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
    let x = values(9, 3 * inputs);
    let f32_weight = PackedWeight::from_f32(inputs, &[&wide]).unwrap();
    assert_bits(&one(&weight, &x), &one(&f32_weight, &x), "bf16 and f32");
}

#[test]
fn nan_row_stays_alone() {
    let (outputs, inputs) = (35, 64);
    let weight = PackedWeight::from_bf16(inputs, &[&bf16s(10, outputs * inputs)]).unwrap();
    for rows in [2, 6, 17] {
        let clean = values(11, rows * inputs);
        let want = one(&weight, &clean);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = clean.clone();
            x[inputs + 3] = bad;
            let got = one(&weight, &x);
            assert!(got[outputs..2 * outputs].iter().all(|y| !y.is_finite()));
            assert_bits(&got[..outputs], &want[..outputs], "row before");
            assert_bits(&got[2 * outputs..], &want[2 * outputs..], "rows after");
        }
    }
}

#[test]
fn row_is_the_stored_row() {
    let inputs = 33;
    let (a, b) = (bf16s(12, 20 * inputs), bf16s(13, 5 * inputs));
    let weight = PackedWeight::from_bf16(inputs, &[&a, &b]).unwrap();
    let wide = |w: &[bf16]| w.iter().map(|w| w.to_f32()).collect::<Vec<_>>();
    let (a, b) = (wide(&a), wide(&b));
    let f32_weight = PackedWeight::from_f32(inputs, &[&a, &b]).unwrap();
    let mut out = vec![0f32; inputs];
    for (index, want) in a.chunks(inputs).chain(b.chunks(inputs)).enumerate() {
        for weight in [&weight, &f32_weight] {
            weight.row(index, &mut out).unwrap();
            assert_eq!(out, want);
        }
    }
    let error = weight.row(25, &mut out).unwrap_err();
    assert_eq!(error.to_string(), "linear row: index, expected: below 25, got: 25");
    assert!(weight.row(0, &mut out[1..]).is_err());
}

#[test]
fn refusals_name_the_argument() {
    let w = bf16s(14, 12);
    let said = |result: Result<PackedWeight, Error>| result.unwrap_err().to_string();
    assert_eq!(said(PackedWeight::from_bf16(0, &[&w])), "pack weight: inputs, expected: at least 1, got: 0");
    assert_eq!(said(PackedWeight::from_bf16(4, &[])), "pack weight: parts, expected: at least 1, got: 0");
    assert_eq!(said(PackedWeight::from_bf16(5, &[&w])), "pack weight: part, expected: [2, 5], got: [12]");
    assert_eq!(said(PackedWeight::from_bf16(4, &[&w, &[]])), "pack weight: part, expected: [1, 4], got: [0]");
    let weight = PackedWeight::from_bf16(4, &[&w]).unwrap();
    let said = |result: Result<(), Error>| result.unwrap_err().to_string();
    let (mut y, x) = ([0f32; 6], [0f32; 8]);
    assert_eq!(said(forward(&weight, &x[..7], &mut [&mut y])), "linear: x, expected: [1, 4], got: [7]");
    assert_eq!(said(forward(&weight, &x, &mut [&mut y[..5]])), "linear: out, expected: [2, 3], got: [5]");
    assert_eq!(said(forward(&weight, &x, &mut [])), "linear: number of outs, expected: 1, got: 0");
    forward(&weight, &[], &mut [&mut []]).unwrap();
}
