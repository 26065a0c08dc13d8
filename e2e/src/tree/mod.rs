//! Draft-tree builders.
//!
//! A builder turns a drafter's logits `[horizon, vocab]` (row d - 1 holds the candidates of depth d) into a
//! [`CandidateTree`]. It promises: node 0 is the root; parents come before their children; the children of one
//! node carry different tokens; at most `budget` other nodes; joint probabilities never rise from one node to
//! the next, so that every prefix of the node order is itself the best tree of its size.
//!
//! ```
//! use canopy_e2e::tree::{BuildOptions, build_ddtree};
//! // Depth 1 prefers token 2 over token 0; depth 2 is sure of token 1.
//! let logits = [1.0, -9.0, 2.0, -9.0, 5.0, -9.0];
//! let tree = build_ddtree(&logits, 3, 7, BuildOptions { budget: 3, ..Default::default() })?;
//! assert_eq!(tree.tokens(), [7, 2, 1, 0]);
//! assert_eq!(tree.tree().parents(), [-1, 0, 1, 0]);
//! # Ok::<(), canopy_e2e::Error>(())
//! ```

mod budget;
mod ddtree;
mod marginals;
mod row;

use canopy_kernels::DraftTree;

pub use budget::expected_tokens;
pub use ddtree::{build_chain, build_ddtree, chain_from, ddtree_above, ddtree_from};
pub use marginals::{Marginals, depth_ranks};

use crate::Result;

/// What a builder may spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Most nodes besides the root, at most `DraftTree::MAX_NODES - 1`. 0 gives the root alone.
    pub budget: usize,
    /// Most candidates of one depth. 0 gives the root alone; more than the vocabulary is the vocabulary.
    pub top_k: usize,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self { budget: 16, top_k: usize::MAX }
    }
}

/// A draft tree with its tokens and the drafter's probabilities, nodes in the order in which they were taken.
#[derive(Clone, Debug, PartialEq)]
pub struct CandidateTree {
    tree: DraftTree,
    tokens: Vec<u32>,
    ranks: Vec<u32>,
    joint: Vec<f64>,
    log_probs: Vec<f64>,
}

impl CandidateTree {
    /// The root alone: what a round without drafting verifies.
    pub fn root_only(root: u32) -> Result<Self> {
        Ok(Self {
            tree: DraftTree::chain(1)?,
            tokens: vec![root],
            ranks: vec![0],
            joint: vec![0.0],
            log_probs: vec![0.0],
        })
    }

    /// Stands for a tree of that shape, or with room for it, whose tokens only a device knows: the root's in their places.
    pub(crate) fn unseen(tree: DraftTree, root: u32) -> Self {
        let nodes = tree.len();
        Self {
            tree,
            tokens: vec![root; nodes],
            ranks: vec![0; nodes],
            joint: vec![0.0; nodes],
            log_probs: vec![0.0; nodes],
        }
    }

    /// The tree's shape.
    pub fn tree(&self) -> &DraftTree {
        &self.tree
    }

    /// One token per node; the root's is the stream's root token.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Each node's place in its depth's order of candidates; 0 for the root.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// ln of the product of the drafter's probabilities along each node's path; 0 for the root.
    pub fn joint_log_probs(&self) -> &[f64] {
        &self.joint
    }

    /// ln of the drafter's probability of each node's token at its depth; 0 for the root.
    pub fn log_probs(&self) -> &[f64] {
        &self.log_probs
    }

    /// The drafter's probability of a node's token at its depth; 1 for the root.
    pub fn prob(&self, node: usize) -> f32 {
        self.log_probs[node].exp() as f32
    }

    /// Nodes besides the root.
    pub fn budget(&self) -> usize {
        self.tokens.len() - 1
    }

    /// The node of `parent`'s child that carries `token`.
    pub fn child(&self, parent: usize, token: u32) -> Option<usize> {
        let is_child = |&node: &usize| self.tree.parent(node) == Some(parent) && self.tokens[node] == token;
        (parent + 1..self.tokens.len()).find(is_child)
    }

    /// The same nodes with the probabilities that `marginals` gives their depths and ranks: for a tree built from
    /// [`Marginals::map`]ped ones. Nodes that `marginals` lacks keep theirs.
    pub fn relabel(&mut self, marginals: &Marginals) {
        for node in 1..self.tokens.len() {
            let depth = self.tree.depths()[node] as usize;
            if let Some(&(_, log_prob)) = marginals.depth(depth).get(self.ranks[node] as usize) {
                self.log_probs[node] = log_prob;
            }
            let parent = self.tree.parent(node).unwrap_or(0);
            self.joint[node] = self.joint[parent] + self.log_probs[node];
        }
    }

    /// Keeps the nodes marked in `keep` whose ancestors are all kept, in their order; the root always.
    ///
    /// # Errors
    /// When `keep` has not one entry per node.
    pub fn retain(&mut self, keep: &[bool]) -> Result<()> {
        if keep.len() != self.tokens.len() {
            return Err(crate::Error::Request {
                field: "keep",
                expected: format!("one entry for each of {} nodes", self.tokens.len()),
                got: keep.len().to_string(),
            });
        }
        let (mut place, mut parents, mut kept) = (vec![None; keep.len()], vec![-1], vec![0]);
        place[0] = Some(0);
        for node in (1..keep.len()).filter(|&node| keep[node]) {
            let Some(parent) = self.tree.parent(node).and_then(|parent| place[parent]) else { continue };
            place[node] = Some(parents.len() as i32);
            parents.push(parent);
            kept.push(node);
        }
        self.tree = DraftTree::new(parents)?;
        self.tokens = kept.iter().map(|&node| self.tokens[node]).collect();
        self.ranks = kept.iter().map(|&node| self.ranks[node]).collect();
        self.joint = kept.iter().map(|&node| self.joint[node]).collect();
        self.log_probs = kept.iter().map(|&node| self.log_probs[node]).collect();
        Ok(())
    }

    /// Keeps the root and the first `budget` other nodes, which are the best tree of that size.
    pub fn truncate(&mut self, budget: usize) -> Result<()> {
        if budget >= self.budget() {
            return Ok(());
        }
        let nodes = budget + 1;
        self.tree = DraftTree::new(self.tree.parents()[..nodes].to_vec())?;
        self.tokens.truncate(nodes);
        self.ranks.truncate(nodes);
        self.joint.truncate(nodes);
        self.log_probs.truncate(nodes);
        Ok(())
    }
}
