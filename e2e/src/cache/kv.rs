//! Keys and values of the attention layers.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{AttnDims, CacheRows, DevicePaths, QkNormRope, kv_compact_layers, qk_norm_rope_append};

use crate::Result;

/// The pools of all layers, one after another, so that one launch moves the rows of all keys and one those of all values.
#[derive(Debug)]
pub struct KvPools {
    /// `[layers, slots, capacity, Hkv, D]`.
    keys: Tensor,
    values: Tensor,
    capacity: usize,
}

impl KvPools {
    /// Zeroed pools; none for 0 layers.
    pub fn new(
        layers: usize,
        (slots, capacity): (usize, usize),
        dims: AttnDims,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let shape = (layers, slots, capacity, dims.kv_heads, dims.head_dim);
        let keys = Tensor::zeros(shape, dtype, device)?;
        Ok(Self { keys, values: Tensor::zeros(shape, dtype, device)?, capacity })
    }

    /// The pool of one layer, in place.
    pub fn layer(&self, index: usize) -> Result<KvPool> {
        Ok(KvPool { keys: self.keys.get(index)?, values: self.values.get(index)?, capacity: self.capacity })
    }

    /// Moves accepted rows to the front of the window that starts at `prefix_lens`, in every layer.
    pub fn compact(&self, paths: &DevicePaths, prefix_lens: &[i32]) -> Result<()> {
        if self.keys.dim(0)? == 0 {
            return Ok(());
        }
        kv_compact_layers(&self.keys, paths, prefix_lens)?;
        Ok(kv_compact_layers(&self.values, paths, prefix_lens)?)
    }
}

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
