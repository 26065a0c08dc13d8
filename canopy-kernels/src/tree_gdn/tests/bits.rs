//! Two runs that must not differ by a bit.

use super::*;

#[test]
fn walk_equals_serial_decoding_bit_for_bit() {
    for (dims, seeds) in [(ODD, 16), (GdnDims { k_heads: 1, v_heads: 2, dk: 128, dv: 128 }, 4)] {
        for seed in 0..seeds {
            let tree = DraftTree::random(1 + 4 * seed as usize, seed).unwrap();
            let flavour = [Flavour::Plain, Flavour::EqualKeys, Flavour::Extreme][seed as usize % 3];
            let case = Case::new(dims, vec![tree.clone()], flavour, seed);
            let verified = case.verify(Variant::Walk);
            for leaf in tree.leaves() {
                let path = tree.path(leaf);
                let (rounds, state) = case.serial(leaf);
                for (&node, round) in path.iter().zip(&rounds) {
                    let width = dims.v_heads * dims.dv;
                    assert_eq!(
                        bits(&verified.o[node * width..][..width]),
                        bits(&round.o),
                        "o of node {node}"
                    );
                    assert_eq!(
                        bits(&verified.u[node * width..][..width]),
                        bits(&round.u),
                        "u of node {node}"
                    );
                }
                let committed = case.commit(Variant::Walk, &verified, &[path]);
                assert_eq!(bits(&committed), bits(&state), "state after leaf {leaf}");
            }
        }
    }
}

#[test]
fn a_chain_equals_serial_decoding() {
    for nodes in [1, 2, 31, 32, 33, 64, 128] {
        let case = Case::plain(ODD, DraftTree::chain(nodes).unwrap(), nodes as u64);
        let (rounds, state) = case.serial(nodes - 1);
        let (o, u) = (rounds.iter().map(|r| &r.o[..]), rounds.iter().map(|r| &r.u[..]));
        let (o, u) = (widen(&o.collect::<Vec<_>>().concat()), widen(&u.collect::<Vec<_>>().concat()));
        for variant in stable_variants() {
            let verified = case.verify(variant);
            assert!(max_abs(&verified.o, &o) < MAX_ABS, "{variant}, {nodes} nodes");
            assert!(max_abs(&verified.u, &u) < MAX_ABS, "{variant}, {nodes} nodes");
            let committed = case.commit(variant, &verified, &[(0..nodes).collect()]);
            assert!(max_abs(&committed, &widen(&state)) < MAX_ABS, "{variant}, {nodes} nodes");
        }
    }
}

#[test]
fn a_batch_equals_each_tree_alone() {
    let trees: Vec<DraftTree> = [7, 21, 1, 64].map(|n| DraftTree::random(n, n as u64).unwrap()).into();
    let case = Case::new(ODD, trees.clone(), Flavour::Plain, 1);
    let paths: Vec<Vec<usize>> = trees.iter().map(|tree| tree.path(tree.len() - 1)).collect();
    for variant in variants() {
        let together = case.verify(variant);
        let pool = case.commit(variant, &together, &paths);
        for ((first, tree, slot), path) in case.batch.iter().zip(&paths) {
            let own = slot.unwrap() * ODD.state_len()..(slot.unwrap() + 1) * ODD.state_len();
            let rows: Vec<usize> = (first..first + tree.len()).collect();
            let alone = case.alone(tree.clone(), &rows, &case.state[own.clone()]);
            let verified = alone.verify(variant);
            for node in 0..tree.len() {
                assert_eq!(together.row(ODD, first + node), verified.row(ODD, node), "{variant}");
            }
            let state = alone.commit(variant, &verified, std::slice::from_ref(path));
            assert_eq!(bits(&pool[own]), bits(&state), "{variant}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let dims = GdnDims { k_heads: 2, v_heads: 4, dk: 128, dv: 128 };
    let tree = DraftTree::bole(24, 3).unwrap();
    let path = tree.path(23);
    let case = Case::new(dims, vec![tree.clone(), tree], Flavour::Plain, 9);
    let run = |threads: usize, variant: Variant| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let verified = case.verify(variant);
            let state = case.commit(variant, &verified, &[path.clone(), path.clone()]);
            (verified.bits(), bits(&state))
        })
    };
    for variant in [Variant::Walk, Variant::Solve(Solve::Forward)] {
        let one = run(1, variant);
        for threads in [2, 3, 8] {
            assert!(run(threads, variant) == one, "{variant} on {threads} threads");
        }
    }
}

#[test]
fn padding_is_inert() {
    let trees: Vec<DraftTree> = [5, 9, 3].map(|n| DraftTree::random(n, n as u64).unwrap()).into();
    let case = Case::new(ODD, trees.clone(), Flavour::Plain, 4);
    for variant in variants() {
        let mut padded = case.clone();
        padded.batch = TreeBatch::new(trees.clone(), vec![2, -1, 0]).unwrap();
        for plane in [(&mut padded.qkv, ODD.qkv_width()), (&mut padded.gates, 2 * ODD.v_heads)] {
            plane.0[5 * plane.1..14 * plane.1].fill(f32::NAN);
        }
        padded.state[ODD.state_len()..2 * ODD.state_len()].fill(f32::NAN);
        let (full, verified) = (case.verify(variant), padded.verify(variant));
        for row in 0..case.batch.rows() {
            if (5..14).contains(&row) {
                assert!(verified.row(ODD, row).iter().all(|&bits| bits == 0), "{variant}, row {row}");
            } else {
                assert_eq!(verified.row(ODD, row), full.row(ODD, row), "{variant}, row {row}");
            }
        }
        let paths = [trees[0].path(4), trees[1].path(8), trees[2].path(2)];
        let (pool, full) = (padded.commit(variant, &verified, &paths), case.commit(variant, &full, &paths));
        let slot = |pool: &[f32], slot: usize| bits(&pool[slot * ODD.state_len()..][..ODD.state_len()]);
        assert_eq!((slot(&pool, 2), slot(&pool, 0)), (slot(&full, 2), slot(&full, 0)));
        assert_eq!(slot(&pool, 1), slot(&padded.state, 1), "{variant}: an unused slot was written");
    }
}

