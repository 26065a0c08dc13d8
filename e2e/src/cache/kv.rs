//! Keys and values of one attention layer.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{AttnDims, DevicePaths, kv_append_pair, kv_compact};

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

    /// Writes packed rows `[N, Hkv, D]`, rounded to the pools' dtype, at `starts` of their slots.
    pub fn append(
        &self,
        keys: &Tensor,
        values: &Tensor,
        cu_rows: &[i32],
        slots: &[i32],
        starts: &[i32],
    ) -> Result<()> {
        Ok(kv_append_pair((&self.keys, &self.values), (keys, values), cu_rows, slots, starts)?)
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
