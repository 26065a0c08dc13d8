//! Both gates are computed in float64 inside, so they are held to half a unit in the last place of f32.

use proptest::prelude::*;

use super::cpu::forward;
use super::oracle;
use crate::test_support::{bits, refusal, values};

/// Half a unit in the last place, and half the smallest subnormal.
const RELATIVE: f64 = 1.0 / (1 << 24) as f64;
const ABSOLUTE: f64 = 7.1e-46;

fn run(v_heads: usize, ab: &[f32], a_log: &[f32], dt_bias: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; ab.len()];
    forward(v_heads, ab, a_log, dt_bias, &mut out).unwrap();
    out
}

#[track_caller]
fn assert_rounded(got: &[f32], want: &[f64]) {
    crate::test_support::assert_close(got, want, ABSOLUTE, RELATIVE * (1.0 + 1e-6));
}

/// g and beta of one head.
fn one(a: f32, b: f32, a_log: f32, dt_bias: f32) -> (f32, f32) {
    let out = run(1, &[a, b], &[a_log], &[dt_bias]);
    assert_rounded(&out, &oracle::forward(1, &[a, b], &[a_log], &[dt_bias]));
    (out[0], out[1])
}

proptest! {
    #[test]
    fn gates_are_float64_rounded_once(
        rows in 0usize..9,
        v_heads in 1usize..9,
        scale in prop_oneof![Just(1.0f32), Just(10.0), Just(60.0)],
        seed: u32,
    ) {
        let ab = values(seed.into(), rows * 2 * v_heads, scale);
        let (a_log, dt_bias) = (values(1, v_heads, 3.0), values(2, v_heads, scale));
        let out = run(v_heads, &ab, &a_log, &dt_bias);
        assert_rounded(&out, &oracle::forward(v_heads, &ab, &a_log, &dt_bias));
        for row in 0..rows {
            let at = row * 2 * v_heads..(row + 1) * 2 * v_heads;
            prop_assert_eq!(bits(&run(v_heads, &ab[at.clone()], &a_log, &dt_bias)), bits(&out[at.clone()]));
            prop_assert!(out[at.start..at.start + v_heads].iter().all(|&g| g <= 0.0));
            prop_assert!(out[at.start + v_heads..at.end].iter().all(|&beta| (0.0..=1.0).contains(&beta)));
        }
    }
}

/// known-failures 3.
#[test]
fn a_huge_rate_times_a_vanishing_softplus_is_no_nan() {
    // exp(100) is beyond f32, softplus(-200) below it; the product is exp(-100), a subnormal.
    let (g, _) = one(-150.0, 0.0, 100.0, -50.0);
    assert_eq!(g.to_bits(), (-(-100f64).exp() as f32).to_bits());
    assert_eq!(one(-200.0, 0.0, 50.0, 0.0).0, 0.0);
    assert_eq!(one(-40.0, 0.0, 100.0, 0.0).0, -(60f64.exp() as f32));
}

#[test]
fn far_inputs_keep_their_limits() {
    assert_eq!(one(100.0, 100.0, 0.0, 0.0), (-100.0, 1.0));
    assert_eq!(one(-100.0, -100.0, 0.0, 0.0), (-((-100f64).exp() as f32), (-100f64).exp() as f32));
    assert_eq!(one(0.0, 0.0, 0.0, 0.0), (-std::f32::consts::LN_2, 0.5));
    assert_eq!(one(1e30, -1e30, -1e30, 0.0), (0.0, 0.0));
    // Both factors leave float64 here; their product is exp(200).
    let out = run(1, &[-800.0, 0.0], &[1000.0], &[0.0]);
    assert_eq!(out[0], f32::NEG_INFINITY);
    // exp(g) = 0.01.
    let rate = -0.01f32.ln() / std::f32::consts::LN_2;
    assert!((one(0.0, 0.0, rate.ln(), 0.0).0.exp() - 0.01).abs() < 1e-7);
}

#[test]
fn a_nonfinite_input_stays_in_its_element() {
    let (a_log, dt_bias) = (values(5, 3, 1.0), values(6, 3, 1.0));
    let ab = values(7, 4 * 6, 1.0);
    let clean = run(3, &ab, &a_log, &dt_bias);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..ab.len() {
            let mut dirty = ab.clone();
            dirty[at] = poison;
            let mut out = run(3, &dirty, &a_log, &dt_bias);
            assert_rounded(&out, &oracle::forward(3, &dirty, &a_log, &dt_bias));
            out[at] = clean[at];
            assert_eq!(bits(&out), bits(&clean));
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let mut out = [0.0; 8];
    let mut check = |v_heads, ab: usize, a_log: usize, dt_bias: usize, len: usize| {
        refusal(forward(v_heads, &[0.0; 9][..ab], &[0.0; 4][..a_log], &[0.0; 4][..dt_bias], &mut out[..len]))
    };
    assert_eq!(check(0, 8, 2, 2, 8), "gates: v_heads, expected: at least 1, got: 0");
    assert_eq!(check(2, 9, 2, 2, 8), "gates: ab, expected: [3, 2, 2], got: [9]");
    assert_eq!(check(2, 8, 1, 2, 8), "gates: a_log, expected: [2], got: [1]");
    assert_eq!(check(2, 8, 2, 3, 8), "gates: dt_bias, expected: [2], got: [3]");
    assert_eq!(check(2, 8, 2, 2, 4), "gates: out, expected: [2, 2, 2], got: [4]");
}
