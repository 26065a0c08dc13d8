//! The order in which the fused CUDA kernel solves a tree, prepared once per round and shared by every layer.
//!
//! A plan is a list of steps; a step is a list of items that run in parallel; an item is a run of nodes that one warp solves one
//! after another. Items of [`Schedule::Chains`] are pieces of heavy chains, cut every [`BAND`] depths; before a band its nodes take what
//! the bands above contribute, all in parallel. The sum of a row runs from the root down in either schedule, so both give the same bits.
//!
//! A plan has its own numbers for a tree's nodes ([`counted`]) and names the row of every one: what the kernel reads and writes outside
//! shared memory stays in rows' order, and a row's bits do not depend on its number. `tree_build` writes the same words on the device.

use crate::DraftTree;

/// Depths between two cuts of a chain.
const BAND: usize = 16;

/// Up to so many nodes a plan counts them as their rows lie; beyond, depth first, which leaves fewer tiles of pairs with a path in them.
const AS_GIVEN: usize = 32;

/// `to` of an item that finishes its nodes.
const TO_END: u32 = 0xffff;

/// How the triangular system is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// One step a level: `depth + 1` steps.
    Levels,
    /// Heavy-light chains cut into bands, each piece serial, in dependency order.
    Chains,
}

impl Schedule {
    /// Levels for trees shallower than a band, chains for deeper ones.
    pub fn for_tree(tree: &DraftTree) -> Self {
        if tree.max_depth() < BAND { Self::Levels } else { Self::Chains }
    }
}

struct Item {
    nodes: Vec<usize>,
    from: usize,
    to: u32,
}

fn levels(levels: Vec<Vec<usize>>) -> Vec<Vec<Item>> {
    let item = |node| Item { nodes: vec![node], from: 0, to: TO_END };
    levels.into_iter().map(|level| level.into_iter().map(item).collect()).collect()
}

fn banded_chains(tree: &DraftTree) -> Vec<Vec<Item>> {
    let chains = tree.heavy_chains();
    let mut light = vec![0usize; chains.chains().len()];
    for (c, chain) in chains.chains().iter().enumerate() {
        light[c] = tree.parent(chain[0]).map_or(0, |parent| light[chains.chain_of(parent)] + 1);
    }
    let bands = tree.max_depth() / BAND + 1;
    let most = light.iter().max().map_or(0, |most| most + 1);
    let mut steps = Vec::new();
    for band in 0..bands {
        let (low, high) = (band * BAND, (band + 1) * BAND);
        let inside = |&node: &usize| (low..high).contains(&(tree.depths()[node] as usize));
        if band > 0 {
            let above = |node| Item { nodes: vec![node], from: 0, to: low as u32 };
            steps.push((0..tree.len()).filter(inside).map(above).collect());
        }
        let mut pieces: Vec<Vec<Item>> = (0..most).map(|_| Vec::new()).collect();
        for (chain, &rank) in chains.chains().iter().zip(&light) {
            let nodes: Vec<usize> = chain.iter().copied().filter(inside).collect();
            if !nodes.is_empty() {
                pieces[rank].push(Item { nodes, from: low, to: TO_END });
            }
        }
        steps.extend(pieces.into_iter().filter(|step| !step.is_empty()));
    }
    steps
}

fn pad(words: &mut Vec<u32>, multiple: usize) {
    words.resize(words.len().next_multiple_of(multiple), 0);
}

fn bytes(words: &mut Vec<u32>, bytes: &[u8]) {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(16), 0);
    words.extend(padded.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])));
}

/// The rows of a tree, or of several, in the order in which a plan counts its nodes: every parent comes before its children.
fn counted(parents: &[i32]) -> Vec<usize> {
    let nodes = parents.len();
    if nodes <= AS_GIVEN {
        return (0..nodes).collect();
    }
    let parent = |row: usize| usize::try_from(parents[row]).ok();
    let mut subtree = vec![1; nodes];
    for row in (0..nodes).rev() {
        if let Some(parent) = parent(row) {
            subtree[parent] += subtree[row];
        }
    }
    // the next number below every row, and that of the next root
    let (mut next, mut next_root) = (vec![0; nodes], 0);
    let mut rows = vec![0; nodes];
    for row in 0..nodes {
        let next_of_parent = parent(row).map_or(&mut next_root, |parent| &mut next[parent]);
        let number = *next_of_parent;
        *next_of_parent += subtree[row];
        next[row] = number + 1;
        rows[number] = row;
    }
    rows
}

