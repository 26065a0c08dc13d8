//! The text of every refusal.

use super::*;

#[test]
fn variants_have_names() {
    for (name, variant) in Variant::ALL {
        assert_eq!(name.parse::<Variant>().unwrap(), variant);
        assert_eq!(variant.to_string(), name);
        if let Variant::Solve(solve) = variant {
            assert_eq!(name.parse::<Solve>().unwrap(), solve);
        }
    }
    assert_eq!(
        "blocked".parse::<Variant>().unwrap_err().to_string(),
        "tree_gdn: variant, expected: one of walk, dense, forward, blocked64, blocked32, blocked16, neumann, \
         squaring, level, chains, got: \"blocked\""
    );
    assert_eq!(
        "walk".parse::<Solve>().unwrap_err().to_string(),
        "tree_gdn: solve, expected: one of dense, forward, blocked64, blocked32, blocked16, neumann, squaring, \
         level, chains, got: \"walk\""
    );
}

#[test]
fn every_argument_is_checked() {
    let case =
        Case::new(ODD, vec![DraftTree::chain(3).unwrap(), DraftTree::chain(2).unwrap()], Flavour::Plain, 0);
    type Change = dyn Fn(&mut Case, &mut [Vec<f32>; 3], &mut Variant);
    let refuse = |change: &Change| {
        let (mut case, mut variant) = (case.clone(), Variant::Walk);
        let mut out = [5 * 4 * 19, 5 * 4 * 19, 5 * 4].map(|len| vec![0.0; len]);
        change(&mut case, &mut out, &mut variant);
        let [o, u, g_cum] = &mut out;
        let output = VerifyOutput { o, u, g_cum };
        cpu::verify(case.dims, &case.batch, variant, case.input(), output).unwrap_err().to_string()
    };
    assert_eq!(refuse(&|c, _, _| c.qkv.truncate(7)), "tree_gdn verify: qkv, expected: [5, 156], got: [7]");
    assert_eq!(
        refuse(&|c, _, _| c.gates.push(0.0)),
        "tree_gdn verify: gates, expected: [5, 2, 4], got: [41]"
    );
    assert_eq!(
        refuse(&|c, _, _| c.state.truncate(3000)),
        "tree_gdn verify: state, expected: [1, 4, 19, 20], got: [3000]"
    );
    assert_eq!(
        refuse(&|c, _, _| c.state.truncate(ODD.state_len())),
        "tree_gdn verify: slots, expected: below the pool's 1 slots, got: 1"
    );
    assert_eq!(refuse(&|_, out, _| out[0].truncate(1)), "tree_gdn verify: o, expected: [5, 4, 19], got: [1]");
    assert_eq!(refuse(&|_, out, _| out[1].truncate(2)), "tree_gdn verify: u, expected: [5, 4, 19], got: [2]");
    assert_eq!(refuse(&|_, out, _| out[2].truncate(3)), "tree_gdn verify: g_cum, expected: [5, 4], got: [3]");
    assert_eq!(
        refuse(&|_, _, variant| *variant = Variant::Solve(Solve::Blocked(0))),
        "tree_gdn verify: variant, expected: diagonal tiles of 64, 32 or 16 nodes, got: blocked0"
    );
    assert_eq!(
        refuse(&|c, _, _| c.dims.k_heads = 3),
        "gdn dims: v_heads, expected: a multiple of k_heads = 3, got: 4"
    );
    assert_eq!(refuse(&|c, _, _| c.dims.dk = 0), "gdn dims: dk, expected: at least 1, got: 0");
}

#[test]
fn commit_checks_its_arguments() {
    let case = Case::plain(ODD, DraftTree::chain(3).unwrap(), 0);
    let verified = case.verify(Variant::Walk);
    let paths = AcceptedPaths::new(&case.batch, &[vec![0, 1]]).unwrap();
    let commit = |tape: Tape<'_>, state: &mut [f32]| {
        cpu::commit(ODD, &paths, Variant::Walk, tape, state).unwrap_err().to_string()
    };
    let tape = Tape { qkv: &case.qkv, gates: &case.gates, u: &verified.u, g_cum: &verified.g_cum };
    let mut state = case.state.clone();
    let got = commit(Tape { qkv: &case.qkv[1..], ..tape }, &mut state);
    assert_eq!(got, "tree_gdn commit: qkv, expected: [3, 156], got: [467]");
    let got = commit(Tape { gates: &[], ..tape }, &mut state);
    assert_eq!(got, "tree_gdn commit: gates, expected: [3, 2, 4], got: [0]");
    let got = commit(Tape { u: &verified.u[..5], ..tape }, &mut state);
    assert_eq!(got, "tree_gdn commit: u, expected: [3, 4, 19], got: [5]");
    let got = commit(Tape { g_cum: &[0.0], ..tape }, &mut state);
    assert_eq!(got, "tree_gdn commit: g_cum, expected: [3, 4], got: [1]");
    let got = commit(tape, &mut state[..10]);
    assert_eq!(got, "tree_gdn commit: state, expected: [0, 4, 19, 20], got: [10]");
    let got = commit(tape, &mut []);
    assert_eq!(got, "tree_gdn commit: slots, expected: below the pool's 0 slots, got: 0");
    assert_eq!(bits(&state), bits(&case.state), "a refused commit wrote the pool");
}
