//! The shapes of a CTA's work, and which one a device takes.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::Result;
use crate::cuda::Kernels;

/// The file of the tiles on warpgroup products, fed by the copy engine.
const RING: &str = "attend/ring_sm90a";
/// All the shared memory of a block there: its CTAs have a multiprocessor each.
const RING_BYTES: usize = 232_448;

/// How many (row, query head) pairs a CTA takes, and how it holds its keys. The bits do not depend on it within a family: the first three
/// are one, the last three the other, and a device uses one family only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// 128 rows, two stages of keys.
    Wide,
    /// 64 rows, two stages.
    Narrow,
    /// 64 rows, one stage: fits a device with 99 KiB of shared memory a block.
    Tight,
    /// 64 rows by one warpgroup or 128 by two, as the stream's keys ask for, fed by the copy engine, compute capability 9.0 only.
    Fed,
    /// The same, always 128 rows.
    FedTwo,
    /// The same, always 64 rows.
    FedOne,
}

impl Tile {
    /// The tile for streams of up to `pairs` (row, query head of a group) pairs.
    pub(super) fn pick(pairs: usize, head_dim: usize, kernels: &Kernels) -> Self {
        Self::pick_for(pairs, head_dim, kernels.shared_limit(), kernels.has(RING))
    }

    /// The same on a device whose blocks may have `limit` bytes of shared memory, and that has the ring's kernels or not.
    fn pick_for(pairs: usize, head_dim: usize, limit: usize, ring: bool) -> Self {
        let best = match (ring, pairs) {
            (true, _) => Self::Fed,
            (false, ..=64) => Self::Narrow,
            (false, _) => Self::Wide,
        };
        if best.shared(head_dim) <= limit { best } else { Self::Tight }
    }

    /// The families that run on the device of `stream`; the default tiles are of the first.
    ///
    /// # Errors
    /// From the driver.
    pub fn families(stream: &Arc<CudaStream>) -> Result<Vec<&'static [Self]>> {
        let kernels = Kernels::on(stream.context())?;
        let mut families: Vec<&[Self]> = vec![&[Self::Wide, Self::Narrow, Self::Tight]];
        if Self::Wide.shared(256) > kernels.shared_limit() {
            families = vec![&[Self::Tight]];
        }
        if kernels.has(RING) {
            families.insert(0, &[Self::Fed, Self::FedTwo, Self::FedOne]);
        }
        Ok(families)
    }

    /// Rows of a CTA, where the kernel does not choose.
    pub(super) fn rows(self) -> Option<usize> {
        match self {
            Self::Wide | Self::FedTwo => Some(128),
            Self::Narrow | Self::Tight | Self::FedOne => Some(64),
            Self::Fed => None,
        }
    }

    /// Whether `ring_sm90a.cu` has it.
    pub(super) fn rings(self) -> bool {
        matches!(self, Self::Fed | Self::FedTwo | Self::FedOne)
    }

    /// Bytes of shared memory (`Shape::kBytes` of attend.cu).
    pub fn shared(self, head_dim: usize) -> usize {
        let (rows, keys) = (self.rows().unwrap_or(128), tile_keys(head_dim));
        let (stages, weights, lists) = match self {
            Self::Wide | Self::Narrow => (2, 2 * rows * keys, 24 * rows),
            Self::Tight => (1, 0, 24 * rows),
            Self::Fed | Self::FedTwo | Self::FedOne => return RING_BYTES,
        };
        2 * rows * head_dim + 4 * stages * keys * head_dim + weights + lists + 16
    }

    /// Image, and symbols for head widths 256 and 128.
    pub(super) fn kernel(self) -> (&'static str, [&'static str; 2]) {
        const PLAIN: &str = "attend/attend";
        match self {
            Self::Wide => (PLAIN, ["attend_d256_r128_s2", "attend_d128_r128_s2"]),
            Self::Narrow => (PLAIN, ["attend_d256_r64_s2", "attend_d128_r64_s2"]),
            Self::Tight => (PLAIN, ["attend_d256_r64_s1", "attend_d128_r64_s1"]),
            Self::Fed | Self::FedTwo | Self::FedOne => (RING, ["attend_ring_d256", "attend_ring_d128"]),
        }
    }
}

/// Keys of a tile (args.cuh `kTileKeys`).
pub(super) fn tile_keys(head_dim: usize) -> usize {
    if head_dim == 256 { 64 } else { 128 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_the_rows_and_the_shared_memory() {
        for (pairs, head_dim, limit, ring, tile) in [
            (4, 256, 232_448, false, Tile::Narrow),
            (64, 128, 232_448, true, Tile::Fed),
            (65, 256, 232_448, false, Tile::Wide),
            (65, 256, 232_448, true, Tile::Fed),
            (65, 256, 166_912, false, Tile::Tight),
            (4, 256, 101_376, false, Tile::Tight),
            (1024, 128, 101_376, false, Tile::Tight),
        ] {
            assert_eq!(
                Tile::pick_for(pairs, head_dim, limit, ring),
                tile,
                "{pairs} pairs x {head_dim}, {limit} bytes"
            );
            assert!(tile.shared(head_dim) <= limit);
        }
    }
}