/// The plan of one tree as the kernel reads it (`canopy/plan.cuh`); a multiple of four words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    words: Vec<u32>,
    entries: usize,
}

impl Plan {
    /// The plan of `tree` under `schedule`.
    pub fn new(tree: &DraftTree, schedule: Schedule) -> Self {
        let rows = counted(tree.parents());
        let (tree, _) = tree.reorder(&rows).expect("a tree's rows, every parent before its children");
        let paths: Vec<_> = (0..tree.len()).map(|node| tree.path(node)).collect();
        match schedule {
            Schedule::Levels => Self::of(&rows, &paths, &levels(tree.levels())),
            Schedule::Chains => Self::of(&rows, &paths, &banded_chains(&tree)),
        }
    }

    /// The plan under [`Schedule::Levels`] of several trees whose parents, -1 for every root, come before their children.
    pub(crate) fn levels(parents: &[i32]) -> Self {
        let rows = counted(parents);
        let mut number = vec![0; rows.len()];
        let (mut paths, mut by_depth) = (Vec::<Vec<usize>>::with_capacity(rows.len()), Vec::new());
        for (node, &row) in rows.iter().enumerate() {
            number[row] = node;
            let above =
                usize::try_from(parents[row]).map_or(&[][..], |parent| paths[number[parent]].as_slice());
            let path = [above, &[node]].concat();
            by_depth.resize(by_depth.len().max(path.len()), Vec::new());
            by_depth[path.len() - 1].push(node);
            paths.push(path);
        }
        Self::of(&rows, &paths, &levels(by_depth))
    }

