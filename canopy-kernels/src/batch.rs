//! The one batch layout: packed rows. All sequences' nodes lie one after another.

use crate::error::{Error, Result, expect_len};
use crate::tree::DraftTree;

/// Several draft trees, their rows packed. Row `cu_nodes[b] + i` is node `i` of sequence `b`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeBatch {
    trees: Vec<DraftTree>,
    cu_nodes: Vec<i32>,
    slots: Vec<i32>,
}

impl TreeBatch {
    /// Packs `trees`; sequence `b` owns pool slot `slots[b]`. Slot -1 marks a padding sequence: its rows are
    /// zero in every output and nothing is read or written for it.
    ///
    /// # Errors
    /// When the counts differ, a slot is below -1, or two sequences share a slot.
    pub fn new(trees: Vec<DraftTree>, slots: Vec<i32>) -> Result<Self> {
        const OP: &str = "tree batch";
        if trees.len() != slots.len() {
            let (expected, got) = (Box::new([trees.len()]), Box::new([slots.len()]));
            return Err(Error::Shape { op: OP, arg: "slots", expected, got });
        }
        check_distinct(OP, &slots)?;
        let mut cu_nodes = vec![0i32];
        for tree in &trees {
            cu_nodes.push(cu_nodes[cu_nodes.len() - 1] + tree.len() as i32);
        }
        Ok(Self { trees, cu_nodes, slots })
    }

    /// One tree on one slot.
    pub fn single(tree: DraftTree, slot: usize) -> Self {
        let nodes = tree.len() as i32;
        Self { trees: vec![tree], cu_nodes: vec![0, nodes], slots: vec![slot as i32] }
    }

    /// Slices of long chains, of `lens` rows and on `slots`, which slices of one chain share: this is for attention over keys that are in the
    /// pool already, and for nothing that writes by slot.
    ///
    /// # Errors
    /// When the counts differ, or a slice has no row or more than [`DraftTree::MAX_NODES`].
    pub fn slices(lens: &[usize], slots: &[i32]) -> Result<Self> {
        expect_len("chain slices", "slots", &[lens.len()], slots.len())?;
        let (mut trees, mut cu_nodes) = (Vec::with_capacity(lens.len()), vec![0i32]);
        for &len in lens {
            trees.push(DraftTree::chain(len)?);
            cu_nodes.push(cu_nodes[trees.len() - 1] + len as i32);
        }
        Ok(Self { trees, cu_nodes, slots: slots.to_vec() })
    }

    /// B, the number of sequences.
    pub fn sequences(&self) -> usize {
        self.trees.len()
    }

    /// N, the number of packed rows.
    pub fn rows(&self) -> usize {
        self.cu_nodes[self.trees.len()] as usize
    }

    /// The trees, in packing order.
    pub fn trees(&self) -> &[DraftTree] {
        &self.trees
    }

    /// `[B + 1]`: first row of every sequence, then N.
    pub fn cu_nodes(&self) -> &[i32] {
        &self.cu_nodes
    }

    /// `[B]`: pool slot of every sequence, -1 for padding.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// `(first row, tree, slot)` of every sequence; the slot is `None` for padding.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &DraftTree, Option<usize>)> {
        self.trees
            .iter()
            .zip(&self.slots)
            .zip(&self.cu_nodes)
            .map(|((tree, &slot), &row)| (row as usize, tree, usize::try_from(slot).ok()))
    }

    /// The parts of a `[N, heads, width]` plane, per sequence and head the rows of its nodes.
    pub(crate) fn split_heads<'a, T>(
        &self,
        heads: usize,
        width: usize,
        plane: &'a mut [T],
    ) -> Vec<Vec<&'a mut [T]>> {
        split_heads(self.trees.iter().map(DraftTree::len), heads, width, plane)
    }

    /// Checks that every slot lies inside a pool of `pool_slots` slots.
    ///
    /// # Errors
    /// [`Error::Value`] naming the slot.
    pub fn check_slots(&self, op: &'static str, pool_slots: usize) -> Result<()> {
        check_slots(&self.slots, op, pool_slots)
    }
}

/// The parts of a `[N, heads, width]` plane of sequences of `lens` rows, per sequence and head its rows.
pub(crate) fn split_heads<T>(
    lens: impl IntoIterator<Item = usize>,
    heads: usize,
    width: usize,
    plane: &mut [T],
) -> Vec<Vec<&mut [T]>> {
    let mut parts = Vec::new();
    let mut rows = plane.chunks_exact_mut(width);
    for len in lens {
        let start = parts.len();
        parts.extend((0..heads).map(|_| Vec::with_capacity(len)));
        for _ in 0..len {
            for part in &mut parts[start..] {
                part.extend(rows.next());
            }
        }
    }
    parts
}

