//! Drafters: what proposes a block of tokens after a stream's root.

mod dflash;
mod dflash_cache;
mod dflash_layer;

use candle_core::Tensor;
use canopy_candle::PassCounts;

pub use dflash::{DFlash, DraftOptions};

use crate::Result;
use crate::target::Snapshot;

/// One stream's draft in a call.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest {
    /// The stream's slot.
    pub slot: usize,
    /// The root token: last sampled, not yet in any state.
    pub root: u32,
    /// Depths whose logits are wanted, at most `block_size - 1`.
    pub horizon: usize,
}

/// A block drafter over target features.
pub trait Drafter: Send {
    /// Rows of a draft block: the root and `block_size - 1` drafted positions.
    fn block_size(&self) -> usize;
    /// Target layer ids whose outputs are the features.
    fn taps(&self) -> &[usize];
    /// Context rows of a slot.
    fn context_len(&self, slot: usize) -> usize;
    /// Forgets a slot's context.
    fn reset(&mut self, slot: usize) -> Result<()>;
    /// Appends committed tokens' features `[n, taps * hidden]` to a slot's context.
    fn extend(&mut self, slot: usize, features: &Tensor) -> Result<()>;
    /// [`Self::extend`] for several slots: `features` holds the rows of the first slot, then those of the next.
    /// `rows` lists (slot, number of rows), every slot once.
    fn extend_packed(&mut self, rows: &[(usize, usize)], features: &Tensor) -> Result<()> {
        let mut first = 0;
        for &(slot, count) in rows {
            self.extend(slot, &features.narrow(0, first, count)?)?;
            first += count;
        }
        Ok(())
    }
    /// Logits `[horizon, vocab]` f32 for depths 1..=horizon, one tensor per request.
    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Tensor>>;
    /// [`Self::draft`] with blocks of only `rows` rows, the root and `rows - 1` drafted positions: cheaper, and as a
    /// rule less sure, since the drafter was trained on whole blocks. A drafter that knows one length only draws whole
    /// blocks. Horizons are at most `rows - 1`.
    fn draft_rows(&mut self, requests: &[DraftRequest], rows: usize) -> Result<Vec<Tensor>> {
        let _ = rows;
        self.draft(requests)
    }
    /// [`Self::draft_rows`] as fast as the drafter can, through rounded weights where it has them: a little less sure
    /// again. `auto` drafts so.
    fn draft_quickly(&mut self, requests: &[DraftRequest], rows: usize) -> Result<Vec<Tensor>> {
        self.draft_rows(requests, rows)
    }
    /// [`Self::draft_rows`], or [`Self::draft_quickly`], with the logits of all requests one below the other, `[sum of horizons, vocab]`.
    fn draft_packed(&mut self, requests: &[DraftRequest], rows: usize, quick: bool) -> Result<Tensor> {
        let logits = match quick {
            true => self.draft_quickly(requests, rows)?,
            false => self.draft_rows(requests, rows)?,
        };
        Ok(Tensor::cat(&logits, 0)?)
    }
    /// Saves a slot's context.
    fn snapshot(&self, slot: usize) -> Result<Snapshot>;
    /// Puts a saved context into a slot.
    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()>;
    /// Makes room for recordings of other blocks than those so far, which were run to be timed.
    fn forget_recordings(&mut self) {}
    /// How its passes ran: replayed from recordings or launched kernel by kernel.
    fn pass_counts(&self) -> PassCounts {
        PassCounts::default()
    }
}
