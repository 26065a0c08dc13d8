//! NaN and infinities reach the nodes that descend from theirs, and nobody else's bits.

use super::*;

#[derive(Clone, Copy, Debug)]
enum Where {
    Query,
    Key,
    Value,
    Gate,
    Beta,
}

/// Plants `x` in one element of a row, value head 1 (key head 0), column 3.
fn plant(case: &mut Case, row: usize, place: Where, x: f32) {
    let dims = case.dims;
    let (qkv, gates) = (row * dims.qkv_width(), row * 2 * dims.v_heads);
    match place {
        Where::Query => case.qkv[qkv + 3] = x,
        Where::Key => case.qkv[qkv + dims.k_heads * dims.dk + 3] = x,
        Where::Value => case.qkv[qkv + 2 * dims.k_heads * dims.dk + dims.dv + 3] = x,
        Where::Gate => case.gates[gates + 1] = x,
        Where::Beta => case.gates[gates + dims.v_heads + 1] = x,
    }
}

#[test]
fn nonfinite_values_reach_exactly_the_descendants() {
    let tree = DraftTree::bole(40, 5).unwrap();
    let clean = Case::plain(ODD, tree.clone(), 8);
    let places = [Where::Query, Where::Key, Where::Value, Where::Gate, Where::Beta];
    for (victim, place) in (0..tree.len()).zip(places.iter().copied().cycle()) {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut case = clean.clone();
            plant(&mut case, victim, place, poison);
            let truth = case.oracle();
            for variant in variants() {
                let (a, b) = (clean.verify(variant), case.verify(variant));
                for node in (0..tree.len()).filter(|&node| !tree.path(node).contains(&victim)) {
                    assert_eq!(
                        a.row(ODD, node),
                        b.row(ODD, node),
                        "{variant}: {place:?} of {victim} hit {node}"
                    );
                }
                for (at, (&got, &truth)) in b.o.iter().zip(&truth.o).enumerate() {
                    let node = at / (ODD.v_heads * ODD.dv);
                    assert_eq!(
                        got.is_finite(),
                        truth.is_finite(),
                        "{variant}: {poison} in {place:?} of {victim}: o of node {node} is {got}, float64 {truth}"
                    );
                }
            }
        }
    }
}

/// Case 6 of the known failures: v of one leaf NaN, v of another infinite, k of a third NaN.
#[test]
fn three_poisoned_leaves_harm_only_themselves() {
    let tree = DraftTree::balanced(3, 3).unwrap();
    let clean = Case::plain(ODD, tree.clone(), 2);
    let leaves = tree.leaves();
    let victims = [leaves[0], leaves[leaves.len() / 2], leaves[leaves.len() - 1]];
    let mut case = clean.clone();
    plant(&mut case, victims[0], Where::Value, f32::NAN);
    plant(&mut case, victims[1], Where::Value, f32::INFINITY);
    plant(&mut case, victims[2], Where::Key, f32::NAN);
    for variant in variants() {
        let (a, b) = (clean.verify(variant), case.verify(variant));
        for node in 0..tree.len() {
            let same = a.row(ODD, node) == b.row(ODD, node);
            assert_eq!(same, !victims.contains(&node), "{variant}, node {node}");
        }
    }
}

#[test]
fn commit_of_a_clean_path_ignores_poisoned_branches() {
    let tree = DraftTree::bole(40, 6).unwrap();
    let clean = Case::plain(ODD, tree.clone(), 3);
    let path = tree.path(39);
    let mut case = clean.clone();
    for row in (0..tree.len()).filter(|row| !path.contains(row)) {
        case.qkv[row * ODD.qkv_width()..][..ODD.qkv_width()].fill(f32::NAN);
        case.gates[row * 2 * ODD.v_heads..][..2 * ODD.v_heads].fill(f32::INFINITY);
    }
    for variant in variants() {
        let paths = std::slice::from_ref(&path);
        let a = clean.commit(variant, &clean.verify(variant), paths);
        let b = case.commit(variant, &case.verify(variant), paths);
        assert_eq!(bits(&a), bits(&b), "{variant}");
    }
}

#[test]
fn a_poisoned_state_spoils_its_rows_only() {
    let tree = DraftTree::bole(20, 6).unwrap();
    let clean = Case::plain(ODD, tree, 3);
    let mut case = clean.clone();
    // Row 7 of value head 2.
    case.state[(2 * ODD.dv + 7) * ODD.dk + 5] = f32::NAN;
    for variant in variants() {
        let (a, b) = (clean.verify(variant), case.verify(variant));
        for (at, (a, b)) in a.o.iter().zip(&b.o).enumerate() {
            if at % (ODD.v_heads * ODD.dv) == 2 * ODD.dv + 7 {
                assert!(b.is_nan(), "{variant}");
            } else {
                assert_eq!(a.to_bits(), b.to_bits(), "{variant}");
            }
        }
    }
}