/// Checks that every slot is -1 (padding) or a pool slot of one sequence alone.
pub(crate) fn check_distinct(op: &'static str, slots: &[i32]) -> Result<()> {
    for (b, &slot) in slots.iter().enumerate() {
        if slot < -1 {
            let expected = "-1 (padding) or a pool slot".into();
            return Err(Error::Value { op, arg: "slots", expected, got: slot.to_string() });
        }
        if slot >= 0 && slots[..b].contains(&slot) {
            let got = format!("slot {slot} twice");
            return Err(Error::Value { op, arg: "slots", expected: "distinct slots".into(), got });
        }
    }
    Ok(())
}

/// Checks that every slot is -1 (padding) or lies inside a pool of `pool_slots` slots.
///
/// # Errors
/// [`Error::Value`] naming the slot.
pub fn check_slots(slots: &[i32], op: &'static str, pool_slots: usize) -> Result<()> {
    match slots.iter().find(|&&slot| slot < -1 || slot >= 0 && slot as usize >= pool_slots) {
        None => Ok(()),
        Some(slot) => {
            let expected = format!("below the pool's {pool_slots} slots");
            Err(Error::Value { op, arg: "slots", expected, got: slot.to_string() })
        }
    }
}

/// The accepted path of every sequence of a [`TreeBatch`], as packed rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedPaths {
    rows: Vec<i32>,
    cu_rows: Vec<i32>,
    slots: Vec<i32>,
    cu_nodes: Vec<i32>,
}

impl AcceptedPaths {
    /// `paths[b]` lists sequence `b`'s accepted nodes from the root down; empty leaves its states alone.
    ///
    /// # Errors
    /// When the count differs from the batch's, or a path does not start at node 0 and follow parent links.
    pub fn new(batch: &TreeBatch, paths: &[Vec<usize>]) -> Result<Self> {
        if paths.len() != batch.sequences() {
            let (expected, got) = (Box::new([batch.sequences()]), Box::new([paths.len()]));
            return Err(Error::Shape { op: "accepted paths", arg: "paths", expected, got });
        }
        let (mut rows, mut cu_rows) = (Vec::new(), vec![0i32]);
        for (sequence, ((first, tree, _), path)) in batch.iter().zip(paths).enumerate() {
            for (entry, &node) in path.iter().enumerate() {
                let fits = node < tree.len() && tree.parent(node) == entry.checked_sub(1).map(|e| path[e]);
                if !fits {
                    let expected = match entry {
                        0 => "the root, node 0".into(),
                        _ => format!("a child of node {} below {}", path[entry - 1], tree.len()),
                    };
                    return Err(Error::Path { sequence, entry, node, expected });
                }
                rows.push((first + node) as i32);
            }
            cu_rows.push(rows.len() as i32);
        }
        Ok(Self { rows, cu_rows, slots: batch.slots().to_vec(), cu_nodes: batch.cu_nodes().to_vec() })
    }

    /// Stands for paths that only the device knows: every row, which is as far as they reach.
    pub fn unknown(batch: &TreeBatch) -> Self {
        Self {
            rows: (0..batch.rows() as i32).collect(),
            cu_rows: batch.cu_nodes().to_vec(),
            slots: batch.slots().to_vec(),
            cu_nodes: batch.cu_nodes().to_vec(),
        }
    }

    /// Checks that every slot lies inside a pool of `pool_slots` slots.
    ///
    /// # Errors
    /// [`Error::Value`] naming the slot.
    pub fn check_slots(&self, op: &'static str, pool_slots: usize) -> Result<()> {
        check_slots(&self.slots, op, pool_slots)
    }

    /// Packed rows of all paths, one sequence after another.
    pub fn rows(&self) -> &[i32] {
        &self.rows
    }

    /// `[B + 1]`: where each sequence's path starts in [`Self::rows`].
    pub fn cu_rows(&self) -> &[i32] {
        &self.cu_rows
    }

    /// `[B]`: pool slot of every sequence, -1 for padding.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// `[B + 1]`: first packed row of every sequence's tree.
    pub fn cu_nodes(&self) -> &[i32] {
        &self.cu_nodes
    }

    /// `(sequence, slot, path rows)` of every sequence that has something to commit.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, &[i32])> {
        self.slots.iter().enumerate().filter_map(|(b, &slot)| {
            let rows = &self.rows[self.cu_rows[b] as usize..self.cu_rows[b + 1] as usize];
            let slot = usize::try_from(slot).ok()?;
            (!rows.is_empty()).then_some((b, slot, rows))
        })
    }
}
