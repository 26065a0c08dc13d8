//! The two kinds of sequences of a batch: trees to solve, chains to walk.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use canopy_kernels::cuda::{Kernels, TreeOnDevice};
use canopy_kernels::tree_gdn::dispatch;
use canopy_kernels::{Result, TreeBatch};

/// How a batch is shared between the two forms of the delta rule.
#[derive(Debug)]
pub(crate) enum Parts {
    /// Every sequence is solved.
    Solved,
    /// Every sequence is a chain that is walked.
    Walked,
    /// Some are solved (the first half), some walked (the second).
    Both(Box<[TreeOnDevice; 2]>),
}

impl Parts {
    /// Decides by every tree's own shape, so that a row's bits do not depend on what shares its batch.
    pub(crate) fn new(stream: &Arc<CudaStream>, batch: &TreeBatch) -> Result<Self> {
        let sm = Kernels::on(stream.context())?.sm();
        let walked =
            batch.trees().iter().map(|tree| dispatch::walks(sm, tree)).collect::<Result<Vec<_>>>()?;
        if !walked.contains(&true) {
            return Ok(Self::Solved);
        }
        if !walked.contains(&false) {
            return Ok(Self::Walked);
        }
        let solved: Vec<bool> = walked.iter().map(|walked| !walked).collect();
        let part = |kept: &[bool]| TreeOnDevice::part(stream, batch, kept);
        Ok(Self::Both(Box::new([part(&solved)?, part(&walked)?])))
    }
}
