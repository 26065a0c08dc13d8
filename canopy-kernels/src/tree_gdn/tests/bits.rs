//! Two runs that must not differ by a bit.

use super::*;

const DIMS: GdnDims = GdnDims { k_heads: 2, v_heads: 4, dk: 20, dv: 19 };

/// Decodes the path to `node` one token per round and returns every round's (o, u) and the final state.
fn serial(case: &Case, node: usize) -> (Vec<(Vec<f32>, Vec<f32>)>, Vec<f32>) {
    let mut state = case.state.clone();
    let mut rounds = Vec::new();
    for row in case.batch.trees()[0].path(node) {
        let round = case.alone(DraftTree::chain(1).unwrap(), &[row], &state);
        let verified = round.verify(Variant::Walk);
        state = round.commit(Variant::Walk, &verified, &[vec![0]]);
        rounds.push((verified.o, verified.u));
    }
    (rounds, state)
}

#[test]
fn walk_equals_serial_decoding_bit_for_bit() {
    for seed in 0..20 {
        let tree = DraftTree::random(1 + 3 * seed as usize, seed).unwrap();
        let case = Case::single(DIMS, tree.clone(), seed);
        let verified = case.verify(Variant::Walk);
        let width = DIMS.v_heads * DIMS.dv;
        for leaf in tree.leaves() {
            let path = tree.path(leaf);
            let (rounds, state) = serial(&case, leaf);
            for (&node, (o, u)) in path.iter().zip(&rounds) {
                assert_eq!(bits(&verified.o[node * width..][..width]), bits(o), "o of node {node}");
                assert_eq!(bits(&verified.u[node * width..][..width]), bits(u), "u of node {node}");
            }
            let committed = case.commit(Variant::Walk, &verified, &[path]);
            assert_eq!(bits(&committed), bits(&state), "state after leaf {leaf}");
        }
    }
}

#[test]
fn every_variant_is_near_the_oracle() {
    for seed in 0..20 {
        let tree = DraftTree::random(1 + 5 * seed as usize, seed).unwrap();
        let case = Case::single(DIMS, tree, seed);
        let truth = case.oracle();
        for variant in variants() {
            let verified = case.verify(variant);
            assert!(max_abs(&verified.o, &truth.o) < 1e-5, "{variant} {}", max_abs(&verified.o, &truth.o));
            assert!(max_abs(&verified.u, &truth.u) < 1e-5, "{variant}");
            assert!(max_abs(&verified.g_cum, &truth.g_cum) < 1e-4);
        }
    }
}
