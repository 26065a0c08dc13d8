//! One draft tree: a checked parent array, its depths, paths, orders, chains and ancestor mask.

use crate::error::{Error, Result};

mod chains;
mod mask;
mod order;
mod shapes;
#[cfg(test)]
pub(crate) mod tests;

pub use chains::HeavyChains;
pub use mask::AncestorMask;
pub(crate) use shapes::SplitMix64;

/// A rooted draft tree. Node 0 is the root; every parent comes before its children.
///
/// ```
/// use canopy_kernels::DraftTree;
/// let tree = DraftTree::new(vec![-1, 0, 0, 1])?;
/// assert_eq!(tree.path(3), [0, 1, 3]);
/// assert_eq!(tree.depths(), [0, 1, 1, 2]);
/// # Ok::<(), canopy_kernels::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftTree {
    parents: Vec<i32>,
    depths: Vec<u32>,
}

impl DraftTree {
    /// Most nodes of one tree, root included.
    pub const MAX_NODES: usize = 256;

    /// Checks a parent array: `parents[0] == -1`, `0 <= parents[i] < i`, at most [`Self::MAX_NODES`] nodes.
    ///
    /// # Errors
    /// [`Error::EmptyTree`], [`Error::TooManyNodes`], [`Error::RootParent`], [`Error::SecondRoot`] or
    /// [`Error::ParentOrder`], each naming the node.
    pub fn new(parents: Vec<i32>) -> Result<Self> {
        if parents.is_empty() {
            return Err(Error::EmptyTree);
        }
        if parents.len() > Self::MAX_NODES {
            return Err(Error::TooManyNodes { nodes: parents.len(), max: Self::MAX_NODES });
        }
        if parents[0] != -1 {
            return Err(Error::RootParent { parent: parents[0] });
        }
        let mut depths = vec![0u32; parents.len()];
        for (node, &parent) in parents.iter().enumerate().skip(1) {
            if parent < 0 {
                return Err(Error::SecondRoot { node, parent });
            }
            if parent as usize >= node {
                return Err(Error::ParentOrder { node, parent });
            }
            depths[node] = depths[parent as usize] + 1;
        }
        Ok(Self { parents, depths })
    }

    /// Number of nodes, root included.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    /// The parent array, `-1` for the root.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Depth of every node; the root's is 0. RoPE position = committed length + depth.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// The deepest node's depth.
    pub fn max_depth(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0) as usize
    }

    /// A node's parent, `None` for the root.
    pub fn parent(&self, node: usize) -> Option<usize> {
        usize::try_from(self.parents[node]).ok()
    }

    /// The nodes from the root to `node`, both included.
    pub fn path(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        while let Some(parent) = self.parent(path[path.len() - 1]) {
            path.push(parent);
        }
        path.reverse();
        path
    }

    /// Every node's children, in node order.
    pub fn children(&self) -> Vec<Vec<usize>> {
        let mut children = vec![Vec::new(); self.len()];
        for node in 1..self.len() {
            children[self.parents[node] as usize].push(node);
        }
        children
    }

    /// Nodes of every node's subtree, itself included.
    pub fn subtree_sizes(&self) -> Vec<usize> {
        let mut sizes = vec![1; self.len()];
        for node in (1..self.len()).rev() {
            sizes[self.parents[node] as usize] += sizes[node];
        }
        sizes
    }

    /// The nodes without children, in node order.
    pub fn leaves(&self) -> Vec<usize> {
        let sizes = self.subtree_sizes();
        (0..self.len()).filter(|&node| sizes[node] == 1).collect()
    }

    /// True when every node but the root hangs on the node before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(node, &parent)| parent == node as i32 - 1)
    }
}
