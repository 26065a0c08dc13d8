//! The drafter's contract besides its numbers: a stream's bits depend on that stream alone, a draft leaves the
//! context as it was, snapshots and resets are exact, and bad arguments are named.

use candle_core::Tensor;
use canopy_e2e::draft::{DFlash, DraftRequest, Drafter};

use crate::drafter_golden::{Golden, golden, random_pair};

const SETS: [&str; 2] = ["dflash-random-old", "dflash-random-new"];

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    values.into_iter().map(f32::to_bits).collect()
}

/// The stored tap outputs of all four rounds, `[n, taps * hidden]`.
fn all_features(golden: &Golden) -> Tensor {
    let rounds: Vec<Tensor> = (0..4)
        .map(|r| golden[&format!("r{r}_tap_hidden")].transpose(0, 1).expect("t").contiguous().expect("copy"))
        .collect();
    Tensor::cat(&rounds, 0).and_then(|t| t.flatten_from(1)).expect("features")
}

fn rows(features: &Tensor, first: usize, count: usize) -> Tensor {
    features.narrow(0, first, count).expect("rows")
}

fn draft_one(drafter: &mut DFlash, slot: usize, root: u32) -> Vec<u32> {
    let horizon = drafter.block_size() - 1;
    bits(&drafter.draft(&[DraftRequest { slot, root, horizon }]).expect("draft")[0])
}

#[test]
fn a_streams_bits_do_not_depend_on_the_others() {
    for set in SETS {
        let features = all_features(&golden(&format!("{set}/reference.safetensors")));
        let (_, mut alone) = random_pair(set, 3);
        let (_, mut together) = random_pair(set, 3);
        let streams = [(2usize, 1usize, 9usize, 17u32), (0, 0, 14, 301), (1, 5, 3, 44)];
        let mut want = Vec::new();
        for (_, first, count, root) in streams {
            // One row at a time, and slot 1 of its own drafter.
            for row in 0..count {
                alone.extend(1, &rows(&features, first + row, 1)).expect("extend");
            }
            want.push(draft_one(&mut alone, 1, root));
            alone.reset(1).expect("reset");
        }
        let packed: Vec<Tensor> = streams.iter().map(|s| rows(&features, s.1, s.2)).collect();
        let counts: Vec<(usize, usize)> = streams.iter().map(|s| (s.0, s.2)).collect();
        together.extend_packed(&counts, &Tensor::cat(&packed, 0).expect("cat")).expect("extend");
        let horizons = [7, 3, 1];
        let requests: Vec<DraftRequest> = streams
            .iter()
            .zip(horizons)
            .map(|(&(slot, _, _, root), horizon)| DraftRequest { slot, root, horizon })
            .collect();
        let drafts = together.draft(&requests).expect("draft");
        for (((draft, horizon), want), stream) in drafts.iter().zip(horizons).zip(&want).zip(streams) {
            assert_eq!(draft.dims(), [horizon, 512], "{set}");
            assert_eq!(bits(draft), want[..horizon * 512], "{set}, slot {}", stream.0);
        }
    }
}

// The plain draft skips the last layer's unwanted rows.
#[test]
fn an_observed_draft_is_the_same_draft() {
    for set in SETS {
        let features = all_features(&golden(&format!("{set}/reference.safetensors")));
        let (_, mut drafter) = random_pair(set, 2);
        drafter.extend(0, &rows(&features, 0, 9)).expect("extend");
        drafter.extend(1, &rows(&features, 4, 13)).expect("extend");
        for horizons in [[7, 7], [1, 4], [0, 2], [3, 0]] {
            let requests = [0, 1].map(|slot| DraftRequest { slot, root: 77, horizon: horizons[slot] });
            let plain = drafter.draft(&requests).expect("draft");
            let mut seen = 0;
            let observed = drafter.draft_observed(&requests, &mut |_, rows| {
                assert_eq!(rows.dims(), [16, 64]);
                seen += 1;
            });
            assert_eq!(seen, 3);
            for ((a, b), horizon) in plain.iter().zip(&observed.expect("draft")).zip(horizons) {
                assert_eq!(a.dims(), [horizon, 512]);
                assert_eq!(bits(a), bits(b), "{set}, horizons {horizons:?}");
            }
        }
    }
}

