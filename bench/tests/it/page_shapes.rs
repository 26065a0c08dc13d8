//! The page draws the same trees as the kernels. This writes what the page's own tests compare themselves with
//! (`web/tests/shapes.json`) and fails when the file on disk is another; `CANOPY_BLESS=1` rewrites it.

use std::path::Path;

use canopy_kernels::DraftTree;
use serde_json::{Value, json};

fn shape(name: &str, arguments: &[u64], tree: canopy_kernels::Result<DraftTree>) -> Value {
    // As text: a seed may be larger than what a JSON number holds in a page.
    let arguments: Vec<String> = arguments.iter().map(u64::to_string).collect();
    match tree {
        Ok(tree) => {
            let mask: Vec<String> =
                (0..tree.len()).map(|node| format!("{:x}", mask_row(&tree, node))).collect();
            json!({
                "shape": name, "arguments": arguments, "parents": tree.parents(), "depths": tree.depths(),
                "dfs": tree.dfs_preorder(), "level": tree.level_order(), "mask": mask,
            })
        }
        Err(error) => json!({ "shape": name, "arguments": arguments, "error": error.to_string() }),
    }
}

/// The lowest 128 bits of a node's row of the ancestor mask.
fn mask_row(tree: &DraftTree, node: usize) -> u128 {
    let mask = tree.ancestor_mask();
    mask.row(node).iter().take(2).enumerate().fold(0, |row, (at, &word)| row | u128::from(word) << (64 * at))
}

fn shapes() -> Vec<Value> {
    let mut all = Vec::new();
    for nodes in [1, 2, 33, 128, 257] {
        all.push(shape("chain", &[nodes as u64], DraftTree::chain(nodes)));
    }
    for (k, depth) in [(0, 2), (1, 5), (2, 5), (4, 3), (3, 0), (2, 8)] {
        all.push(shape("balanced", &[k as u64, depth as u64], DraftTree::balanced(k, depth)));
        all.push(shape("skewed", &[k as u64, depth as u64], DraftTree::skewed(k, depth)));
    }
    for (nodes, seed) in [(1, 0), (17, 1), (64, 2), (100, u64::MAX), (257, 0)] {
        all.push(shape("random", &[nodes as u64, seed], DraftTree::random(nodes, seed)));
    }
    for (nodes, seed) in [(8, 0), (16, 1), (60, 5), (128, 2), (100, 1 << 60), (7, 0)] {
        all.push(shape("bole", &[nodes as u64, seed], DraftTree::bole(nodes, seed)));
    }
    for (k, depth, nodes) in
        [(2, 4, 16), (2, 4, 32), (2, 12, 32), (4, 12, 16), (4, 24, 32), (3, 4, 16), (2, 5, 16)]
    {
        let tree = DraftTree::specla(k, depth, nodes, 7);
        all.push(shape("specla", &[k as u64, depth as u64, nodes as u64, 7], tree));
    }
    all
}

fn any_order(parents: &[i32]) -> Value {
    match DraftTree::from_any_order(parents) {
        Ok((tree, mapping)) => json!({ "given": parents, "parents": tree.parents(), "mapping": mapping }),
        Err(error) => json!({ "given": parents, "error": error.to_string() }),
    }
}

#[test]
fn the_pages_vectors_are_the_kernels_trees() {
    let orders: [&[i32]; 9] = [
        &[-1, 0, 1, 0],
        &[2, 0, -1],
        &[4, 4, 1, 0, -1, 2],
        &[1, 0],
        &[1, 0, -1],
        &[-1, 1],
        &[3, -1],
        &[-1, -2],
        &[],
    ];
    let orders: Vec<Value> = orders.into_iter().map(any_order).collect();
    let line = |value: &Value| format!("  {value}");
    let block = |values: &[Value]| values.iter().map(line).collect::<Vec<_>>().join(",\n");
    let text = format!("{{\"shapes\": [\n{}\n], \"orders\": [\n{}\n]}}\n", block(&shapes()), block(&orders));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/tests/shapes.json");
    if std::env::var_os("CANOPY_BLESS").is_some() {
        std::fs::write(&path, &text).expect("the page's test folder");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "{} is not what the kernels' trees are; CANOPY_BLESS=1 rewrites it",
        path.display()
    );
}
