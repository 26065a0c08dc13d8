//! A batch of trees, and their accepted paths, as device buffers prepared once per round.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};

use super::words::{DeviceList, Place, Words};
use crate::error::expect_len;
use crate::tree_gdn::{Plan, Schedule};
use crate::{AcceptedPaths, DraftTree, Result, TreeBatch};

/// Words of one node's ancestor mask: bits for [`crate::DraftTree::MAX_NODES`] nodes, the node itself included.
pub const MASK_WORDS: usize = 8;

/// A [`TreeBatch`] on a device.
#[derive(Clone, Debug)]
pub struct TreeOnDevice {
    /// `[N]` tree-local parents, -1 for a root.
    pub parents: DeviceList<i32>,
    /// `[N]` sequence of every row.
    pub sequence: DeviceList<i32>,
    /// `[N, 8]` ancestors and self.
    pub mask: DeviceList<u32>,
    /// `[B + 1]`.
    pub cu_nodes: DeviceList<i32>,
    /// `[B]`, -1 = padding, -2 = another launch's: [`Self::part`].
    pub slots: DeviceList<i32>,
    /// Whether each sequence is this one's.
    pub kept: Vec<bool>,
    /// The plans of all trees, one after another ([`Plan::words`]).
    pub plans: DeviceList<u32>,
    /// `[B + 1]` first word of every plan.
    pub plan_at: DeviceList<i32>,
    /// Most nodes of one kept tree.
    pub most_nodes: usize,
    /// Path entries that every plan has at most.
    pub most_entries: usize,
    /// Words that every plan has at most.
    pub most_words: usize,
}

/// Where the lists of a [`TreeOnDevice`] lie among [`Words`], and all else that its launches depend on besides its batch's node counts:
/// batches of one layout and the same counts are launched alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TreeLayout {
    places: [Place; 7],
    kept: Vec<bool>,
    most_nodes: usize,
    most_entries: usize,
    most_words: usize,
}

/// What the largest tree of a batch takes of a block's shared memory, each number by itself the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Most nodes of one tree.
    pub nodes: usize,
    /// Most path entries of one plan.
    pub entries: usize,
    /// Most words of one plan.
    pub words: usize,
}

/// `n` rounded up by at most a quarter and at most 255, so that trees of about one size share a layout.
fn rounded_up(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 4).clamp(16, 256))
}

impl TreeLayout {
    /// Appends the lists of a batch; every tree is solved under [`Schedule::for_tree`].
    pub fn new(batch: &TreeBatch, words: &mut Words) -> Self {
        Self::with(batch, Schedule::for_tree, vec![true; batch.sequences()], words)
    }

    /// The lists alone, without plans: for attention, which solves nothing.
    pub fn unsolved(batch: &TreeBatch, words: &mut Words) -> Self {
        Self::of(batch, vec![None; batch.sequences()], vec![true; batch.sequences()], words)
    }

    /// [`Self::new`] of the sequences that [`TreeOnDevice::part`] keeps.
    ///
    /// # Errors
    /// When `kept` has another length.
    pub fn part(batch: &TreeBatch, kept: &[bool], words: &mut Words) -> Result<Self> {
        expect_len("draft trees", "kept", &[batch.sequences()], kept.len())?;
        Ok(Self::with(batch, Schedule::for_tree, kept.to_vec(), words))
    }

    fn with(
        batch: &TreeBatch,
        schedule: impl Fn(&DraftTree) -> Schedule,
        kept: Vec<bool>,
        words: &mut Words,
    ) -> Self {
        let plan = |(tree, &kept): (&DraftTree, &bool)| kept.then(|| Plan::new(tree, schedule(tree)));
        let plans = batch.trees().iter().zip(&kept).map(plan).collect();
        Self::of(batch, plans, kept, words)
    }