#[test]
fn a_draft_leaves_the_context_as_it_was() {
    for set in SETS {
        let features = all_features(&golden(&format!("{set}/reference.safetensors")));
        let (_, mut drafter) = random_pair(set, 1);
        drafter.extend(0, &rows(&features, 0, 6)).expect("extend");
        let first = draft_one(&mut drafter, 0, 7);
        draft_one(&mut drafter, 0, 400);
        assert_eq!(drafter.context_len(0), 6);
        assert_eq!(draft_one(&mut drafter, 0, 7), first, "{set}");
        drafter.extend(0, &rows(&features, 6, 2)).expect("extend");
        let (_, mut fresh) = random_pair(set, 1);
        fresh.extend(0, &rows(&features, 0, 8)).expect("extend");
        assert_eq!(draft_one(&mut drafter, 0, 9), draft_one(&mut fresh, 0, 9), "{set}");
    }
}

#[test]
fn snapshot_restore_and_reset_are_exact() {
    for set in SETS {
        let features = all_features(&golden(&format!("{set}/reference.safetensors")));
        let (_, mut drafter) = random_pair(set, 2);
        drafter.extend(0, &rows(&features, 0, 6)).expect("extend");
        let want = draft_one(&mut drafter, 0, 7);
        let saved = drafter.snapshot(0).expect("snapshot");
        drafter.extend(0, &rows(&features, 6, 5)).expect("extend");
        drafter.extend(1, &rows(&features, 3, 8)).expect("extend");
        for slot in [0, 1] {
            drafter.restore(slot, &saved).expect("restore");
            assert_eq!(drafter.context_len(slot), 6);
            assert_eq!(draft_one(&mut drafter, slot, 7), want, "{set}, slot {slot}");
        }
        drafter.reset(0).expect("reset");
        assert_eq!(drafter.context_len(0), 0);
        let empty = drafter.snapshot(0).expect("an empty snapshot");
        draft_one(&mut drafter, 0, 7);
        drafter.restore(1, &empty).expect("restore");
        drafter.extend(1, &rows(&features, 0, 6)).expect("extend");
        assert_eq!(draft_one(&mut drafter, 1, 7), want, "{set}");
    }
}

#[test]
fn wrong_arguments_are_named() {
    let (_, mut drafter) = random_pair("dflash-random-old", 2);
    let features = all_features(&golden("dflash-random-old/reference.safetensors"));
    let narrow = features.narrow(1, 0, 64).expect("columns");
    let text = |result: canopy_e2e::Result<()>| result.expect_err("refused").to_string();
    assert_eq!(text(drafter.extend(0, &narrow)), "drafter: features, expected: [25, 192], got: [25, 64]");
    assert_eq!(text(drafter.extend(2, &features)), "slot: expected below the drafter's 2 slots, got 2");
    let packed = drafter.extend_packed(&[(0, 3)], &features);
    assert_eq!(text(packed), "drafter: rows of features, expected: [3], got: [25]");
    let request = DraftRequest { slot: 0, root: 1, horizon: 7 };
    for (requests, want) in [
        (vec![DraftRequest { horizon: 8, ..request }], "horizon: expected at most block_size - 1 = 7, got 8"),
        (vec![DraftRequest { slot: 5, ..request }], "slot: expected below the drafter's 2 slots, got 5"),
        (vec![request, request], "slot: expected distinct slots, got slot 0 twice"),
        (
            vec![DraftRequest { root: 512, ..request }],
            "tokens: expected token ids below the vocabulary's 512, got 512",
        ),
    ] {
        assert_eq!(drafter.draft(&requests).expect_err("refused").to_string(), want);
    }
    assert!(drafter.draft(&[]).expect("nothing asked").is_empty());
    let none = drafter.draft(&[DraftRequest { horizon: 0, ..request }]).expect("no rows");
    assert_eq!(none[0].dims(), [0, 512]);
}
