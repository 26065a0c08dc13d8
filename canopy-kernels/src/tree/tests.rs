//! Trees are checked against definitions that walk parent links one by one.

use proptest::prelude::*;

use super::{DraftTree, SplitMix64};
use crate::error::Error;

/// Parent arrays that shrink towards a chain and fewer nodes.
pub(crate) fn arb_parents(nodes: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<i32>> {
    let edges = nodes.start() - 1..*nodes.end();
    proptest::collection::vec(any::<proptest::sample::Index>(), edges).prop_map(|back| {
        let links = back.iter().enumerate().map(|(i, back)| (i - back.index(i + 1)) as i32);
        std::iter::once(-1).chain(links).collect()
    })
}

/// Trees that shrink towards a chain and fewer nodes.
pub(crate) fn arb_tree(nodes: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = DraftTree> {
    arb_parents(nodes).prop_map(|parents| DraftTree::new(parents).expect("parents come first"))
}

fn tree(parents: &[i32]) -> DraftTree {
    DraftTree::new(parents.to_vec()).expect("a good parent array")
}

#[test]
fn errors_name_the_node() {
    let text = |parents: &[i32]| DraftTree::new(parents.to_vec()).unwrap_err().to_string();
    assert_eq!(text(&[]), "draft tree: no nodes; the root is a node");
    assert_eq!(text(&[0]), "draft tree: node 0 has parent 0; the root's parent is -1");
    assert_eq!(text(&[-1, 0, 2]), "draft tree: node 2 has parent 2; a parent must come before its child");
    assert_eq!(text(&[-1, 0, -1]), "draft tree: node 2 has parent -1; only node 0 is a root (parent -1)");
    assert_eq!(text(&[-1, -7]), "draft tree: node 1 has parent -7; only node 0 is a root (parent -1)");
    let most: Vec<i32> = (-1..255).collect();
    assert!(DraftTree::new(most.clone()).is_ok());
    assert_eq!(text(&[most, vec![0]].concat()), "draft tree: 257 nodes, at most 256");
    assert_eq!(
        DraftTree::chain(usize::MAX).unwrap_err(),
        Error::TooManyNodes { nodes: usize::MAX, max: 256 }
    );
    assert_eq!(DraftTree::random(300, 0).unwrap_err(), Error::TooManyNodes { nodes: 300, max: 256 });
    assert_eq!(DraftTree::chain(0).unwrap_err(), Error::EmptyTree);
}

#[test]
fn named_shapes_have_their_sizes() {
    assert!(DraftTree::chain(33).unwrap().is_chain());
    for (k, depth, nodes) in [(1, 5, 6), (2, 3, 15), (2, 7, 255), (4, 3, 85), (255, 1, 256), (3, 0, 1)] {
        let tree = DraftTree::balanced(k, depth).unwrap();
        assert_eq!((tree.len(), tree.max_depth()), (nodes, depth), "top-{k}, depth {depth}");
        let inner = tree.children().into_iter().filter(|children| !children.is_empty());
        assert!(inner.into_iter().all(|children| children.len() == k));
    }
    for (k, depth) in [(1, 9), (3, 4), (51, 5)] {
        let tree = DraftTree::skewed(k, depth).unwrap();
        assert_eq!((tree.len(), tree.max_depth()), (1 + k * depth, depth));
        assert_eq!(tree.leaves().len(), (k - 1) * depth + 1);
    }
    for (name, error) in [
        ("balanced tree: k", DraftTree::balanced(0, 2)),
        ("skewed tree: k", DraftTree::skewed(0, 2)),
        ("511 nodes, at most 256", DraftTree::balanced(2, 8)),
        ("at most 256", DraftTree::balanced(usize::MAX, 3)),
        ("at most 256", DraftTree::skewed(usize::MAX, 3)),
        ("at most 256", DraftTree::balanced(1, usize::MAX)),
    ] {
        assert!(error.unwrap_err().to_string().contains(name), "{name}");
    }
}

#[test]
fn boles_shapes_are_top_4_to_depth_8() {
    for nodes in 8..=256 {
        for seed in [1, 2] {
            let tree = DraftTree::bole(nodes, seed).unwrap();
            assert_eq!(tree.len(), nodes);
            assert!(tree.max_depth() <= 8 && tree.children().iter().all(|c| c.len() <= 4), "{nodes}");
        }
    }
    assert_eq!(DraftTree::bole(64, 3).unwrap(), DraftTree::bole(64, 3).unwrap());
    assert_ne!(DraftTree::bole(64, 3).unwrap(), DraftTree::bole(64, 4).unwrap());
    for nodes in [0, 7, 257] {
        let error = DraftTree::bole(nodes, 0).unwrap_err().to_string();
        assert_eq!(error, format!("bole tree: nodes, expected: 8 to 256, got: {nodes}"));
    }
}

#[test]
fn speclas_shapes_reach_their_depth() {
    for k in [2, 4] {
        for depth in [4, 12, 24] {
            for nodes in [16, 32] {
                let tree = DraftTree::specla(k, depth, nodes, 5);
                if (k, depth, nodes) == (2, 4, 32) {
                    assert!(tree.unwrap_err().to_string().contains("ends at 31"));
                    continue;
                }
                let tree = tree.unwrap();
                assert_eq!((tree.len(), tree.max_depth()), (nodes, depth.min(nodes - 1)));
                assert!(tree.children().iter().all(|c| c.len() <= k));
            }
        }
    }
    assert!(DraftTree::specla(3, 4, 16, 0).unwrap_err().to_string().contains("k, expected: 2 or 4"));
    assert!(DraftTree::specla(2, 5, 16, 0).unwrap_err().to_string().contains("depth"));
    assert!(DraftTree::specla(2, 4, 17, 0).unwrap_err().to_string().contains("nodes"));
}

#[test]
fn a_parent_array_in_any_order_gets_an_order_offered() {
    let text = |parents: &[i32]| DraftTree::from_any_order(parents).unwrap_err().to_string();
    assert_eq!(text(&[1, 0]), "draft tree: none of the 2 nodes is a root (parent -1)");
    assert_eq!(text(&[1, 0, -1]), "draft tree: node 1 is its own ancestor through parent 0");
    assert_eq!(text(&[-1, 1]), "draft tree: node 1 is its own ancestor through parent 1");
    assert_eq!(text(&[3, -1]), "draft tree: node 0 has parent 3, but there are 2 nodes");
    assert_eq!(text(&[-1, -2]), "draft tree: node 1 has parent -2, but there are 2 nodes");
    assert_eq!(text(&[1, -1, -1]), "draft tree: node 2 has parent -1; only node 0 is a root (parent -1)");
    assert_eq!(text(&[]), "draft tree: no nodes; the root is a node");
    let (kept, mapping) = DraftTree::from_any_order(&[-1, 0, 1, 0]).unwrap();
    assert_eq!((kept.parents(), mapping.as_slice()), ([-1, 0, 1, 0].as_slice(), [0, 1, 2, 3].as_slice()));
}

#[test]
fn reorder_refuses_what_is_no_order() {
    let tree = tree(&[-1, 0, 1]);
    let text = |order: &[usize]| tree.reorder(order).unwrap_err().to_string();
    assert_eq!(text(&[0, 1]), "draft tree reorder: order, expected: [3], got: [2]");
    assert_eq!(text(&[0, 2, 1]), "draft tree: new order, position 1 holds node 2: its parent comes later");
    assert_eq!(text(&[0, 1, 1]), "draft tree: new order, position 2 holds node 1: it came before");
    assert_eq!(text(&[0, 1, 3]), "draft tree: new order, position 2 holds node 3: there is no such node");
}

proptest! {
    #[test]
    fn depths_paths_and_mask_follow_parent_links(parents in arb_parents(1..=256)) {
        let tree = tree(&parents);
        let mask = tree.ancestor_mask();
        let words32 = mask.words32();
        let per_node = tree.len().div_ceil(32);
        for node in 0..tree.len() {
            let mut seen = vec![node];
            while parents[seen[seen.len() - 1]] >= 0 {
                seen.push(parents[seen[seen.len() - 1]] as usize);
            }
            prop_assert_eq!(tree.depths()[node] as usize, seen.len() - 1);
            seen.reverse();
            prop_assert_eq!(tree.path(node), seen.clone());
            for other in 0..tree.len() + 70 {
                prop_assert_eq!(mask.contains(node, other), seen.contains(&other));
                let bit = words32.get(node * per_node + other / 32).filter(|_| other / 32 < per_node);
                prop_assert_eq!(bit.is_some_and(|w| w >> (other % 32) & 1 == 1), seen.contains(&other));
            }
        }
    }

    #[test]
    fn orders_keep_the_tree(parents in arb_parents(1..=256)) {
        let tree = tree(&parents);
        for order in [tree.dfs_preorder(), tree.level_order()] {
            let (renumbered, mapping) = tree.reorder(&order).unwrap();
            for node in 0..tree.len() {
                let path: Vec<usize> = tree.path(node).iter().map(|&n| mapping[n]).collect();
                prop_assert_eq!(renumbered.path(mapping[node]), path);
            }
        }
        let dfs = tree.reorder(&tree.dfs_preorder()).unwrap().0;
        let sizes = dfs.subtree_sizes();
        for (node, size) in sizes.into_iter().enumerate() {
            let subtree = (0..dfs.len()).filter(|&n| dfs.path(n).contains(&node));
            prop_assert!(subtree.eq(node..node + size), "a subtree is contiguous in pre-order");
        }
        let level = tree.reorder(&tree.level_order()).unwrap().0;
        prop_assert!(level.depths().is_sorted());
        prop_assert_eq!(tree.levels().concat(), tree.level_order());
    }

    #[test]
    fn a_shuffled_tree_is_found_again(parents in arb_parents(1..=64), seed in any::<u64>()) {
        let tree = tree(&parents);
        let mut random = SplitMix64::new(seed);
        let mut given: Vec<usize> = (0..tree.len()).collect();
        for i in (1..given.len()).rev() {
            given.swap(i, random.below(i + 1));
        }
        let mut shuffled = vec![-1; tree.len()];
        for node in 1..tree.len() {
            shuffled[given[node]] = given[parents[node] as usize] as i32;
        }
        let (found, mapping) = DraftTree::from_any_order(&shuffled).unwrap();
        for node in 0..tree.len() {
            let path: Vec<usize> = tree.path(node).iter().map(|&n| mapping[given[n]]).collect();
            prop_assert_eq!(found.path(mapping[given[node]]), path);
        }
    }

    #[test]
    fn heavy_chains_cover_the_tree(parents in arb_parents(1..=256)) {
        let tree = tree(&parents);
        let chains = tree.heavy_chains();
        let mut count = vec![0; tree.len()];
        for (index, chain) in chains.chains().iter().enumerate() {
            for (entry, &node) in chain.iter().enumerate() {
                count[node] += 1;
                prop_assert_eq!(chains.chain_of(node), index);
                match (entry, tree.parent(node)) {
                    (0, None) => prop_assert_eq!(index, 0),
                    (0, Some(parent)) => prop_assert!(chains.chain_of(parent) < index),
                    (_, parent) => prop_assert_eq!(parent, Some(chain[entry - 1])),
                }
            }
        }
        prop_assert!(count.iter().all(|&n| n == 1));
        for leaf in tree.leaves() {
            let mut crossed: Vec<usize> = tree.path(leaf).iter().map(|&n| chains.chain_of(n)).collect();
            crossed.dedup();
            prop_assert!(crossed.len() <= tree.len().ilog2() as usize + 1);
        }
    }
}
