//! The row-wise ops.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::{
    AttnDims, NormKind, QkNormRope, add_rms_norm, attn_gate, gated_rms_norm, qk_norm_rope, rms_norm, swiglu,
};
use canopy_kernels::glue::oracle;

use crate::support::{Rng, bits, f32s, f64s, layouts, max_abs};

const EPS: f32 = 1e-6;

fn normed(x: &Tensor, weight: &Tensor, kind: NormKind) -> Vec<f64> {
    let offset = if kind == NormKind::UnitOffset { 1.0 } else { 0.0 };
    let factor = f64s(weight).iter().map(|w| w + offset).collect::<Vec<_>>();
    f64s(x).chunks(factor.len()).flat_map(|row| oracle::rms_norm(row, &factor, EPS.into())).collect()
}

#[test]
fn norms_equal_the_oracle_in_every_layout() -> Result<()> {
    let mut rng = Rng(11);
    let (x, residual, weight) = (rng.tensor(&[5, 12]), rng.tensor(&[5, 12]), rng.tensor(&[12]));
    for kind in [NormKind::Plain, NormKind::UnitOffset] {
        let plain = rms_norm(&x, &weight, EPS, kind)?;
        assert!(max_abs(&f32s(&plain), &normed(&x, &weight, kind)) < 2e-6);
        let (sum, out) = add_rms_norm(&x, &residual, &weight, EPS, kind)?;
        assert_eq!(bits(&sum), bits(&(&x + &residual)?));
        assert!(max_abs(&f32s(&out), &normed(&sum, &weight, kind)) < 2e-6);
        for (how, x) in layouts(&x)? {
            for (how_weight, weight) in layouts(&weight)? {
                assert_eq!(
                    bits(&rms_norm(&x, &weight, EPS, kind)?),
                    bits(&plain),
                    "{how}, weight {how_weight}"
                );
                let (again, out_again) = add_rms_norm(&x, &residual, &weight, EPS, kind)?;
                assert_eq!((bits(&again), bits(&out_again)), (bits(&sum), bits(&out)), "{how}");
            }
        }
    }
    Ok(())
}

#[test]
fn rms_norm_takes_any_leading_dimensions() -> Result<()> {
    let mut rng = Rng(12);
    let (x, weight) = (rng.tensor(&[2, 3, 4]), rng.tensor(&[4]));
    let out = rms_norm(&x, &weight, EPS, NormKind::Plain)?;
    assert_eq!(out.dims(), [2, 3, 4]);
    assert_eq!(bits(&out), bits(&rms_norm(&x.reshape((6, 4))?, &weight, EPS, NormKind::Plain)?));
    Ok(())
}

#[test]
fn gated_norm_equals_the_oracle_in_every_layout() -> Result<()> {
    let mut rng = Rng(13);
    let (o, z, weight) = (rng.tensor(&[5, 3, 4]), rng.tensor(&[5, 12]), rng.tensor(&[4]));
    let plain = gated_rms_norm(&o, &z, &weight, EPS)?;
    let norm = normed(&o, &weight, NormKind::Plain);
    let expected = norm.iter().zip(f64s(&z)).map(|(norm, z)| norm * oracle::silu(z)).collect::<Vec<_>>();
    assert_eq!(plain.dims(), [5, 12]);
    assert!(max_abs(&f32s(&plain), &expected) < 2e-6);
    for (how, o) in layouts(&o)? {
        for (how_z, z) in layouts(&z)? {
            assert_eq!(bits(&gated_rms_norm(&o, &z, &weight, EPS)?), bits(&plain), "o {how}, z {how_z}");
        }
    }
    Ok(())
}

#[test]
fn swiglu_equals_the_oracle_in_every_layout() -> Result<()> {
    let mut rng = Rng(14);
    let (gate, up) = (rng.tensor(&[5, 12]), rng.tensor(&[5, 12]));
    let plain = swiglu(&gate, &up)?;
    let expected = f64s(&gate).iter().zip(f64s(&up)).map(|(&g, up)| oracle::silu(g) * up).collect::<Vec<_>>();
    assert!(max_abs(&f32s(&plain), &expected) < 1e-6);
    for (how, gate) in layouts(&gate)? {
        for (how_up, up) in layouts(&up)? {
            assert_eq!(bits(&swiglu(&gate, &up)?), bits(&plain), "gate {how}, up {how_up}");
        }
    }
    Ok(())
}

