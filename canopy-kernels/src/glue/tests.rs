//! Properties of the row-wise steps.

use super::cpu::*;
use super::{oracle, rotary};
use crate::AttnDims;

/// Repeatable values in [-3, 3).
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3.0
    };
    (0..len).map(|_| next()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn assert_close(got: &[f32], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0f64, |m, w| m.max(w.abs()));
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 4e-7 * scale, "{what}: element {i}: {got}, expected {want}");
    }
}

fn factor(norm: Norm<'_>) -> Vec<f64> {
    let offset = if norm.unit_offset { 1.0 } else { 0.0 };
    norm.weight.iter().map(|&w| f64::from(w) + offset).collect()
}

#[test]
fn norms_match_the_oracle() {
    for width in [1, 7, 16, 33, 256] {
        for unit_offset in [false, true] {
            let weight = values(1, width);
            let norm = Norm { weight: &weight, eps: 1e-6, unit_offset };
            let (x, residual) = (values(2, 3 * width), values(3, 3 * width));
            let (mut out, mut sum, mut added) = (x.clone(), x.clone(), x.clone());
            rms_norm(norm, &x, &mut out).unwrap();
            add_rms_norm(norm, &x, &residual, &mut sum, &mut added).unwrap();
            let mut gated = x.clone();
            gated_rms_norm(norm, &x, &residual, &mut gated).unwrap();
            for row in 0..3 {
                let at = row * width..(row + 1) * width;
                let want = oracle::rms_norm(&wide(&x[at.clone()]), &factor(norm), norm.eps.into());
                assert_close(&out[at.clone()], &want, "rms_norm");
                let silu = residual[at.clone()].iter().map(|&z| oracle::silu(z.into()));
                let want: Vec<f64> = want.iter().zip(silu).map(|(o, gate)| o * gate).collect();
                assert_close(&gated[at.clone()], &want, "gated_rms_norm");
                let total: Vec<f32> = at.clone().map(|i| x[i] + residual[i]).collect();
                assert_eq!(sum[at.clone()], total);
                let want = oracle::rms_norm(&wide(&total), &factor(norm), norm.eps.into());
                assert_close(&added[at], &want, "add_rms_norm");
            }
        }
    }
}

#[test]
fn gates_match_the_oracle() {
    let (gate, up) = (values(4, 300), values(5, 300));
    let mut out = vec![0f32; 300];
    swiglu(&gate, &up, &mut out).unwrap();
    let want = wide(&gate).into_iter().zip(wide(&up)).map(|(g, u)| oracle::silu(g) * u);
    assert_close(&out, &want.collect::<Vec<_>>(), "swiglu");

    let dims = AttnDims::new(3, 1, 20).unwrap();
    let (attn, q_proj) = (values(6, 5 * 60), values(7, 5 * 120));
    let mut out = vec![0f32; 300];
    attn_gate(dims, &attn, &q_proj, &mut out).unwrap();
    let gate = |i: usize| q_proj[i / 20 * 40 + 20 + i % 20];
    let want = (0..300).map(|i| f64::from(attn[i]) * oracle::sigmoid(gate(i).into()));
    assert_close(&out, &want.collect::<Vec<_>>(), "attn_gate");
}

const POSITIONS: [i32; 8] = [0, 1, 2, 2_047, 40_000, 131_071, 262_143, 262_144];

fn inv_freq(half: usize) -> Vec<f32> {
    (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64) as f32).collect()
}

#[test]
fn angles_are_right_to_the_last_place() {
    let freq = inv_freq(32);
    let mut table = rotary::Table::new(&freq);
    for position in POSITIONS.into_iter().chain((0..262_144).step_by(997)) {
        table.set(position);
        for (i, &freq) in freq.iter().enumerate() {
            let angle = f64::from(position as f32 * freq);
            for (got, want) in [(table.cos[i], angle.cos()), (table.sin[i], angle.sin())] {
                let error = (f64::from(got) - want).abs();
                let bound = 1e-10 + want.abs() * 2f64.powi(-24) * 1.01;
                assert!(error <= bound, "position {position}, frequency {i}: {got}, expected {want}");
            }
        }
    }
}

#[test]
fn rope_matches_the_oracle() {
    for (gated, d, half) in [(true, 256, 32), (false, 128, 64), (true, 6, 2), (false, 8, 0)] {
        let dims = AttnDims::new(4, 2, d).unwrap();
        let (q_weight, k_weight, freq) = (values(8, d), values(9, d), inv_freq(half));
        let q_norm = Norm { weight: &q_weight, eps: 1e-6, unit_offset: gated };
        let k_norm = Norm { weight: &k_weight, ..q_norm };
        let (rows, stride) = (POSITIONS.len(), if gated { 2 * d } else { d });
        let (q_proj, k_proj) = (values(10, rows * 4 * stride), values(11, rows * 2 * d));
        let (mut q, mut k) = (vec![0f32; rows * 4 * d], vec![0f32; rows * 2 * d]);
        let args = QkNormRope { dims, gated, q_norm, k_norm, inv_freq: &freq, positions: &POSITIONS };
        qk_norm_rope(args, &q_proj, &k_proj, &mut q, &mut k).unwrap();
        for (row, &position) in POSITIONS.iter().enumerate() {
            let angles: Vec<f64> = freq.iter().map(|&f| (position as f32 * f).into()).collect();
            let check = |norm: Norm<'_>, head: usize, stride: usize, x: &[f32], got: &[f32]| {
                let x = wide(&x[head * stride..][..d]);
                let normed = oracle::rms_norm(&x, &factor(norm), norm.eps.into());
                assert_close(&got[head * d..][..d], &oracle::rotate(&normed, &angles), "qk_norm_rope");
            };
            (row * 4..row * 4 + 4).for_each(|head| check(q_norm, head, stride, &q_proj, &q));
            (row * 2..row * 2 + 2).for_each(|head| check(k_norm, head, d, &k_proj, &k));
        }
    }
}