    /// The plan of nodes in rows `row_of`, with their paths and steps.
    fn of(row_of: &[usize], paths: &[Vec<usize>], steps: &[Vec<Item>]) -> Self {
        let nodes = paths.len();
        let (mut info, mut path) = (Vec::<u32>::new(), Vec::new());
        let mut tiles = [0u32; 16];
        let row_bytes = nodes.div_ceil(32) * 4;
        let mut rows = Vec::new();
        let mut mask = vec![0u8; nodes * row_bytes];
        for (node, ancestors) in paths.iter().enumerate() {
            info.push((ancestors.len() - 1) as u32 | ((path.len() / 4) as u32) << 8);
            for &ancestor in ancestors {
                path.push(ancestor as u8);
                tiles[node / 16] |= 1 << (ancestor / 8);
                mask[node * row_bytes + ancestor / 8] |= 1 << (ancestor % 8);
            }
            path.resize(path.len().next_multiple_of(4), node as u8);
            rows.resize(path.len() / 4, node as u8);
        }
        let (mut order, mut items, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for step in steps {
            for item in step {
                let begin = order.len();
                order.extend(item.nodes.iter().map(|&node| node as u32 | info[node] << 8));
                items.extend([(begin | item.nodes.len() << 16) as u32, item.from as u32 | item.to << 16]);
            }
            ends.push((items.len() / 2) as u32);
        }
        let deepest = paths.iter().map(|path| path.len() - 1).max().unwrap_or(0);
        let mut words = vec![ends.len() as u32, (items.len() / 2) as u32, path.len() as u32, deepest as u32];
        bytes(&mut words, &row_of.iter().map(|&row| row as u8).collect::<Vec<_>>());
        words.extend(&info);
        pad(&mut words, 4);
        words.extend(tiles);
        words.extend(ends);
        pad(&mut words, 4);
        words.extend(items);
        pad(&mut words, 4);
        bytes(&mut words, &path);
        bytes(&mut words, &mask);
        bytes(&mut words, &rows);
        words.extend(order);
        pad(&mut words, 4);
        Self { words, entries: path.len() }
    }

    /// What the kernel reads.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Path entries: the sum over nodes of `depth + 1`, each rounded up to four.
    pub fn entries(&self) -> usize {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::{AS_GIVEN, BAND, Plan, Schedule, TO_END, banded_chains, levels};
    use crate::DraftTree;

    /// Walks the steps: what an item reads must be finished before its step, or earlier in its own run.
    fn check(tree: &DraftTree, steps: &[Vec<super::Item>]) {
        let (mut taken, mut done) = (vec![0; tree.len()], vec![false; tree.len()]);
        for step in steps {
            let before = done.clone();
            for item in step {
                for (place, &node) in item.nodes.iter().enumerate() {
                    assert_eq!(taken[node], item.from, "node {node} continues where it stopped");
                    let to = if item.to == TO_END { tree.depths()[node] as usize } else { item.to as usize };
                    for &ancestor in &tree.path(node)[item.from..to] {
                        assert!(
                            before[ancestor] || item.nodes[..place].contains(&ancestor),
                            "{ancestor} before {node}"
                        );
                    }
                    taken[node] = to;
                    done[node] = item.to == TO_END;
                }
            }
        }
        assert!(done.iter().all(|&done| done), "every node is finished");
    }

    #[test]
    fn both_schedules_read_finished_nodes_only() {
        let mut trees = vec![
            DraftTree::chain(256).unwrap(),
            DraftTree::chain(1).unwrap(),
            DraftTree::skewed(2, 40).unwrap(),
        ];
        trees.extend((0..40).map(|seed| DraftTree::random(1 + seed * 6, seed as u64).unwrap()));
        trees.push(DraftTree::bole(128, 3).unwrap());
        for tree in &trees {
            check(tree, &levels(tree.levels()));
            check(tree, &banded_chains(tree));
            assert_eq!(Plan::levels(tree.parents()), Plan::new(tree, Schedule::Levels));
        }
    }

    #[test]
    fn a_chain_is_one_run_a_band() {
        let steps = banded_chains(&DraftTree::chain(2 * BAND).unwrap());
        let shape: Vec<Vec<usize>> =
            steps.iter().map(|s| s.iter().map(|item| item.nodes.len()).collect()).collect();
        assert_eq!(shape, [vec![BAND], vec![1; BAND], vec![BAND]]);
    }

    fn rows(plan: &Plan, nodes: usize) -> Vec<usize> {
        let bytes = plan.words()[4..].iter().flat_map(|word| word.to_le_bytes());
        bytes.take(nodes).map(usize::from).collect()
    }

    #[test]
    fn beyond_32_nodes_a_plan_counts_depth_first_and_names_every_nodes_row() {
        for nodes in [8, 16, 32, 33, 64, 128, 200, 255] {
            for tree in
                [DraftTree::bole(nodes, 3), DraftTree::random(nodes, 4), DraftTree::skewed(2, nodes / 2)]
            {
                let tree = tree.unwrap();
                let nodes = tree.len();
                let tree = tree.reorder(&tree.level_order()).unwrap().0;
                let plan = Plan::new(&tree, Schedule::for_tree(&tree));
                let given: Vec<usize> = (0..nodes).collect();
                let order = if nodes > AS_GIVEN { tree.dfs_preorder() } else { given.clone() };
                assert_eq!(rows(&plan, nodes), order);
                assert!(nodes < 40 || order != given, "a tree whose order changes");
                // the rest is the plan of the tree in that order
                let (in_order, _) = tree.reorder(&order).unwrap();
                let other = Plan::new(&in_order, Schedule::for_tree(&tree));
                assert_eq!(rows(&other, nodes), given);
                let rest = 4 + nodes.next_multiple_of(16) / 4;
                assert_eq!(plan.words()[..4], other.words()[..4]);
                assert_eq!(plan.words()[rest..], other.words()[rest..]);
            }
        }
    }

    #[test]
    fn of_several_trees_every_one_is_counted_in_its_turn() {
        let mut parents = vec![-1, -1, 0, 1, 0];
        parents.extend([2, 3].repeat(20));
        let mut want = vec![0, 2];
        want.extend((5..45).step_by(2));
        want.extend([4, 1, 3]);
        want.extend((6..45).step_by(2));
        assert_eq!(rows(&Plan::levels(&parents), parents.len()), want);
    }

    #[test]
    fn entries_follow_depth_and_words_come_in_fours() {
        let tree = DraftTree::new(vec![-1, 0, 0, 1, 3, 4]).unwrap();
        let plan = Plan::new(&tree, Schedule::for_tree(&tree));
        assert_eq!(plan.entries(), 4 * 4 + 4 + 8, "depths 0 to 3 take four, depth 4 takes eight");
        assert_eq!(plan.words().len() % 4, 0);
    }
}