/// What lies beyond row N in a caller's buffers is never read.
#[test]
fn rows_beyond_the_last_are_never_read() {
    for nodes in 1..=33 {
        let case = Case::plain(ODD, DraftTree::random(nodes, 3).unwrap(), nodes as u64);
        let larger = |plane: &[f32]| [plane, &vec![f32::NAN; 40 * ODD.qkv_width()]].concat();
        let (qkv, gates, state) = (larger(&case.qkv), larger(&case.gates), larger(&case.state));
        for variant in [Variant::Walk, Variant::Solve(Solve::Forward)] {
            let exact = case.verify(variant);
            let plane = nodes * ODD.v_heads;
            let mut out = [plane * ODD.dv, plane * ODD.dv, plane].map(|len| vec![f32::NAN; len + 64]);
            let [o, u, g_cum] = &mut out;
            let output = VerifyOutput {
                o: &mut o[32..32 + plane * ODD.dv],
                u: &mut u[32..32 + plane * ODD.dv],
                g_cum: &mut g_cum[32..32 + plane],
            };
            let input = VerifyInput {
                qkv: &qkv[..case.qkv.len()],
                gates: &gates[..case.gates.len()],
                state: &state[..case.state.len()],
            };
            cpu::verify(ODD, &case.batch, variant, input, output).unwrap();
            for (with_guards, exact) in out.iter().zip([&exact.o, &exact.u, &exact.g_cum]) {
                let (before, rest) = with_guards.split_at(32);
                assert_eq!(bits(&rest[..exact.len()]), bits(exact), "{variant}, {nodes} nodes");
                assert!(before.iter().chain(&rest[exact.len()..]).all(|x| x.is_nan()), "a guard was written");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn substitutions_agree_bit_for_bit(case in arb_case(128)) {
        let forward = case.verify(Variant::Solve(Solve::Forward)).bits();
        for solve in [64, 32, 16].map(Solve::Blocked).into_iter().chain([Solve::Level, Solve::Chains]) {
            prop_assert!(case.verify(Variant::Solve(solve)).bits() == forward, "{}", solve);
        }
    }

    #[test]
    fn a_node_depends_on_its_ancestors_only(case in arb_case(96), pick in any::<proptest::sample::Index>()) {
        let tree = case.tree().clone();
        let node = pick.index(tree.len());
        let path = tree.path(node);
        let mut other = case.clone();
        let noise = Case::new(ODD, vec![tree.clone()], Flavour::Plain, 77);
        for row in (0..tree.len()).filter(|row| !path.contains(row)) {
            for (to, from, width) in [
                (&mut other.qkv, &noise.qkv, ODD.qkv_width()),
                (&mut other.gates, &noise.gates, 2 * ODD.v_heads),
            ] {
                to[row * width..(row + 1) * width].copy_from_slice(&from[row * width..(row + 1) * width]);
            }
        }
        for variant in variants() {
            let (a, b) = (case.verify(variant), other.verify(variant));
            for &node in &path {
                prop_assert_eq!(a.row(ODD, node), b.row(ODD, node), "{}", variant);
            }
        }
    }

    #[test]
    fn reordering_siblings_permutes_outputs(case in arb_case(96), seed in any::<u64>()) {
        let tree = case.tree();
        let mut random = SplitMix64::new(seed);
        // A random topological order: any node whose parent has come may be next.
        let (children, mut open, mut order) = (tree.children(), vec![0], Vec::new());
        while !open.is_empty() {
            let node = open.swap_remove(random.below(open.len()));
            order.push(node);
            open.extend(&children[node]);
        }
        let (reordered, mapping) = tree.reorder(&order).unwrap();
        let other = case.alone(reordered, &order, &case.state);
        for variant in variants() {
            let (a, b) = (case.verify(variant), other.verify(variant));
            for (node, &place) in mapping.iter().enumerate() {
                prop_assert_eq!(a.row(ODD, node), b.row(ODD, place), "{}", variant);
            }
        }
    }

    #[test]
    fn a_prefix_of_the_tree_gives_the_same_outputs(case in arb_case(96), cut in any::<proptest::sample::Index>()) {
        let nodes = 1 + cut.index(case.tree().len());
        let prefix = DraftTree::new(case.tree().parents()[..nodes].to_vec()).unwrap();
        let rows: Vec<usize> = (0..nodes).collect();
        let shorter = case.alone(prefix, &rows, &case.state);
        for variant in variants() {
            let (a, b) = (case.verify(variant), shorter.verify(variant));
            for node in 0..nodes {
                prop_assert_eq!(a.row(ODD, node), b.row(ODD, node), "{}", variant);
            }
        }
    }

    #[test]
    fn a_second_tree_equals_a_fresh_run(case in arb_case(64), seed in any::<u64>()) {
        let fresh = Case {
            state: case.state.clone(),
            ..Case::plain(ODD, DraftTree::random(17, seed).unwrap(), seed)
        };
        for variant in variants() {
            let want = fresh.verify(variant).bits();
            // Nothing of the first tree is accepted.
            let state = case.commit(variant, &case.verify(variant), &[vec![]]);
            prop_assert!(bits(&state) == bits(&fresh.state), "{} wrote the pool", variant);
            let after = Case { state, ..fresh.clone() };
            prop_assert!(after.verify(variant).bits() == want, "{}", variant);
        }
    }
}