/// Every step on `rows` rows of the seeded inputs, from row `first` on, after `spoil`.
fn all_steps(first: usize, rows: usize, spoil: impl Fn(&mut [f32])) -> Vec<Vec<f32>> {
    const WIDTH: usize = 40;
    let dims = AttnDims::new(2, 1, 20).unwrap();
    let take = |seed, width| {
        let mut all = values(seed, 16 * width);
        spoil(&mut all[..width]);
        all[first * width..(first + rows) * width].to_vec()
    };
    let (x, z, q_proj, k_proj) = (take(12, WIDTH), take(13, WIDTH), take(14, 2 * WIDTH), take(15, 20));
    let (weight, head_weight, freq) = (values(16, WIDTH), values(17, 20), inv_freq(5));
    let norm = Norm { weight: &weight, eps: 1e-6, unit_offset: true };
    let head_norm = Norm { weight: &head_weight, ..norm };
    let positions: Vec<i32> = (first..first + rows).map(|row| 1000 * row as i32).collect();
    let mut outs = vec![vec![f32::NAN; rows * WIDTH]; 7];
    let [a, b, c, d, e, f, g] = outs.as_mut_slice() else { unreachable!("seven buffers") };
    rms_norm(norm, &x, a).unwrap();
    add_rms_norm(norm, &x, &z, b, c).unwrap();
    gated_rms_norm(head_norm, &x, &z, d).unwrap();
    swiglu(&x, &z, e).unwrap();
    attn_gate(dims, &x, &q_proj, f).unwrap();
    let mut k = vec![f32::NAN; rows * 20];
    let (inv_freq, positions) = (freq.as_slice(), positions.as_slice());
    let args = QkNormRope { dims, gated: true, q_norm: head_norm, k_norm: head_norm, inv_freq, positions };
    qk_norm_rope(args, &q_proj, &k_proj, g, &mut k).unwrap();
    outs.push(k);
    outs
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn rows_alone_equal_rows_together() {
    let together = all_steps(0, 16, |_| ());
    for row in 0..16 {
        for (step, (alone, together)) in all_steps(row, 1, |_| ()).iter().zip(&together).enumerate() {
            let width = alone.len();
            assert_eq!(bits(alone), bits(&together[row * width..][..width]), "step {step}, row {row}");
        }
    }
}

#[test]
fn nan_row_stays_alone() {
    let clean = all_steps(0, 3, |_| ());
    for bad in [f32::NAN, f32::INFINITY] {
        for (step, (got, clean)) in all_steps(0, 3, |x| x.fill(bad)).iter().zip(&clean).enumerate() {
            let width = got.len() / 3;
            assert_eq!(bits(&got[width..]), bits(&clean[width..]), "step {step}");
            assert!(got[..width].iter().all(|y| !y.is_finite()), "step {step}");
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let weight = [1f32; 4];
    let norm = Norm { weight: &weight, eps: 1e-6, unit_offset: false };
    let (x, mut out, mut sum) = ([1f32; 8], [0f32; 8], [0f32; 8]);
    let said = |result: crate::Result<()>| result.unwrap_err().to_string();
    let empty = Norm { weight: &[], ..norm };
    assert_eq!(
        said(rms_norm(empty, &x, &mut out)),
        "rms-norm: norm.weight length, expected: at least 1, got: 0"
    );
    assert_eq!(said(rms_norm(norm, &x[..7], &mut out)), "rms-norm: x, expected: [1, 4], got: [7]");
    assert_eq!(said(rms_norm(norm, &x, &mut out[..4])), "rms-norm: out, expected: [2, 4], got: [4]");
    assert_eq!(
        said(add_rms_norm(norm, &x, &x[..4], &mut sum, &mut out)),
        "add-rms-norm: residual, expected: [2, 4], got: [4]"
    );
    assert_eq!(
        said(gated_rms_norm(norm, &x, &x[..4], &mut out)),
        "gated-rms-norm: z, expected: [2, 4], got: [4]"
    );
    assert_eq!(said(swiglu(&x, &x[..4], &mut out)), "swiglu: up, expected: [8], got: [4]");
    let dims = AttnDims::new(1, 1, 4).unwrap();
    assert_eq!(said(attn_gate(dims, &x, &x, &mut out)), "attn-gate: q_proj, expected: [2, 1, 8], got: [8]");
    let freq = [1f32; 3];
    let args = QkNormRope {
        dims,
        gated: false,
        q_norm: norm,
        k_norm: norm,
        inv_freq: &freq[..2],
        positions: &[0, 1],
    };
    assert_eq!(
        said(qk_norm_rope(args, &x, &x[..4], &mut out, &mut sum)),
        "qk-norm-rope: k_proj, expected: [2, 1, 4], got: [4]"
    );
    let long = QkNormRope { inv_freq: &freq, ..args };
    assert_eq!(
        said(qk_norm_rope(long, &x, &x, &mut out, &mut sum)),
        "qk-norm-rope: inv_freq length, expected: at most head_dim / 2 = 2, got: 3"
    );
    qk_norm_rope(args, &x, &x, &mut out, &mut sum).unwrap();
}
