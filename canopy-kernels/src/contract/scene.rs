//! Inputs of one call: trees, paths, lengths and named buffers.

use crate::tree::SplitMix64;
use crate::{AcceptedPaths, DraftTree, TreeBatch};

/// What a scene is made for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Nodes of every sequence's tree.
    pub nodes: Vec<usize>,
    /// Chains instead of random trees.
    pub chain: bool,
    /// Committed rows of the first sequence; the others have a few more.
    pub context: usize,
    /// The served model's widths instead of small ones.
    pub wide: bool,
    /// Inputs on which sums lose most: in the delta rule keys that are nearly equal, write strengths near 1, gates near 0.
    pub hard: bool,
    /// Widths of the CUDA kernels; `narrow` picks the drafter's.
    pub cuda: bool,
    pub narrow: bool,
}

impl Shape {
    /// One random tree.
    pub fn tree(nodes: usize) -> Self {
        Self {
            nodes: vec![nodes],
            chain: false,
            context: 5,
            wide: false,
            hard: false,
            cuda: false,
            narrow: false,
        }
    }

    /// One chain.
    pub fn chain(nodes: usize) -> Self {
        Self { chain: true, ..Self::tree(nodes) }
    }
}

/// One call's inputs.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub shape: Shape,
    pub batch: TreeBatch,
    pub paths: AcceptedPaths,
    pub lens: Vec<i32>,
    /// Rows per slot that hold every sequence's committed and drafted rows.
    pub capacity: usize,
    /// A small number that the subject may take a mode from; the same for some of a scene's sequences as for all.
    pub mode: usize,
    pub inputs: Vec<Input>,
    random: SplitMix64,
}

/// What an input's, or an output's, first axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// Packed rows.
    Rows,
    /// Pool slots.
    Slots,
    /// Neither: every sequence reads all of it.
    Shared,
}

/// A named buffer.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub name: &'static str,
    pub axis: Axis,
    pub values: Vec<f32>,
}

impl Scene {
    /// Trees, slots in reverse order, a path to each tree's last leaf; no buffers yet.
    pub fn new(shape: &Shape) -> crate::Result<Self> {
        let mixed = |seed: u64, nodes: &usize| seed.wrapping_mul(257).wrapping_add(*nodes as u64);
        let seed = shape.nodes.iter().fold(shape.context as u64, mixed);
        let tree = |(b, &nodes): (usize, &usize)| match shape.chain {
            true => DraftTree::chain(nodes),
            false => DraftTree::random(nodes, seed.wrapping_add(b as u64)),
        };
        let trees = shape.nodes.iter().enumerate().map(tree).collect::<crate::Result<_>>()?;
        let batch = TreeBatch::new(trees, (0..shape.nodes.len() as i32).rev().collect())?;
        let lens = (0..shape.nodes.len()).map(|b| (shape.context + 2 * b) as i32).collect::<Vec<_>>();
        let ends = lens.iter().zip(&shape.nodes).map(|(&len, nodes)| len as usize + nodes);
        Ok(Self {
            paths: to_last_leaf(&batch)?,
            capacity: ends.max().unwrap_or(0),
            mode: shape.context + shape.nodes.len(),
            lens,
            shape: shape.clone(),
            batch,
            inputs: Vec::new(),
            random: SplitMix64::new(seed),
        })
    }

    fn push(mut self, name: &'static str, axis: Axis, len: usize, low: f32, high: f32) -> Self {
        let values = (0..len).map(|_| low + (high - low) * self.random.unit() as f32).collect();
        self.inputs.push(Input { name, axis, values });
        self
    }

    /// Appends a buffer of `len` values between `low` and `high` that all sequences share.
    pub fn with(self, name: &'static str, len: usize, low: f32, high: f32) -> Self {
        self.push(name, Axis::Shared, len, low, high)
    }

    /// Appends a buffer `[N, width]`.
    pub fn with_rows(self, name: &'static str, width: usize, low: f32, high: f32) -> Self {
        let rows = self.batch.rows();
        self.push(name, Axis::Rows, rows * width, low, high)
    }

    /// Appends a pool `[slots, width]`.
    pub fn with_slots(self, name: &'static str, width: usize, low: f32, high: f32) -> Self {
        let slots = self.batch.sequences();
        self.push(name, Axis::Slots, slots * width, low, high)
    }

    /// A buffer by its place.
    pub fn input(&self, index: usize) -> &[f32] {
        &self.inputs[index].values
    }

    /// The same scene under a mask that is off by one: every parent but the root's children's, and every length.
    pub fn off_by_one(&self) -> crate::Result<Self> {
        let shifted = |tree: &DraftTree| {
            DraftTree::new(
                tree.parents().iter().map(|&parent| if parent > 0 { parent - 1 } else { parent }).collect(),
            )
        };
        let trees = self.batch.trees().iter().map(shifted).collect::<crate::Result<_>>()?;
        let batch = TreeBatch::new(trees, self.batch.slots().to_vec())?;
        let lens = self.lens.iter().map(|&len| (len - 1).max(0)).collect();
        Ok(Self { paths: to_last_leaf(&batch)?, batch, lens, ..self.clone() })
    }

    /// The sequences `which` alone, in that order, in slots 0, 1, ..
    pub fn some(&self, which: &[usize]) -> crate::Result<Self> {
        let trees = which.iter().map(|&b| self.batch.trees()[b].clone()).collect();
        let batch = TreeBatch::new(trees, (0..which.len() as i32).collect())?;
        let cut = |input: &Input| Input {
            values: which
                .iter()
                .flat_map(|&b| input.values[self.own(input.axis, input.values.len(), b)].to_vec())
                .collect(),
            ..input.clone()
        };
        let inputs = self
            .inputs
            .iter()
            .map(|input| if input.axis == Axis::Shared { input.clone() } else { cut(input) });
        Ok(Self {
            shape: Shape {
                nodes: which.iter().map(|&b| self.shape.nodes[b]).collect(),
                ..self.shape.clone()
            },
            paths: to_last_leaf(&batch)?,
            lens: which.iter().map(|&b| self.lens[b]).collect(),
            inputs: inputs.collect(),
            batch,
            ..self.clone()
        })
    }

    /// Sequence `b`'s part of a buffer of `len` elements.
    pub fn own(&self, axis: Axis, len: usize, b: usize) -> std::ops::Range<usize> {
        match axis {
            Axis::Shared => 0..len,
            Axis::Rows => {
                let width = len / self.batch.rows();
                let cu = self.batch.cu_nodes();
                cu[b] as usize * width..cu[b + 1] as usize * width
            }
            Axis::Slots => {
                let (width, slot) = (len / self.batch.sequences(), self.batch.slots()[b].max(0) as usize);
                slot * width..(slot + 1) * width
            }
        }
    }
}

fn to_last_leaf(batch: &TreeBatch) -> crate::Result<AcceptedPaths> {
    let paths = batch.trees().iter().map(|tree| tree.path(tree.len() - 1)).collect::<Vec<_>>();
    AcceptedPaths::new(batch, &paths)
}