    fn of(batch: &TreeBatch, plans: Vec<Option<Plan>>, kept: Vec<bool>, words: &mut Words) -> Self {
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
        let words_of = |plan: &Option<Plan>| plan.as_ref().map_or(0, |plan| plan.words().len());
        let slot = |(&slot, &kept): (&i32, &bool)| if kept { slot } else { -2 };
        let mut plan_at = vec![0i32];
        plan_at.extend(plans.iter().scan(0, |at, plan| {
            *at += words_of(plan) as i32;
            Some(*at)
        }));
        let plan_words: usize = plans.iter().map(words_of).sum();
        let (rows, sequences) = (batch.rows(), batch.sequences());
        let places = [
            words.push(parents, rows),
            words.push(sequence, rows),
            words.push(mask, rows * MASK_WORDS),
            words.push(batch.cu_nodes().iter().copied(), sequences + 1),
            words.push(batch.slots().iter().zip(&kept).map(slot), sequences),
            words.push(plan_at, sequences + 1),
            words.push(
                plans.iter().flatten().flat_map(|plan| plan.words().iter().copied()),
                rounded_up(plan_words),
            ),
        ];
        Self {
            places,
            most_nodes: own().filter(|&(_, &kept)| kept).map(|(tree, _)| tree.len()).max().unwrap_or(0),
            most_entries: rounded_up(plans.iter().flatten().map(Plan::entries).max().unwrap_or(0)),
            most_words: rounded_up(plans.iter().map(words_of).max().unwrap_or(0)),
            kept,
        }
    }

    /// What the largest tree takes.
    pub fn needs(&self) -> Needs {
        Needs { nodes: self.most_nodes, entries: self.most_entries, words: self.most_words }
    }

    /// The lists in an upload of the words.
    pub fn on(&self, upload: &Arc<CudaSlice<u32>>) -> TreeOnDevice {
        let [parents, sequence, mask, cu_nodes, slots, plan_at, plans] = self.places.clone();
        TreeOnDevice {
            parents: DeviceList::new(upload, parents),
            sequence: DeviceList::new(upload, sequence),
            mask: DeviceList::new(upload, mask),
            cu_nodes: DeviceList::new(upload, cu_nodes),
            slots: DeviceList::new(upload, slots),
            kept: self.kept.clone(),
            plans: DeviceList::new(upload, plans),
            plan_at: DeviceList::new(upload, plan_at),
            most_nodes: self.most_nodes,
            most_entries: self.most_entries,
            most_words: self.most_words,
        }
    }
}

impl TreeOnDevice {
    /// What the largest tree takes.
    pub fn needs(&self) -> Needs {
        Needs { nodes: self.most_nodes, entries: self.most_entries, words: self.most_words }
    }

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
        let mut words = Words::default();
        let layout = TreeLayout::part(batch, kept, &mut words)?;
        Ok(layout.on(&words.upload(stream)?))
    }

    /// [`Self::part`] of a batch whose lists are on the device: its plans serve, only the slots are copied.
    ///
    /// # Errors
    /// As [`Self::part`].
    pub fn keeping(&self, stream: &Arc<CudaStream>, batch: &TreeBatch, kept: &[bool]) -> Result<Self> {
        expect_len("draft trees", "kept", &[batch.sequences()], kept.len())?;
        let slot = |(&slot, &kept): (&i32, &bool)| if kept { slot } else { -2 };
        let own = batch.trees().iter().zip(kept).filter(|&(_, &kept)| kept);
        let mut words = Words::default();
        let slots = words.push(batch.slots().iter().zip(kept).map(slot), batch.sequences());
        Ok(Self {
            slots: DeviceList::new(&words.upload(stream)?, slots),
            kept: kept.to_vec(),
            most_nodes: own.map(|(tree, _)| tree.len()).max().unwrap_or(0),
            ..self.clone()
        })
    }

    /// [`Self::new`] under a schedule of the caller's choice.
    pub fn with_schedule(
        stream: &Arc<CudaStream>,
        batch: &TreeBatch,
        schedule: impl Fn(&DraftTree) -> Schedule,
    ) -> Result<Self> {
        let mut words = Words::default();
        let layout = TreeLayout::with(batch, schedule, vec![true; batch.sequences()], &mut words);
        Ok(layout.on(&words.upload(stream)?))
    }
}

