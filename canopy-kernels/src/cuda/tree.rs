//! A batch of trees, and their accepted paths, as device buffers prepared once per round.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};

use crate::{AcceptedPaths, Error, Result, TreeBatch};

/// Words of one node's ancestor mask: bits for [`crate::DraftTree::MAX_NODES`] nodes, the node itself included.
pub const MASK_WORDS: usize = 8;

/// A [`TreeBatch`] on a device.
#[derive(Debug)]
pub struct TreeOnDevice {
    /// `[N]` tree-local parents, -1 for a root.
    pub parents: CudaSlice<i32>,
    /// `[N]` sequence of every row.
    pub sequence: CudaSlice<i32>,
    /// `[N, 8]` ancestors and self.
    pub mask: CudaSlice<u32>,
    /// `[B + 1]`.
    pub cu_nodes: CudaSlice<i32>,
    /// `[B]`, -1 = padding.
    pub slots: CudaSlice<i32>,
}

impl TreeOnDevice {
    /// Copies what the kernels read.
    pub fn new(stream: &Arc<CudaStream>, batch: &TreeBatch) -> Result<Self> {
        let driver = |source| Error::Driver { op: "draft trees", source };
        let (mut parents, mut sequence, mut mask) = (Vec::new(), Vec::new(), Vec::<u32>::new());
        for (b, (_, tree, _)) in batch.iter().enumerate() {
            let first = mask.len();
            for node in 0..tree.len() {
                let mut row = [0u32; MASK_WORDS];
                if let Some(parent) = tree.parent(node) {
                    row.copy_from_slice(&mask[first + parent * MASK_WORDS..][..MASK_WORDS]);
                }
                row[node / 32] |= 1 << (node % 32);
                mask.extend(row);
            }
            parents.extend_from_slice(tree.parents());
            sequence.extend(std::iter::repeat_n(b as i32, tree.len()));
        }
        Ok(Self {
            parents: stream.clone_htod(&parents).map_err(driver)?,
            sequence: stream.clone_htod(&sequence).map_err(driver)?,
            mask: stream.clone_htod(&mask).map_err(driver)?,
            cu_nodes: stream.clone_htod(batch.cu_nodes()).map_err(driver)?,
            slots: stream.clone_htod(batch.slots()).map_err(driver)?,
        })
    }
}

/// [`AcceptedPaths`] on a device.
#[derive(Debug)]
pub struct PathsOnDevice {
    /// Packed rows of all paths.
    pub rows: CudaSlice<i32>,
    /// `[B + 1]`.
    pub cu_rows: CudaSlice<i32>,
    /// `[B]`, -1 = padding.
    pub slots: CudaSlice<i32>,
}

impl PathsOnDevice {
    /// Copies what the kernels read.
    pub fn new(stream: &Arc<CudaStream>, paths: &AcceptedPaths) -> Result<Self> {
        let driver = |source| Error::Driver { op: "accepted paths", source };
        let rows = if paths.rows().is_empty() { &[0][..] } else { paths.rows() };
        Ok(Self {
            rows: stream.clone_htod(rows).map_err(driver)?,
            cu_rows: stream.clone_htod(paths.cu_rows()).map_err(driver)?,
            slots: stream.clone_htod(paths.slots()).map_err(driver)?,
        })
    }
}
