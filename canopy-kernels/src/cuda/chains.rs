//! Long chains as device buffers.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::words::{DeviceList, Words};
use crate::gdn_prefill::Sequences;
use crate::{ConvDims, Result};

/// What the convolution reads of [`Sequences`].
#[derive(Clone, Debug)]
pub struct ChainsOnDevice {
    /// `[N]` the row before every row, counted from its chain's first one, -1 for that.
    pub parents: DeviceList<i32>,
    /// `[N]` chain of every row.
    pub sequence: DeviceList<i32>,
    /// `[B + 1]`.
    pub cu_rows: DeviceList<i32>,
    /// `[B]`, -1 = padding.
    pub slots: DeviceList<i32>,
    /// The last rows of every chain, at most as many as a conv state has.
    pub last: DeviceList<i32>,
    /// `[B + 1]` where each chain's last rows start.
    pub cu_last: DeviceList<i32>,
}

impl ChainsOnDevice {
    /// Copies all lists, in one go.
    ///
    /// # Errors
    /// From the driver.
    pub fn new(stream: &Arc<CudaStream>, sequences: &Sequences) -> Result<Self> {
        let (rows, count) = (sequences.rows(), sequences.len());
        let (mut parents, mut sequence) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        let (mut last, mut cu_last) = (Vec::new(), vec![0i32]);
        for (b, (first, len, _)) in sequences.iter().enumerate() {
            parents.extend((0..len as i32).map(|row| row - 1));
            sequence.extend(std::iter::repeat_n(b as i32, len));
            let end = first + len;
            last.extend((end - len.min(ConvDims::STATE_ROWS)..end).map(|row| row as i32));
            cu_last.push(last.len() as i32);
        }
        let (mut words, last_rows) = (Words::default(), last.len());
        let places = [
            words.push(parents, rows),
            words.push(sequence, rows),
            words.push(sequences.cu_rows().iter().copied(), count + 1),
            words.push(sequences.slots().iter().copied(), count),
            words.push(last, last_rows),
            words.push(cu_last, count + 1),
        ];
        let upload = words.upload(stream)?;
        let [parents, sequence, cu_rows, slots, last, cu_last] =
            places.map(|place| DeviceList::new(&upload, place));
        Ok(Self { parents, sequence, cu_rows, slots, last, cu_last })
    }
}
