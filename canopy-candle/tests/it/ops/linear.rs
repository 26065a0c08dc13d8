//! PackedLinear.

use candle_core::{DType, Device, Result, Tensor};
use canopy_candle::PackedLinear;
use canopy_kernels::linear::oracle;

use crate::support::{Rng, bits, f32s, f64s, layouts, max_abs};

#[test]
fn product_equals_the_oracle_in_every_layout_and_dtype() -> Result<()> {
    let mut rng = Rng(8);
    let (x, a, b) = (rng.tensor(&[5, 24]), rng.tensor(&[7, 24]), rng.tensor(&[33, 24]));
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (a, b) = (a.to_dtype(dtype)?, b.to_dtype(dtype)?);
        let plain = PackedLinear::new(&[&a, &b], &Device::Cpu)?.forward(&x)?;
        for (weight, out) in [&a, &b].into_iter().zip(&plain) {
            assert!(out.is_contiguous());
            assert_eq!(out.dims(), [5, weight.dim(0)?]);
            assert!(max_abs(&f32s(out), &oracle::forward(24, &f64s(weight), &f64s(&x))) < 1e-5);
        }
        for (how, x) in layouts(&x)? {
            for (how_weight, a) in layouts(&a)? {
                let outs = PackedLinear::new(&[&a, &b], &Device::Cpu)?.forward(&x)?;
                for (out, plain) in outs.iter().zip(&plain) {
                    assert_eq!(bits(out), bits(plain), "{dtype:?}, x {how}, weight {how_weight}");
                }
            }
        }
        let single = PackedLinear::new(&[&b], &Device::Cpu)?.forward_one(&x)?;
        assert_eq!(bits(&single), bits(&plain[1]));
    }
    Ok(())
}

#[test]
fn rounded_rows_give_rounded_products() -> Result<()> {
    let mut rng = Rng(9);
    let linear = PackedLinear::new(&[&rng.tensor(&[7, 24])], &Device::Cpu)?;
    let x = rng.tensor(&[5, 24]).to_dtype(DType::BF16)?;
    let out = linear.forward_one(&x)?;
    let expected = linear.forward_one(&x.to_dtype(DType::F32)?)?.to_dtype(DType::BF16)?;
    assert_eq!(out.dtype(), DType::BF16);
    assert_eq!(bits(&out), bits(&expected));
    Ok(())
}

#[test]
fn lookup_gives_the_rows_of_the_stacked_matrix() -> Result<()> {
    let mut rng = Rng(10);
    let (a, b) = (rng.tensor(&[3, 8]).to_dtype(DType::BF16)?, rng.tensor(&[4, 8]).to_dtype(DType::BF16)?);
    let linear = PackedLinear::new(&[&a, &b], &Device::Cpu)?;
    let stacked = Tensor::cat(&[&a, &b], 0)?;
    let ids = [6u32, 0, 3, 3, 2];
    let rows = linear.lookup(&ids)?;
    assert_eq!(rows.dtype(), DType::F32);
    assert_eq!(bits(&rows), bits(&stacked.index_select(&Tensor::new(&ids, &Device::Cpu)?, 0)?));
    assert_eq!(linear.lookup(&[])?.dims(), [0, 8]);
    Ok(())
}
