//! The drafter's own cache: keys and values of every committed token's features, for every layer.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{AttnDims, CacheRows, DraftBlocks};

use crate::cache::KvPool;
use crate::target::{Snapshot, tensor_bytes};
use crate::{Error, Result};

/// One sequence's context, saved: rows, and keys and values per layer.
#[derive(Debug)]
struct Saved {
    rows: usize,
    layers: Vec<(Tensor, Tensor)>,
}

/// Where packed rows go: `counts[b]` rows of sequence b to slot `slots[b]` from `starts[b]` on.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) slots: Vec<i32>,
    pub(super) starts: Vec<i32>,
    pub(super) cu_rows: Vec<i32>,
}

impl Rows {
    /// As the ops take them.
    pub(super) fn cache_rows(&self) -> CacheRows<'_> {
        CacheRows { cu_rows: &self.cu_rows, slots: &self.slots, starts: &self.starts }
    }

    /// Absolute position of every row; a context or block row's position is its place in the slot.
    pub(super) fn positions(&self) -> Vec<i32> {
        let counts = self.cu_rows.windows(2).map(|pair| pair[1] - pair[0]);
        self.starts.iter().zip(counts).flat_map(|(&start, count)| start..start + count).collect()
    }
}

/// Context keys and values of all slots. A block's own rows are written behind the context and forgotten.
#[derive(Debug)]
pub(super) struct ContextCache {
    pools: Vec<KvPool>,
    lens: Vec<usize>,
    capacity: usize,
    block_size: usize,
}

/// Sizes of a [`ContextCache`].
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheSize {
    pub(super) slots: usize,
    pub(super) context_len: usize,
    pub(super) layers: usize,
    pub(super) block_size: usize,
}

impl ContextCache {
    /// Empty pools with room for `context_len` context rows and a block in every slot.
    pub(super) fn new(size: CacheSize, dims: AttnDims, device: &Device) -> Result<Self> {
        let capacity = size.context_len + size.block_size;
        let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
        let pool = |_| KvPool::new(size.slots, capacity, dims, dtype, device);
        Ok(Self {
            pools: (0..size.layers).map(pool).collect::<Result<_>>()?,
            lens: vec![0; size.slots],
            capacity,
            block_size: size.block_size,
        })
    }

    /// Context rows of a slot; 0 for a slot that is not there.
    pub(super) fn len(&self, slot: usize) -> usize {
        self.lens.get(slot).copied().unwrap_or(0)
    }

    /// Checks that a slot is there.
    pub(super) fn check_slot(&self, slot: usize) -> Result<()> {
        if slot < self.lens.len() {
            return Ok(());
        }
        let expected = format!("below the drafter's {} slots", self.lens.len());
        Err(Error::Request { field: "slot", expected, got: slot.to_string() })
    }

    /// Forgets a slot's rows.
    pub(super) fn reset(&mut self, slot: usize) -> Result<()> {
        self.check_slot(slot)?;
        self.lens[slot] = 0;
        Ok(())
    }

    /// Where `rows` (slot, count) go when they follow the context; checks slots and room. A block may always follow.
    pub(super) fn place(&self, rows: &[(usize, usize)], room: usize) -> Result<Rows> {
        let mut placed = Rows { slots: Vec::new(), starts: Vec::new(), cu_rows: vec![0] };
        let mut end = 0;
        for &(slot, count) in rows {
            self.check_slot(slot)?;
            if placed.slots.contains(&(slot as i32)) {
                let got = format!("slot {slot} twice");
                return Err(Error::Request { field: "slot", expected: "distinct slots".into(), got });
            }
            if self.lens[slot] + count > self.capacity - room {
                let expected = format!("at most {} rows in slot {slot}", self.capacity - room);
                let got = (self.lens[slot] + count).to_string();
                return Err(Error::Request { field: "features", expected, got });
            }
            end += count as i32;
            placed.slots.push(slot as i32);
            placed.starts.push(self.lens[slot] as i32);
            placed.cu_rows.push(end);
        }
        Ok(placed)
    }

    /// Where context rows go: room for a block stays behind them.
    pub(super) fn place_context(&self, rows: &[(usize, usize)]) -> Result<Rows> {
        self.place(rows, self.block_size)
    }

    /// Where blocks of `block_rows` rows go.
    pub(super) fn place_blocks(&self, slots: &[usize], block_rows: usize) -> Result<(Rows, DraftBlocks)> {
        let rows: Vec<(usize, usize)> = slots.iter().map(|&slot| (slot, block_rows)).collect();
        let rows = self.place(&rows, 0)?;
        let (slots, context_lens) = (rows.slots.clone(), rows.starts.clone());
        Ok((rows, DraftBlocks { block_size: block_rows, slots, context_lens }))
    }

    /// Rows of a slot in every pool.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The pool of a layer.
    pub(super) fn pool(&self, layer: usize) -> &KvPool {
        &self.pools[layer]
    }

    /// Makes the rows written at `rows` part of the context.
    pub(super) fn advance(&mut self, rows: &Rows) {
        for (&slot, pair) in rows.slots.iter().zip(rows.cu_rows.windows(2)) {
            self.lens[slot as usize] += (pair[1] - pair[0]) as usize;
        }
    }

    /// Copies of a slot's keys and values `[rows, Hkv, D]` per layer.
    pub(super) fn copy(&self, slot: usize) -> Result<Vec<(Tensor, Tensor)>> {
        self.check_slot(slot)?;
        self.pools.iter().map(|pool| pool.save(slot, self.lens[slot])).collect()
    }

    /// Saves a slot.
    pub(super) fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        let layers = self.copy(slot)?;
        let bytes = tensor_bytes(&layers);
        Ok(Snapshot::new(Saved { rows: self.lens[slot], layers }, bytes))
    }

    /// Puts a saved context into a slot.
    pub(super) fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.check_slot(slot)?;
        let room = self.capacity - self.block_size;
        let fits = |saved: &&Saved| saved.layers.len() == self.pools.len() && saved.rows <= room;
        let Some(saved) = snapshot.get::<Saved>().filter(fits) else {
            let expected = "a snapshot that this drafter took".into();
            return Err(Error::Request { field: "snapshot", expected, got: "another".into() });
        };
        for (pool, layer) in self.pools.iter().zip(&saved.layers) {
            pool.load(slot, layer)?;
        }
        self.lens[slot] = saved.rows;
        Ok(())
    }
}
