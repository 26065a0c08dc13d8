//! Properties of the rounded product.

use half::bf16;

use super::*;
use crate::linear::oracle;

/// Widths around every panel and pair edge, and a sum as long as the largest models'.
const SHAPES: [(usize, usize); 7] = [(1, 1), (5, 3), (16, 16), (17, 31), (33, 65), (100, 256), (20, 12_289)];

/// Repeatable values in [-1, 1).
fn values(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn packed(seed: u32, (outputs, inputs): (usize, usize)) -> (PackedWeight, Vec<f32>) {
    let w: Vec<bf16> = values(seed, outputs * inputs).into_iter().map(bf16::from_f32).collect();
    (PackedWeight::from_bf16(inputs, &[&w]).unwrap(), w.iter().map(|w| w.to_f32()).collect())
}

fn on(isa: Isa, weight: &RoundedWeight, x: &[f32]) -> Vec<f32> {
    let mut out = vec![MaybeUninit::new(f32::NAN); x.len() / weight.inputs() * weight.outputs()[0]];
    // SAFETY: tests ask for the detected set, or for the one that every CPU has.
    unsafe { product(isa, weight, x, vec![&mut out]) }.unwrap();
    // SAFETY: it was initialised before the product.
    out.into_iter().map(|y| unsafe { y.assume_init() }).collect()
}

fn one(weight: &RoundedWeight, x: &[f32]) -> Vec<f32> {
    on(Isa::detect(), weight, x)
}

fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|y| y.to_bits()).collect()
}

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())))
}

#[test]
fn oracle_bound() {
    for shape @ (outputs, inputs) in SHAPES {
        let (packed, w) = packed(1, shape);
        let weight = RoundedWeight::new(&packed).unwrap();
        for rows in [1, 2, 5, 8, 9, 13] {
            let x = values(2 + rows as u32, rows * inputs);
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let want = oracle::forward(inputs, &wide(&w), &wide(&x));
            let got = one(&weight, &x);
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let x = &x[index / outputs * inputs..][..inputs];
                let w = &w[index % outputs * inputs..][..inputs];
                let (s, t) = (largest(x) / f64::from(MOST), largest(w) / f64::from(MOST));
                let terms = x
                    .iter()
                    .zip(w)
                    .map(|(x, w)| f64::from(x.abs()) * t / 2.0 + f64::from(w.abs()) * s / 2.0 + s * t / 4.0);
                let bound = terms.sum::<f64>() * (1.0 + 1e-3) + want.abs() * 1e-6;
                let error = (f64::from(*got) - want).abs();
                assert!(error <= bound, "[{outputs}, {inputs}] x {rows}: {error} > {bound}");
            }
        }
    }
}

#[test]
fn instruction_sets_agree() {
    for shape @ (_, inputs) in SHAPES {
        let weight = RoundedWeight::new(&packed(3, shape).0).unwrap();
        for rows in [1, 2, 3, 4, 5, 6, 7, 8, 13] {
            let x = values(4, rows * inputs);
            let portable = on(Isa::Portable, &weight, &x);
            assert_eq!(bits(&one(&weight, &x)), bits(&portable), "{shape:?} x {rows}");
        }
    }
}

#[test]
fn rows_alone_equal_rows_together() {
    let weight = RoundedWeight::new(&packed(5, (300, 256)).0).unwrap();
    let x = values(6, 23 * 256);
    let together = one(&weight, &x);
    let alone: Vec<f32> = x.chunks(256).flat_map(|x| one(&weight, x)).collect();
    assert_eq!(bits(&together), bits(&alone));
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(bits(&pool.install(|| one(&weight, &x))), bits(&together), "{threads} threads");
    }
}

/// Equal signs everywhere: the largest sum that there can be.
#[test]
fn the_largest_sums_fit() {
    for inputs in [1, 2, 255, 12_288, INPUTS] {
        let weight = PackedWeight::from_f32(inputs, &[&vec![-2f32; inputs]]).unwrap();
        let got = one(&RoundedWeight::new(&weight).unwrap(), &vec![3f32; inputs])[0];
        let want = -6.0 * inputs as f32;
        assert!((got - want).abs() <= want.abs() * 1e-5, "{inputs}: {got} for {want}");
    }
    let long = PackedWeight::from_f32(INPUTS + 1, &[&vec![0f32; INPUTS + 1]]).unwrap();
    assert!(RoundedWeight::new(&long).unwrap_err().to_string().contains("inputs"));
}

#[test]
fn a_poisoned_row_stays_alone() {
    let weight = RoundedWeight::new(&packed(7, (20, 33)).0).unwrap();
    let clean = values(8, 4 * 33);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = clean.clone();
        x[40] = poison;
        let (got, want) = (one(&weight, &x), one(&weight, &clean));
        for (row, (got, want)) in got.chunks(20).zip(want.chunks(20)).enumerate() {
            match row {
                1 => assert!(got.iter().all(|y| y.is_nan())),
                _ => assert_eq!(bits(got), bits(want), "row {row}"),
            }
        }
    }
}

#[test]
fn zeros_and_parts() {
    let (first, second) = (values(9, 3 * 8), values(10, 18 * 8));
    let stacked = PackedWeight::from_f32(8, &[&first, &second]).unwrap();
    let stacked = RoundedWeight::new(&stacked).unwrap();
    assert_eq!(stacked.outputs(), [3, 18]);
    let x = values(11, 2 * 8);
    let (mut a, mut b) = (vec![MaybeUninit::new(0f32); 6], vec![MaybeUninit::new(0f32); 36]);
    forward_into(&stacked, &x, vec![&mut a, &mut b]).unwrap();
    for (part, got) in [(&first, &a), (&second, &b)] {
        let alone = RoundedWeight::new(&PackedWeight::from_f32(8, &[part]).unwrap()).unwrap();
        // SAFETY: both were initialised before the product.
        let got: Vec<f32> = got.iter().map(|y| unsafe { y.assume_init() }).collect();
        assert_eq!(bits(&one(&alone, &x)), bits(&got));
    }
    assert_eq!(one(&RoundedWeight::new(&packed(1, (4, 8)).0).unwrap(), &[0f32; 8]), [0f32; 4]);
    let none = RoundedWeight::new(&PackedWeight::from_f32(8, &[&[0f32; 8]]).unwrap()).unwrap();
    assert_eq!(one(&none, &x), [0f32; 2]);
    assert!(forward_into(&none, &x, vec![]).is_err() && forward_into(&none, &x[1..], vec![&mut a]).is_err());
}
