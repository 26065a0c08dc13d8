//! Packed rows of several chains.

use crate::batch::{check_distinct, check_slots};
use crate::error::{Error, Result};

const OP: &str = "gdn-prefill sequences";

/// Chains whose rows lie one after another, and the pool slot of each. Row `cu_rows[b] + t` is row `t` of sequence `b`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences {
    cu_rows: Vec<i32>,
    slots: Vec<i32>,
}

impl Sequences {
    /// Most rows of one sequence.
    pub const MAX_ROWS: usize = 65_536;

    /// Packs sequences of `lens` rows; sequence `b` owns pool slot `slots[b]`. Slot -1 marks a padding sequence: its rows are zero in the
    /// output and nothing is read or written for it.
    ///
    /// # Errors
    /// When the counts differ, a length is 0 or above [`Self::MAX_ROWS`], all rows together are 2^31 or more, a slot is below -1, or two
    /// sequences share a slot.
    pub fn new(lens: &[usize], slots: Vec<i32>) -> Result<Self> {
        if lens.len() != slots.len() {
            let (expected, got) = (Box::new([lens.len()]), Box::new([slots.len()]));
            return Err(Error::Shape { op: OP, arg: "slots", expected, got });
        }
        let bad = |expected: String, got: usize| Error::Value {
            op: OP,
            arg: "rows",
            expected,
            got: got.to_string(),
        };
        if let Some(&len) = lens.iter().find(|&&len| len == 0 || len > Self::MAX_ROWS) {
            return Err(bad(format!("1 to {} a sequence", Self::MAX_ROWS), len));
        }
        check_distinct(OP, &slots)?;
        let mut cu_rows = vec![0i32];
        let mut total = 0usize;
        for &len in lens {
            total += len;
            cu_rows.push(i32::try_from(total).map_err(|_| bad("below 2^31 in all".into(), total))?);
        }
        Ok(Self { cu_rows, slots })
    }

    /// B, the number of sequences.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// N, the number of packed rows.
    pub fn rows(&self) -> usize {
        self.cu_rows[self.slots.len()] as usize
    }

    /// `[B + 1]`: first row of every sequence, then N.
    pub fn cu_rows(&self) -> &[i32] {
        &self.cu_rows
    }

    /// `[B]`: pool slot of every sequence, -1 for padding.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Rows of every sequence.
    pub fn lens(&self) -> impl Iterator<Item = usize> {
        self.cu_rows.windows(2).map(|ends| (ends[1] - ends[0]) as usize)
    }

    /// `(first row, rows, slot)` of every sequence; the slot is `None` for padding.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, Option<usize>)> {
        let firsts = self.cu_rows.iter().map(|&row| row as usize);
        firsts
            .zip(self.lens())
            .zip(&self.slots)
            .map(|((first, len), &slot)| (first, len, usize::try_from(slot).ok()))
    }

    /// Checks that every slot lies inside a pool of `pool_slots` slots.
    ///
    /// # Errors
    /// [`Error::Value`] naming the slot.
    pub fn check_slots(&self, op: &'static str, pool_slots: usize) -> Result<()> {
        check_slots(&self.slots, op, pool_slots)
    }
}