/// [`AcceptedPaths`] on a device.
#[derive(Clone, Debug)]
pub struct PathsOnDevice {
    /// Packed rows of all paths.
    pub rows: DeviceList<i32>,
    /// `[B + 1]`.
    pub cu_rows: DeviceList<i32>,
    /// `[B]`, -1 = padding.
    pub slots: DeviceList<i32>,
    /// `[B + 1]` first packed row of every tree.
    pub cu_nodes: DeviceList<i32>,
}

/// Where the lists of a [`PathsOnDevice`] lie among [`Words`]; paths of one layout are launched alike, whatever their lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathsLayout([Place; 4]);

impl PathsLayout {
    /// Appends the lists of accepted paths, with room for every row of their batch.
    pub fn new(paths: &AcceptedPaths, words: &mut Words) -> Self {
        let most = paths.cu_nodes().last().map_or(0, |&rows| rows as usize);
        let mut push = |list: &[i32], room| words.push(list.iter().copied(), room);
        Self([
            push(paths.rows(), most),
            push(paths.cu_rows(), paths.cu_rows().len()),
            push(paths.slots(), paths.slots().len()),
            push(paths.cu_nodes(), paths.cu_nodes().len()),
        ])
    }

    /// The lists in an upload of the words.
    pub fn on(&self, upload: &Arc<CudaSlice<u32>>) -> PathsOnDevice {
        let [rows, cu_rows, slots, cu_nodes] = self.0.clone().map(|place| DeviceList::new(upload, place));
        PathsOnDevice { rows, cu_rows, slots, cu_nodes }
    }
}

impl PathsOnDevice {
    /// Copies what the kernels read.
    pub fn new(stream: &Arc<CudaStream>, paths: &AcceptedPaths) -> Result<Self> {
        let mut words = Words::default();
        let layout = PathsLayout::new(paths, &mut words);
        Ok(layout.on(&words.upload(stream)?))
    }
}

#[cfg(test)]
mod tests {
    use super::{PathsLayout, TreeLayout, Words, rounded_up};
    use crate::{AcceptedPaths, DraftTree, TreeBatch};

    fn layout(tree: DraftTree, slot: i32) -> (TreeLayout, Words) {
        let mut words = Words::default();
        let batch = TreeBatch::new(vec![tree], vec![slot]).unwrap();
        (TreeLayout::new(&batch, &mut words), words)
    }

    #[test]
    fn trees_of_one_size_and_about_one_depth_share_a_layout() {
        let layouts: Vec<_> = (0..20).map(|seed| layout(DraftTree::bole(64, seed).unwrap(), 0)).collect();
        let mut different: Vec<&TreeLayout> = Vec::new();
        for (layout, words) in &layouts {
            if !different.contains(&layout) {
                different.push(layout);
            }
            let same = layouts.iter().filter(|(other, _)| other == layout);
            assert!(same.into_iter().all(|(_, other)| other.as_slice().len() == words.as_slice().len()));
        }
        assert!(different.len() <= 4, "{} layouts", different.len());
        let (a, b) = (layout(DraftTree::chain(16).unwrap(), 0), layout(DraftTree::chain(16).unwrap(), 3));
        assert_eq!(a.0, b.0);
        assert_ne!(a.1.as_slice(), b.1.as_slice(), "another slot, other words");
        assert_ne!(a.0, layout(DraftTree::chain(17).unwrap(), 0).0);
    }

    #[test]
    fn paths_of_one_batch_share_a_layout_whatever_their_lengths() {
        let batch = TreeBatch::single(DraftTree::chain(5).unwrap(), 0);
        let layout = |path: Vec<usize>| {
            let paths = AcceptedPaths::new(&batch, &[path]).unwrap();
            PathsLayout::new(&paths, &mut Words::default())
        };
        assert_eq!(layout(vec![]), layout((0..5).collect()));
    }

    #[test]
    fn sizes_are_rounded_up_by_a_quarter_at_most() {
        for n in 0..40_000 {
            let rounded = rounded_up(n);
            assert!(rounded >= n && rounded - n < (n.next_power_of_two() / 4).clamp(16, 256), "{n}");
            assert_eq!(rounded_up(rounded), rounded);
        }
    }
}
