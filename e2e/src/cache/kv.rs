//! Keys and values of one attention layer.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{AttnDims, CacheRows, DevicePaths, QkNormRope, kv_compact, qk_norm_rope_append};

use crate::Result;

/// Preallocated keys and values `[slots, capacity, Hkv, D]`; rows past a slot's committed length mean nothing.
#[derive(Debug)]
pub struct KvPool {
    /// Keys, RoPE applied.
    pub keys: Tensor,
    /// Values.
    pub values: Tensor,
    capacity: usize,
}

impl KvPool {
    /// Zeroed pools.
    pub fn new(slots: usize, capacity: usize, dims: AttnDims, dtype: DType, device: &Device) -> Result<Self> {
        let shape = (slots, capacity, dims.kv_heads, dims.head_dim);
        let keys = Tensor::zeros(shape, dtype, device)?;
        Ok(Self { keys, values: Tensor::zeros(shape, dtype, device)?, capacity })
    }

    /// Norms and rotates packed queries and keys, writes the keys and the values to `rows`, and gives the queries `[N, Hq, D]`.
    pub fn append_rotated(
        &self,
        rope: &QkNormRope,
        [q_proj, k_proj, v_proj]: [&Tensor; 3],
        positions: &[i32],
        rows: CacheRows<'_>,
    ) -> Result<Tensor> {
        let v = v_proj.reshape((positions.len(), rope.dims.kv_heads, rope.dims.head_dim))?;
        let pools = (&self.keys, &self.values);
        Ok(qk_norm_rope_append(rope, [q_proj, k_proj, &v], positions, pools, rows)?)
    }

    /// Moves accepted rows to the front of the window that starts at `prefix_lens`.
    pub fn compact(&self, paths: &DevicePaths, prefix_lens: &[i32]) -> Result<()> {
        kv_compact(&self.keys, paths, prefix_lens)?;
        Ok(kv_compact(&self.values, paths, prefix_lens)?)
    }

    /// Copies of a slot's first `rows` keys and values, `[rows, Hkv, D]`.
    pub fn save(&self, slot: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let copy = |pool: &Tensor| pool.get(slot)?.narrow(0, 0, rows)?.force_contiguous();
        Ok((copy(&self.keys)?, copy(&self.values)?))
    }

    /// Puts saved rows to the front of a slot.
    pub fn load(&self, slot: usize, (keys, values): &(Tensor, Tensor)) -> Result<()> {
        if keys.dim(0)? == 0 {
            return Ok(());
        }
        for (pool, rows) in [(&self.keys, keys), (&self.values, values)] {
            pool.flatten(0, 1)?.slice_set(rows, 0, slot * self.capacity)?;
        }
        Ok(())
    }
}
