//! Heavy-light decomposition: few chains that cover the tree.

use super::DraftTree;

/// The heavy chains of a tree: every node lies on exactly one, and a root-to-node path crosses at most
/// `log2(nodes) + 1` of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeavyChains {
    chains: Vec<Vec<usize>>,
    chain_of: Vec<usize>,
}

impl HeavyChains {
    /// The chains, each from its topmost node down. A chain comes after the chain that its top hangs on.
    pub fn chains(&self) -> &[Vec<usize>] {
        &self.chains
    }

    /// Which chain a node lies on.
    pub fn chain_of(&self, node: usize) -> usize {
        self.chain_of[node]
    }
}

impl DraftTree {
    /// The child with the largest subtree (the first of equals) of every node, `None` for a leaf.
    pub fn heavy_children(&self) -> Vec<Option<usize>> {
        let sizes = self.subtree_sizes();
        let mut heavy: Vec<Option<usize>> = vec![None; self.len()];
        for node in 1..self.len() {
            let best = &mut heavy[self.parents[node] as usize];
            if best.is_none_or(|other| sizes[node] > sizes[other]) {
                *best = Some(node);
            }
        }
        heavy
    }

    /// Decomposes the tree into heavy chains.
    ///
    /// ```
    /// use canopy_kernels::DraftTree;
    /// let tree = DraftTree::new(vec![-1, 0, 0, 2, 3])?;
    /// assert_eq!(tree.heavy_chains().chains(), [vec![0, 2, 3, 4], vec![1]]);
    /// # Ok::<(), canopy_kernels::Error>(())
    /// ```
    pub fn heavy_chains(&self) -> HeavyChains {
        let heavy = self.heavy_children();
        let mut chains: Vec<Vec<usize>> = Vec::new();
        let mut chain_of = vec![0; self.len()];
        for node in 0..self.len() {
            let continues = self.parent(node).filter(|&parent| heavy[parent] == Some(node));
            let chain = continues.map_or(chains.len(), |parent| chain_of[parent]);
            if chain == chains.len() {
                chains.push(Vec::new());
            }
            chains[chain].push(node);
            chain_of[node] = chain;
        }
        HeavyChains { chains, chain_of }
    }
}
