//! Who sees whom, as bits.

use super::DraftTree;

/// Ancestors **and self** of every node, one row of bit words per node: bit `j` of row `i` is set when `j` is on
/// the path from the root to `i`.
///
/// ```
/// use canopy_kernels::DraftTree;
/// let mask = DraftTree::new(vec![-1, 0, 0, 1])?.ancestor_mask();
/// assert_eq!(mask.row(3), [0b1011]);
/// assert!(mask.contains(3, 1) && !mask.contains(3, 2));
/// # Ok::<(), canopy_kernels::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AncestorMask {
    words: Vec<u64>,
    words_per_node: usize,
}

impl AncestorMask {
    /// u64 words of one row: `ceil(nodes / 64)`.
    pub fn words_per_node(&self) -> usize {
        self.words_per_node
    }

    /// Number of rows, one per node.
    pub fn nodes(&self) -> usize {
        self.words.len() / self.words_per_node
    }

    /// `[nodes, words_per_node]`, lowest node in the lowest bit of the first word.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// One node's row. Panics when there is no such node.
    pub fn row(&self, node: usize) -> &[u64] {
        &self.words[node * self.words_per_node..][..self.words_per_node]
    }

    /// Whether `other` is `node` or one of its ancestors; false for an `other` outside the tree.
    pub fn contains(&self, node: usize, other: usize) -> bool {
        self.row(node).get(other / 64).is_some_and(|word| word >> (other % 64) & 1 == 1)
    }

    /// The same rows as u32 words, `[nodes, ceil(nodes / 32)]`: what a device kernel reads.
    pub fn words32(&self) -> Vec<u32> {
        let per_node = self.nodes().div_ceil(32);
        let halves = |row: &[u64]| -> Vec<u32> {
            row.iter().flat_map(|&word| [word as u32, (word >> 32) as u32]).take(per_node).collect()
        };
        self.words.chunks(self.words_per_node).flat_map(halves).collect()
    }
}

impl DraftTree {
    /// Ancestors and self of every node.
    pub fn ancestor_mask(&self) -> AncestorMask {
        let words_per_node = self.len().div_ceil(64);
        let mut words = vec![0u64; self.len() * words_per_node];
        for node in 0..self.len() {
            let (before, rest) = words.split_at_mut(node * words_per_node);
            if let Some(parent) = self.parent(node) {
                rest[..words_per_node].copy_from_slice(&before[parent * words_per_node..][..words_per_node]);
            }
            rest[node / 64] |= 1 << (node % 64);
        }
        AncestorMask { words, words_per_node }
    }
}
