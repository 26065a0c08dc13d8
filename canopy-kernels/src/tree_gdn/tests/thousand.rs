//! The first figure: the closed form in float64 is the oracle, on a thousand random trees.

use rayon::prelude::*;

use super::*;
use crate::tree_gdn::cpu::Planes;
use crate::tree_gdn::cpu::system::{Ancestors, TriangularSystem};

const TREES: u64 = 1000;
const EXACT: f64 = 1e-10;

/// 1 to 256 nodes of every kind; a few long chains among them.
fn nth_tree(n: u64) -> DraftTree {
    let mut random = SplitMix64::new(n);
    let nodes = 1 + random.below(256);
    let tree = match n % 6 {
        0 => DraftTree::random(nodes, n),
        1 => DraftTree::bole(nodes.max(8), n),
        2 => DraftTree::specla(
            [2, 4][random.below(2)],
            [12, 24][random.below(2)],
            [16, 32][random.below(2)],
            n,
        ),
        3 => DraftTree::skewed(1 + nodes % 4, nodes / 8),
        4 if n % 100 == 4 => DraftTree::chain(nodes),
        4 => DraftTree::chain(1 + nodes / 4),
        // Parents at most four back: deep, with short side branches.
        _ => DraftTree::new(
            (0..1 + nodes / 2).map(|i| i as i32 - 1 - random.below(i.clamp(1, 4)) as i32).collect(),
        ),
    };
    tree.expect("sizes fit")
}

struct Worst {
    exact: f64,
    exact_state: f64,
    f32: f64,
    tree: u64,
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |max, d| if d > max || d.is_nan() { d } else { max })
}

fn one_tree(n: u64) -> Worst {
    let case = Case::plain(HEAD, nth_tree(n), n);
    let (tree, truth) = (case.tree().clone(), case.oracle());
    let [qkv, gates, state] = [&case.qkv, &case.gates, &case.state].map(|x| widen(x));
    let planes = Planes { qkv: &qkv, gates: &gates };
    let mut worst = Worst { exact: 0.0, exact_state: 0.0, f32: 0.0, tree: n };
    for (index, (name, variant)) in Variant::ALL.into_iter().enumerate() {
        let (mut o, mut u) = (vec![f64::NAN; tree.len() * 128], vec![f64::NAN; tree.len() * 128]);
        cpu::verify_in(HEAD, &case.batch, variant, planes, &state, [&mut o, &mut u]);
        let error = difference(&o, &truth.o).max(difference(&u, &truth.u));
        assert!(error <= EXACT, "tree {n}, {} nodes, {name}: {error:e}", tree.len());
        worst.exact = worst.exact.max(error);
        if index as u64 != n % Variant::ALL.len() as u64 {
            continue;
        }
        for leaf in tree.leaves() {
            let path = AcceptedPaths::new(&case.batch, &[tree.path(leaf)]).unwrap();
            let mut committed = state.clone();
            cpu::commit_in(HEAD, &path, variant, planes, &u, &mut committed);
            let error = difference(&committed, &case.oracle_state(leaf));
            assert!(error <= EXACT, "tree {n}, leaf {leaf}, {name}: state {error:e}");
            worst.exact_state = worst.exact_state.max(error);
        }
    }
    for variant in [Variant::Walk, Variant::Solve(Solve::Forward), Variant::Solve(Solve::Dense)] {
        let verified = case.verify(variant);
        let error = max_abs(&verified.o, &truth.o).max(max_abs(&verified.u, &truth.u));
        assert!(error <= MAX_ABS, "tree {n}, {} nodes, {variant} in f32: {error:e}", tree.len());
        worst.f32 = worst.f32.max(error);
    }
    worst
}

#[test]
fn thousand_trees() {
    let trees: Vec<Worst> = (0..TREES).into_par_iter().map(one_tree).collect();
    let largest = |of: fn(&Worst) -> f64| trees.iter().max_by(|a, b| of(a).total_cmp(&of(b))).expect("trees");
    let line = |what: &str, of: fn(&Worst) -> f64| {
        let worst = largest(of);
        let tree = nth_tree(worst.tree);
        eprintln!("{what}: {:e}, tree {}: {:?}", of(worst), worst.tree, tree.parents());
    };
    line("largest float64 error of o and u", |worst| worst.exact);
    line("largest float64 error of a state", |worst| worst.exact_state);
    line("largest f32 error of o and u", |worst| worst.f32);
}

/// Powers of G by plain dense products, zeros multiplied and all.
#[test]
fn g_to_the_depth_plus_one_is_exactly_zero() {
    for n in (0..TREES).step_by(10) {
        let tree = nth_tree(n);
        let nodes = tree.len();
        if nodes > 96 {
            continue;
        }
        let ancestors = Ancestors::new(&tree);
        let mut random = SplitMix64::new(n);
        let g: Vec<f64> = (0..ancestors.len()).map(|_| 0.1 + random.unit()).collect();
        let system = TriangularSystem { tree: &tree, ancestors: &ancestors, g: &g };
        let mut dense = vec![0.0; nodes * nodes];
        for node in 0..nodes {
            for (&at, &g) in ancestors.of(node).iter().zip(&g[ancestors.range(node)]) {
                dense[node * nodes + at] = g;
            }
        }
        let (mut power, mut sparse) = (dense.clone(), g.clone());
        for exponent in 1..=tree.max_depth() {
            assert!(power.iter().any(|&x| x != 0.0), "G^{exponent} of a tree of depth {}", tree.max_depth());
            power = multiply(&power, &dense, nodes);
            sparse = system.product(&sparse, &g);
        }
        assert!(power.iter().chain(&sparse).all(|&x| x == 0.0), "tree {n}");
    }
}

fn multiply(a: &[f64], b: &[f64], n: usize) -> Vec<f64> {
    let mut out = vec![0.0; n * n];
    for (out, a) in out.chunks_mut(n).zip(a.chunks(n)) {
        for (&factor, b) in a.iter().zip(b.chunks(n)) {
            out.iter_mut().zip(b).for_each(|(out, b)| *out += factor * b);
        }
    }
    out
}
