//! Orders of a tree's nodes and renumbering.

use super::DraftTree;
use crate::error::{Error, Result};

impl DraftTree {
    /// Depth-first pre-order, children in node order: every subtree is contiguous.
    pub fn dfs_preorder(&self) -> Vec<usize> {
        let children = self.children();
        let (mut order, mut stack) = (Vec::with_capacity(self.len()), vec![0]);
        while let Some(node) = stack.pop() {
            order.push(node);
            stack.extend(children[node].iter().rev());
        }
        order
    }

    /// Level order: by depth, then by node.
    pub fn level_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&node| self.depths[node]);
        order
    }

    /// The nodes of every depth, in node order.
    pub fn levels(&self) -> Vec<Vec<usize>> {
        let mut levels = vec![Vec::new(); self.max_depth() + 1];
        for (node, &depth) in self.depths.iter().enumerate() {
            levels[depth as usize].push(node);
        }
        levels
    }

    /// Renumbers the nodes: `order[position]` is the old node that becomes node `position`. Returns the new tree
    /// and the mapping, where `mapping[old]` is the new node.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// let tree = DraftTree::new(vec![-1, 0, 0, 1])?;
    /// let (dfs, mapping) = tree.reorder(&tree.dfs_preorder())?;
    /// assert_eq!(dfs.parents(), [-1, 0, 1, 0]);
    /// assert_eq!(mapping, [0, 1, 3, 2]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] when `order` has another length, [`Error::Order`] when it repeats a node, names one that
    /// does not exist, or puts a child before its parent.
    pub fn reorder(&self, order: &[usize]) -> Result<(Self, Vec<usize>)> {
        if order.len() != self.len() {
            let (expected, got) = (Box::new([self.len()]), Box::new([order.len()]));
            return Err(Error::Shape { op: "draft tree reorder", arg: "order", expected, got });
        }
        let unset = usize::MAX;
        let mut mapping = vec![unset; self.len()];
        let mut parents = Vec::with_capacity(self.len());
        for (position, &node) in order.iter().enumerate() {
            let fail = |problem| Err(Error::Order { position, node, problem });
            if node >= self.len() {
                return fail("there is no such node");
            }
            if mapping[node] != unset {
                return fail("it came before");
            }
            let parent = match self.parent(node) {
                None => -1,
                Some(parent) if mapping[parent] == unset => return fail("its parent comes later"),
                Some(parent) => mapping[parent] as i32,
            };
            parents.push(parent);
            mapping[node] = position;
        }
        Ok((Self::new(parents)?, mapping))
    }

    /// Offers an order for a parent array that is a tree, but does not have its parents before their children:
    /// the tree in level order (ties by the given number) and the mapping, where `mapping[given]` is the new node.
    /// A parent array in a good order keeps its numbering.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// let (tree, mapping) = DraftTree::from_any_order(&[2, 0, -1])?;
    /// assert_eq!(tree.parents(), [-1, 0, 1]);
    /// assert_eq!(mapping, [1, 2, 0]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Self::new`] on the number of nodes; [`Error::NoRoot`], [`Error::SecondRoot`],
    /// [`Error::NoSuchParent`] or [`Error::Cycle`], each naming the node as it was given.
    pub fn from_any_order(parents: &[i32]) -> Result<(Self, Vec<usize>)> {
        let nodes = parents.len();
        let in_order = Self::new(parents.to_vec());
        match in_order {
            Ok(tree) => return Ok((tree, (0..nodes).collect())),
            Err(error @ (Error::EmptyTree | Error::TooManyNodes { .. })) => return Err(error),
            Err(_) => {}
        }
        let mut root = None;
        for (node, &parent) in parents.iter().enumerate() {
            if parent >= nodes as i32 || parent < -1 {
                return Err(Error::NoSuchParent { node, parent, nodes });
            }
            if parent == -1 && root.replace(node).is_some() {
                return Err(Error::SecondRoot { node, parent });
            }
        }
        if root.is_none() {
            return Err(Error::NoRoot { nodes });
        }
        let mut depths = vec![0usize; nodes];
        for (node, depth) in depths.iter_mut().enumerate() {
            let mut at = node;
            while parents[at] >= 0 {
                at = parents[at] as usize;
                *depth += 1;
                if *depth >= nodes {
                    // `nodes` links up from `node`: `at` lies on the circle, wherever `node` itself lies.
                    return Err(Error::Cycle { node: at, parent: parents[at] });
                }
            }
        }
        let mut order: Vec<usize> = (0..nodes).collect();
        order.sort_by_key(|&node| depths[node]);
        let mut mapping = vec![0; nodes];
        for (position, &node) in order.iter().enumerate() {
            mapping[node] = position;
        }
        let renumbered = order.iter().map(|&node| match parents[node] {
            -1 => -1,
            parent => mapping[parent as usize] as i32,
        });
        Ok((Self::new(renumbered.collect())?, mapping))
    }
}
