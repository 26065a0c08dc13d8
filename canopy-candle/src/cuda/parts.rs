//! The two kinds of sequences of a batch: trees to solve, chains to walk.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream};
use canopy_kernels::cuda::{Kernels, TreeLayout, TreeOnDevice, Words};
use canopy_kernels::tree_gdn::dispatch::{self, Design, Dtype, Form, Query};
use canopy_kernels::{GdnDims, Result, TreeBatch};

/// How a batch is shared between the two forms of the delta rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Parts<T> {
    /// Every sequence is solved.
    Solved,
    /// Every sequence is a chain that is walked.
    Walked,
    /// Some are solved (the first half), some walked (the second).
    Both(Box<[T; 2]>),
}

impl<T> Parts<T> {
    fn map<U>(&self, change: impl Fn(&T) -> U) -> Parts<U> {
        match self {
            Self::Solved => Parts::Solved,
            Self::Walked => Parts::Walked,
            Self::Both(parts) => Parts::Both(Box::new(parts.each_ref().map(change))),
        }
    }
}

/// A batch's lists among [`Words`], the whole and its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BatchLayout {
    whole: TreeLayout,
    parts: Parts<TreeLayout>,
}

impl BatchLayout {
    /// Decides by every tree's own shape, so that a row's bits do not depend on what shares its batch.
    pub(crate) fn new(stream: &Arc<CudaStream>, batch: &TreeBatch, words: &mut Words) -> Result<Self> {
        let walked = walked(stream, batch)?;
        let whole = TreeLayout::new(batch, words);
        let parts = match (walked.contains(&true), walked.contains(&false)) {
            (false, _) => Parts::Solved,
            (true, false) => Parts::Walked,
            (true, true) => {
                let solved: Vec<bool> = walked.iter().map(|walked| !walked).collect();
                let mut part = |kept: &[bool]| TreeLayout::part(batch, kept, words);
                Parts::Both(Box::new([part(&solved)?, part(&walked)?]))
            }
        };
        Ok(Self { whole, parts })
    }

    /// The lists in an upload of the words.
    pub(crate) fn on(&self, upload: &Arc<CudaSlice<u32>>) -> (TreeOnDevice, Parts<TreeOnDevice>) {
        (self.whole.on(upload), self.parts.map(|part| part.on(upload)))
    }
}

fn walked(stream: &Arc<CudaStream>, batch: &TreeBatch) -> Result<Vec<bool>> {
    let sm = Kernels::on(stream.context())?.sm();
    batch.trees().iter().map(|tree| dispatch::walks(sm, tree)).collect()
}

/// Whether each sequence's bf16 outputs come from the blocked design, by its own tree's shape.
pub(crate) fn blocked(stream: &Arc<CudaStream>, batch: &TreeBatch) -> Result<Vec<bool>> {
    let sm = Kernels::on(stream.context())?.sm();
    batch.trees().iter().map(|tree| dispatch::blocks(sm, tree)).collect()
}

/// The dispatched design for the kept sequences of a batch.
pub(crate) fn design(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
    kept: &[bool],
    (dtype, form): (Dtype, Form),
) -> Result<Design> {
    let sm = Kernels::on(stream.context())?.sm();
    let trees = batch.trees().iter().zip(kept).filter(|&(_, &kept)| kept).map(|(tree, _)| tree);
    dispatch::design(Query::new(sm, dtype, dims, trees, form))
}

/// The designs that verify a batch's solved and walked sequences.
pub(crate) fn designs(
    stream: &Arc<CudaStream>,
    dims: GdnDims,
    batch: &TreeBatch,
) -> Result<[Option<Design>; 2]> {
    let walked = walked(stream, batch)?;
    let solved: Vec<bool> = walked.iter().map(|walked| !walked).collect();
    let of = |kept: &[bool], form| {
        let any = kept.contains(&true);
        any.then(|| design(stream, dims, batch, kept, (Dtype::F32, form))).transpose()
    };
    Ok([of(&solved, Form::Solve)?, of(&walked, Form::Walk)?])
}
