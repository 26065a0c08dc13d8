//! tree_attention and block_attention.

use candle_core::{DType, Result, Tensor};
use canopy_candle::{AttnDims, BlockMask, DeviceTree, DraftBlocks, block_attention, tree_attention};
use canopy_kernels::block_attention::oracle as block_oracle;
use canopy_kernels::tree_attention::oracle as tree_oracle;

use crate::support::{Rng, batch, bits, f32s, layouts, max_abs, on_cpu};

const CAPACITY: usize = 11;
const PREFIX: [i32; 3] = [3, 7, 0];

fn dims() -> AttnDims {
    AttnDims::new(4, 2, 8).expect("2 divides 4")
}

fn scene() -> (DeviceTree, Tensor, Tensor, Tensor) {
    let (mut rng, tree) = (Rng(6), on_cpu(batch()));
    let q = rng.tensor(&[tree.host().rows(), 4, 8]);
    (tree, q, rng.tensor(&[3, CAPACITY, 2, 8]), rng.tensor(&[3, CAPACITY, 2, 8]))
}

#[test]
fn tree_attention_equals_the_oracle_in_every_layout() -> Result<()> {
    let (tree, q, k, v) = scene();
    let plain = tree_attention(&tree, dims(), &PREFIX, &q, &k, &v)?;
    let cache = tree_oracle::Cache { keys: &f32s(&k), values: &f32s(&v), capacity: CAPACITY };
    let expected = tree_oracle::verify(dims(), tree.host(), &PREFIX, &f32s(&q), cache);
    assert!(max_abs(&f32s(&plain), &expected) < 2e-6);
    for (how, q) in layouts(&q)? {
        for ((how_cache, k), (_, v)) in layouts(&k)?.into_iter().zip(layouts(&v)?) {
            let out = tree_attention(&tree, dims(), &PREFIX, &q, &k, &v)?;
            assert_eq!(bits(&out), bits(&plain), "q {how}, caches {how_cache}");
        }
    }
    Ok(())
}

#[test]
fn tree_attention_over_rounded_caches_reads_their_f32_values() -> Result<()> {
    let (tree, q, k, v) = scene();
    for dtype in [DType::BF16, DType::F16] {
        let (k, v) = (k.to_dtype(dtype)?, v.to_dtype(dtype)?);
        let (wide_k, wide_v) = (k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?);
        let expected = tree_attention(&tree, dims(), &PREFIX, &q, &wide_k, &wide_v)?;
        assert_eq!(bits(&tree_attention(&tree, dims(), &PREFIX, &q, &k, &v)?), bits(&expected));
        let rounded = tree_attention(&tree, dims(), &PREFIX, &q.to_dtype(dtype)?, &k, &v)?;
        assert_eq!(rounded.dtype(), dtype);
        assert!(
            max_abs(&f32s(&rounded), &f32s(&expected).iter().map(|&x| x as f64).collect::<Vec<_>>()) < 2e-2
        );
    }
    Ok(())
}

#[test]
fn block_attention_equals_the_oracle_in_every_mask_and_layout() -> Result<()> {
    let mut rng = Rng(7);
    let blocks = DraftBlocks { block_size: 4, slots: vec![1, -1, 2], context_lens: vec![5, 0, 0] };
    let (q, k, v) = (rng.tensor(&[12, 4, 8]), rng.tensor(&[3, 9, 2, 8]), rng.tensor(&[3, 9, 2, 8]));
    let places = [(Some(1), 5), (None, 0), (Some(2), 0)];
    let places = places.map(|(slot, context)| block_oracle::Block { slot, context });
    for (window, causal) in [(None, false), (None, true), (Some(3), false), (Some(3), true)] {
        let mask = BlockMask { window, causal };
        let plain = block_attention(&blocks, mask, dims(), &q, &k, &v)?;
        let (keys, values) = (&f32s(&k), &f32s(&v));
        let scene = block_oracle::Scene { keys, values, capacity: 9, window, causal };
        let expected = block_oracle::forward(dims(), &places, 4, &f32s(&q), scene);
        assert!(max_abs(&f32s(&plain), &expected) < 2e-6, "{mask:?}");
        for (how, q) in layouts(&q)? {
            for ((how_cache, k), (_, v)) in layouts(&k)?.into_iter().zip(layouts(&v)?) {
                let out = block_attention(&blocks, mask, dims(), &q, &k, &v)?;
                assert_eq!(bits(&out), bits(&plain), "{mask:?}, q {how}, caches {how_cache}");
            }
        }
    }
    Ok(())
}
