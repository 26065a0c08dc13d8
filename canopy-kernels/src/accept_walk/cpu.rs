//! CPU forward: every node finds out whether it follows its parent, then each tree's links are walked.

use super::{BEST_WORDS, HEAD, Input, Lens, Output, Stated, check, row_words};
use crate::{Result, top_tokens};

/// Walks every tree; see the room's page.
///
/// # Errors
/// A wrong length, a tree without nodes or with too many, `most` outside 1 to 256, or a parent that does not come before its child.
pub fn forward(input: Input<'_>, out: Output<'_>) -> Result<()> {
    let Input { parents, tokens, cu_nodes, best, stated, most } = input;
    let lens = Lens {
        parents: parents.len(),
        tokens: tokens.len(),
        best: best.len(),
        stated: stated.map(|stated| (stated.nodes.len(), stated.wanted.len())),
        words: out.words.len(),
        rows: out.rows.len(),
        cu_rows: out.cu_rows.len(),
    };
    check(cu_nodes, most, &lens)?;
    out.words.fill(0);
    out.rows.fill(-1);
    out.cu_rows[0] = 0;
    for (b, words) in out.words.chunks_exact_mut(row_words(most)).enumerate() {
        let (first, end) = (cu_nodes[b] as usize, cu_nodes[b + 1] as usize);
        let tree = Tree {
            parents: &parents[first..end],
            tokens: &tokens[first..end],
            best: &best[first * BEST_WORDS..end * BEST_WORDS],
            stated: stated.map(|Stated { nodes, wanted }| Stated {
                nodes: &nodes[first..end],
                wanted: &wanted[b * 2 * most..(b + 1) * 2 * most],
            }),
            most,
        };
        tree.walk(words);
        let accepted = if words[1] == 0 { words[0] as usize } else { 0 };
        let from = out.cu_rows[b] as usize;
        for (row, node) in out.rows[from..from + accepted].iter_mut().zip(&words[HEAD..]) {
            *row = (first as u32 + node) as i32;
        }
        out.cu_rows[b + 1] = (from + accepted) as i32;
    }
    Ok(())
}

struct Tree<'a> {
    parents: &'a [i32],
    tokens: &'a [u32],
    best: &'a [u32],
    stated: Option<Stated<'a>>,
    most: usize,
}

impl Tree<'_> {
    fn best(&self, node: usize) -> (bool, u32) {
        let row = &self.best[node * BEST_WORDS..][..BEST_WORDS];
        (row[0] == top_tokens::FINITE, row[BEST_WORDS - 1])
    }

    /// The child that follows every node behind a path of best tokens alone, and behind another.
    fn links(&self) -> [Vec<Option<usize>>; 2] {
        let mut links = [vec![None; self.parents.len()], vec![None; self.parents.len()]];
        for node in 1..self.parents.len() {
            let Some(parent) = usize::try_from(self.parents[node]).ok().filter(|&parent| parent < node)
            else {
                continue;
            };
            for (off_spine, links) in links.iter_mut().enumerate() {
                let follows = match self.stated {
                    None => self.best(parent).1 == self.tokens[node],
                    Some(Stated { nodes, wanted }) => {
                        let (rank, depth) = (nodes[node] & 0xffff, (nodes[node] >> 16) as usize);
                        (1..=self.most).contains(&depth)
                            && wanted[off_spine * self.most + depth - 1] == rank as i32
                    }
                };
                if follows && links[parent].is_none() {
                    links[parent] = Some(node);
                }
            }
        }
        links
    }

    fn walk(&self, words: &mut [u32]) {
        let links = self.links();
        let (mut node, mut off_spine) = (0, false);
        loop {
            let visited = words[0] as usize;
            words[0] += 1;
            words[HEAD + visited] = node as u32;
            let (finite, token) = self.best(node);
            if !finite {
                words[1] = 1;
                return;
            }
            let next = links[usize::from(off_spine)][node].filter(|_| visited + 1 < self.most);
            words[HEAD + self.most + visited] = next.map_or(token, |next| self.tokens[next]);
            let Some(next) = next else { return };
            off_spine |= self.stated.is_some_and(|stated| stated.nodes[next] & 0xffff != 0);
            node = next;
        }
    }
}