#[test]
fn attention_gate_equals_the_oracle_in_every_layout() -> Result<()> {
    let (mut rng, dims) = (Rng(15), AttnDims::new(2, 1, 4).expect("1 divides 2"));
    let (attn, q_proj) = (rng.tensor(&[5, 2, 4]), rng.tensor(&[5, 16]));
    let plain = attn_gate(dims, &attn, &q_proj)?;
    let gates = f64s(&q_proj.reshape((5, 2, 8))?.narrow(2, 4, 4)?.contiguous()?);
    let expected =
        f64s(&attn).iter().zip(gates).map(|(a, gate)| a * oracle::sigmoid(gate)).collect::<Vec<_>>();
    assert_eq!(plain.dims(), [5, 8]);
    assert!(max_abs(&f32s(&plain), &expected) < 1e-6);
    for (how, attn) in layouts(&attn)? {
        for (how_q, q_proj) in layouts(&q_proj)? {
            assert_eq!(bits(&attn_gate(dims, &attn, &q_proj)?), bits(&plain), "attn {how}, q_proj {how_q}");
        }
    }
    Ok(())
}

fn rope(rng: &mut Rng, gated: bool) -> QkNormRope {
    QkNormRope {
        dims: AttnDims::new(2, 1, 8).expect("1 divides 2"),
        gated,
        q_norm: rng.tensor(&[8]),
        k_norm: rng.tensor(&[8]),
        eps: EPS,
        kind: NormKind::UnitOffset,
        inv_freq: Tensor::new(&[1f32, 0.1], &Device::Cpu).expect("two frequencies"),
    }
}

/// Norm and rotation of every head, one position per row.
fn rotated(heads: &Tensor, norm: &Tensor, inv_freq: &Tensor, positions: &[i32]) -> Result<Vec<f64>> {
    let (_, per_row, width) = heads.dims3()?;
    let normed = normed(&heads.contiguous()?, norm, NormKind::UnitOffset);
    let head = |(index, head): (usize, &[f64])| {
        let position = f64::from(positions[index / per_row]);
        oracle::rotate(head, &f64s(inv_freq).iter().map(|f| f * position).collect::<Vec<_>>())
    };
    Ok(normed.chunks(width).enumerate().flat_map(head).collect())
}

#[test]
fn rope_equals_the_oracle_in_every_layout() -> Result<()> {
    let (mut rng, positions) = (Rng(16), [4, 5, 5, 6]);
    for gated in [false, true] {
        let op = rope(&mut rng, gated);
        let width = if gated { 32 } else { 16 };
        let (q_proj, k_proj) = (rng.tensor(&[4, width]), rng.tensor(&[4, 8]));
        let (q, k) = qk_norm_rope(&op, &q_proj, &k_proj, &positions)?;
        let queries = q_proj.reshape((4, 2, width / 2))?.narrow(2, 0, 8)?;
        assert!(max_abs(&f32s(&q), &rotated(&queries, &op.q_norm, &op.inv_freq, &positions)?) < 2e-6);
        let keys = k_proj.reshape((4, 1, 8))?;
        assert!(max_abs(&f32s(&k), &rotated(&keys, &op.k_norm, &op.inv_freq, &positions)?) < 2e-6);
        for (how, q_proj) in layouts(&q_proj)? {
            for (how_k, k_proj) in layouts(&k_proj)? {
                let (q_again, k_again) = qk_norm_rope(&op, &q_proj, &k_proj, &positions)?;
                assert_eq!((bits(&q_again), bits(&k_again)), (bits(&q), bits(&k)), "q {how}, k {how_k}");
            }
        }
    }
    Ok(())
}

#[test]
fn rounded_rows_give_rounded_results() -> Result<()> {
    let (mut rng, dtype) = (Rng(17), DType::BF16);
    let x = rng.tensor(&[5, 16]).to_dtype(dtype)?;
    let (wide, weight) = (x.to_dtype(DType::F32)?, rng.tensor(&[16]));
    let heads = |x: &Tensor| x.reshape((5, 2, 8));
    let dims = AttnDims::new(1, 1, 8).expect("one head");
    let runs = |x: &Tensor| {
        let (sum, out) = add_rms_norm(x, x, &weight, EPS, NormKind::Plain)?;
        let mut outs = vec![sum, out, rms_norm(x, &weight, EPS, NormKind::Plain)?, swiglu(x, x)?];
        outs.push(gated_rms_norm(&heads(x)?, x, &weight.narrow(0, 0, 8)?, EPS)?);
        outs.push(attn_gate(dims, &x.narrow(1, 0, 8)?.reshape((5, 1, 8))?, x)?);
        Ok::<_, candle_core::Error>(outs)
    };
    for (rounded, expected) in runs(&x)?.iter().zip(runs(&wide)?) {
        assert_eq!(rounded.dtype(), dtype);
        assert_eq!(bits(rounded), bits(&expected.to_dtype(dtype)?));
    }
    Ok(())
}
