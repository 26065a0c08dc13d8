//! A batch of trees, and their accepted paths, as device buffers prepared once per round.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};

use crate::error::expect_len;
use crate::tree_gdn::{Plan, Schedule};
use crate::{AcceptedPaths, DraftTree, Error, Result, TreeBatch};

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
    /// `[B]`, -1 = padding, -2 = another launch's: [`Self::part`].
    pub slots: CudaSlice<i32>,
    /// Whether each sequence is this one's.
    pub kept: Vec<bool>,
    /// The plans of all trees, one after another ([`Plan::words`]).
    pub plans: CudaSlice<u32>,
    /// `[B + 1]` first word of every plan.
    pub plan_at: CudaSlice<i32>,
    /// Most nodes of one kept tree.
    pub most_nodes: usize,
    /// Most path entries of one plan.
    pub most_entries: usize,
    /// Most words of one plan.
    pub most_words: usize,
}

impl TreeOnDevice {
    /// Copies what the kernels read; every tree is solved under [`Schedule::for_tree`].
    pub fn new(stream: &Arc<CudaStream>, batch: &TreeBatch) -> Result<Self> {
        Self::with_schedule(stream, batch, Schedule::for_tree)
    }

    /// Of every sequence b with `kept[b]`: the verify launches of `tree_gdn` and `tree_gdn_serial` leave the others' rows as they are, so that
    /// two launches of different designs can share a batch.
    ///
    /// # Errors
    /// When `kept` has another length, or from the driver.
    pub fn part(stream: &Arc<CudaStream>, batch: &TreeBatch, kept: &[bool]) -> Result<Self> {
        expect_len("draft trees", "kept", &[batch.sequences()], kept.len())?;
        Self::copy(stream, batch, Schedule::for_tree, kept.to_vec())
    }

    /// [`Self::new`] under a schedule of the caller's choice.
    pub fn with_schedule(
        stream: &Arc<CudaStream>,
        batch: &TreeBatch,
        schedule: impl Fn(&DraftTree) -> Schedule,
    ) -> Result<Self> {
        Self::copy(stream, batch, schedule, vec![true; batch.sequences()])
    }

    fn copy(
        stream: &Arc<CudaStream>,
        batch: &TreeBatch,
        schedule: impl Fn(&DraftTree) -> Schedule,
        kept: Vec<bool>,
    ) -> Result<Self> {
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
        let own = || batch.trees().iter().zip(&kept);
        let plans: Vec<Option<Plan>> =
            own().map(|(tree, &kept)| kept.then(|| Plan::new(tree, schedule(tree)))).collect();
        let words_of = |plan: &Option<Plan>| plan.as_ref().map_or(0, |plan| plan.words().len());
        let slot = |(&slot, &kept): (&i32, &bool)| if kept { slot } else { -2 };
        let slots: Vec<i32> = batch.slots().iter().zip(&kept).map(slot).collect();
        let mut plan_at = vec![0i32];
        plan_at.extend(plans.iter().scan(0, |at, plan| {
            *at += words_of(plan) as i32;
            Some(*at)
        }));
        let words: Vec<u32> = plans.iter().flatten().flat_map(|plan| plan.words().iter().copied()).collect();
        let words = if words.is_empty() { vec![0] } else { words };
        Ok(Self {
            plans: stream.clone_htod(&words).map_err(driver)?,
            plan_at: stream.clone_htod(&plan_at).map_err(driver)?,
            most_nodes: own().filter(|&(_, &kept)| kept).map(|(tree, _)| tree.len()).max().unwrap_or(0),
            most_entries: plans.iter().flatten().map(Plan::entries).max().unwrap_or(0),
            most_words: plans.iter().map(words_of).max().unwrap_or(0),
            parents: stream.clone_htod(&parents).map_err(driver)?,
            sequence: stream.clone_htod(&sequence).map_err(driver)?,
            mask: stream.clone_htod(&mask).map_err(driver)?,
            cu_nodes: stream.clone_htod(batch.cu_nodes()).map_err(driver)?,
            slots: stream.clone_htod(&slots).map_err(driver)?,
            kept,
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
    /// `[B + 1]` first packed row of every tree.
    pub cu_nodes: CudaSlice<i32>,
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
            cu_nodes: stream.clone_htod(paths.cu_nodes()).map_err(driver)?,
        })
    }
}
