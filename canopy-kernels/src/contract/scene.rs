//! Inputs of one call: trees, paths, lengths and named buffers.

use crate::tree::SplitMix64;
use crate::{AcceptedPaths, DraftTree, TreeBatch};

/// What a scene is made for.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Nodes of every sequence's tree.
    pub nodes: Vec<usize>,
    /// Chains instead of random trees.
    pub chain: bool,
    /// Committed rows of the first sequence; the others have a few more.
    pub context: usize,
    /// The served model's widths instead of small ones.
    pub wide: bool,
}

impl Shape {
    /// One random tree.
    pub fn tree(nodes: usize) -> Self {
        Self { nodes: vec![nodes], chain: false, context: 5, wide: false }
    }
}

/// One call's inputs.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub shape: Shape,
    pub batch: TreeBatch,
    pub paths: AcceptedPaths,
    pub lens: Vec<i32>,
    pub inputs: Vec<Input>,
    random: SplitMix64,
}

/// A named buffer.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub name: &'static str,
    pub values: Vec<f32>,
}

impl Scene {
    /// Trees, slots in reverse order, a path to each tree's last leaf; no buffers yet.
    pub fn new(shape: &Shape) -> crate::Result<Self> {
        let seed = shape.nodes.iter().fold(shape.context as u64, |seed, &nodes| seed * 257 + nodes as u64);
        let tree = |(b, &nodes): (usize, &usize)| match shape.chain {
            true => DraftTree::chain(nodes),
            false => DraftTree::random(nodes, seed + b as u64),
        };
        let trees = shape.nodes.iter().enumerate().map(tree).collect::<crate::Result<_>>()?;
        let batch = TreeBatch::new(trees, (0..shape.nodes.len() as i32).rev().collect())?;
        Ok(Self {
            paths: to_last_leaf(&batch)?,
            lens: (0..shape.nodes.len()).map(|b| (shape.context + 2 * b) as i32).collect(),
            shape: shape.clone(),
            batch,
            inputs: Vec::new(),
            random: SplitMix64::new(seed),
        })
    }

    /// Appends a buffer of values between `low` and `high`.
    pub fn with(mut self, name: &'static str, len: usize, low: f32, high: f32) -> Self {
        let values = (0..len).map(|_| low + (high - low) * self.random.unit() as f32).collect();
        self.inputs.push(Input { name, values });
        self
    }

    /// A buffer by its place.
    pub fn input(&self, index: usize) -> &[f32] {
        &self.inputs[index].values
    }

    /// Rows per slot that hold every sequence's committed and drafted rows.
    pub fn capacity(&self) -> usize {
        self.lens.iter().zip(&self.shape.nodes).map(|(&len, nodes)| len as usize + nodes).max().unwrap_or(0)
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
}

fn to_last_leaf(batch: &TreeBatch) -> crate::Result<AcceptedPaths> {
    let paths = batch.trees().iter().map(|tree| tree.path(tree.len() - 1)).collect::<Vec<_>>();
    AcceptedPaths::new(batch, &paths)
}
