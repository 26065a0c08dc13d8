//! The DFlash drafter against stored vectors: both random drafters over four drafts in a row, from the stored tap
//! outputs and from our own target's, and the embedded pair. Every comparison is of all values, with the bounds of
//! tests/golden/drafters-and-rounds.md.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use canopy_e2e::config::DraftConfig;
use canopy_e2e::draft::{DFlash, DraftOptions, DraftRequest, Drafter};
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, WeightDtype, load_target};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_e2e::tree::{BuildOptions, Marginals, ddtree_from};
use canopy_kernels::DraftTree;

pub type Golden = HashMap<String, Tensor>;

pub fn golden_dir(set: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(set)
}

pub fn golden(file: &str) -> Golden {
    candle_core::safetensors::load(golden_dir(file), &Device::Cpu).expect("golden file")
}

pub fn ids(golden: &Golden, name: &str) -> Vec<u32> {
    let ids =
        golden[name].to_dtype(DType::I64).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1::<i64>());
    ids.expect("integers").into_iter().map(|id| u32::try_from(id).expect("not negative")).collect()
}

/// The largest difference of two tensors of one shape; NaN anywhere is infinite.
pub fn max_diff(got: &Tensor, want: &Tensor) -> f32 {
    assert_eq!(got.dims(), want.dims());
    let flat = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    let diff = flat(got).into_iter().zip(flat(want)).map(|(a, b)| (a - b).abs());
    diff.fold(
        0.0,
        |worst, x| if x <= worst { worst } else { x.max(0.0) + if x.is_nan() { f32::INFINITY } else { 0.0 } },
    )
}

#[track_caller]
pub fn check(what: &str, got: &Tensor, want: &Tensor, bound: f32) {
    let diff = max_diff(got, want);
    assert!(diff <= bound, "{what}: largest difference {diff:e}, bound {bound:e}");
}

pub fn target_in(files: &ModelFiles, slots: usize) -> Qwen35 {
    load_target(files, &LoadOptions { slots, ..LoadOptions::default() }).expect("target")
}

pub fn drafter_in(files: &ModelFiles, target: &Qwen35, slots: usize) -> DFlash {
    let json = files.require("config.json").expect("config");
    let config = DraftConfig::from_json("config.json", &json, target.config()).expect("drafter config");
    let options =
        DraftOptions { slots, context_len: target.context_len(), device: Device::Cpu, graphs: true };
    let weights = files.weights(WeightDtype::Stored).expect("weights");
    DFlash::load(&weights, config, target.head(), options).expect("drafter")
}

/// The random target with one of its drafters.
pub fn random_pair(drafter: &str, slots: usize) -> (Qwen35, DFlash) {
    let mut target = target_in(&ModelFiles::Directory(golden_dir("qwen35-random")), slots);
    let drafter = drafter_in(&ModelFiles::Directory(golden_dir(drafter)), &target, slots);
    target.set_taps(drafter.taps()).expect("taps");
    (target, drafter)
}

/// Commits `tokens` to slot 0 of the target as a chain and returns their tap outputs.
pub fn read(target: &mut Qwen35, tokens: &[u32]) -> Tensor {
    let tree = DraftTree::chain(tokens.len()).expect("chain");
    let stream = VerifyStream { slot: 0, tokens: tokens.to_vec(), tree, logits: LogitRows::None };
    let features = target.verify(&[stream]).expect("verify").features.expect("taps are set");
    target.commit(&[(0..tokens.len()).collect()]).expect("commit");
    features
}

/// `[taps, n, hidden]` -> `[n, taps * hidden]`.
fn side_by_side(tap_hidden: &Tensor) -> Tensor {
    tap_hidden.transpose(0, 1).and_then(|t| t.contiguous()).and_then(|t| t.flatten_from(1)).expect("features")
}

/// Four drafts in a row; `features` gives the tap outputs of a round's context tokens. Bounds: features, block, cache.
fn four_drafts(set: &str, bounds: [f32; 3], mut features: impl FnMut(&mut Qwen35, &Golden, usize) -> Tensor) {
    let (mut target, mut drafter) = random_pair(set, 2);
    let golden = golden(&format!("{set}/reference.safetensors"));
    for round in 0..4 {
        let name = |part: &str| format!("r{round}_{part}");
        let features = features(&mut target, &golden, round);
        check(
            &format!("{set} features {round}"),
            &drafter.context_features(&features).expect("features"),
            &golden[&name("ctx_features")],
            bounds[0],
        );
        assert_eq!(ids(&golden, &name("ctx_positions"))[0] as usize, drafter.context_len(0));
        drafter.extend(0, &features).expect("extend");
        let (block, positions) = (ids(&golden, &name("block_ids")), ids(&golden, &name("positions")));
        assert_eq!(positions[0] as usize, drafter.context_len(0));
        assert_eq!(block.len(), drafter.block_size());
        assert!(block[1..].iter().all(|&id| id == drafter.config().mask_token));
        let request = DraftRequest { slot: 0, root: block[0], horizon: block.len() - 1 };
        let mut hidden = Vec::new();
        let logits =
            drafter.draft_observed(&[request], &mut |_, rows| hidden.push(rows.clone())).expect("draft");
        let hidden = Tensor::stack(&hidden, 0).expect("stack");
        check(&format!("{set} hidden {round}"), &hidden, &golden[&name("hidden")], bounds[1]);
        check(&format!("{set} logits {round}"), &logits[0], &golden[&name("logits")], bounds[1]);
    }
    for (layer, (keys, values)) in drafter.context_tensors(0).expect("context").iter().enumerate() {
        check(&format!("{set} keys {layer}"), keys, &golden[&format!("final_layer{layer}_k")], bounds[2]);
        check(&format!("{set} values {layer}"), values, &golden[&format!("final_layer{layer}_v")], bounds[2]);
    }
}

#[test]
fn random_drafters_from_given_tap_outputs() {
    for set in ["dflash-random-old", "dflash-random-new"] {
        four_drafts(set, [1e-5, 5e-5, 1e-5], |_, golden, round| {
            side_by_side(&golden[&format!("r{round}_tap_hidden")])
        });
    }
}

// Also pins what a tap is: the residual stream after layer id. Off by one moves the logits by more than 0.1.
#[test]
fn random_drafters_from_our_own_target() {
    for set in ["dflash-random-old", "dflash-random-new"] {
        four_drafts(set, [1e-3; 3], |target, golden, round| {
            let features = read(target, &ids(golden, &format!("r{round}_ctx_ids")));
            check("taps", &features, &side_by_side(&golden[&format!("r{round}_tap_hidden")]), 1e-3);
            features
        });
    }
}

/// Drafters of the embedded target: the one that the golden set was made with, and the one that ships, each with its
/// vectors.
fn tiny_drafters() -> [(ModelFiles, Golden); 2] {
    [
        (ModelFiles::Directory(golden_dir("dflash-tiny")), golden("canopy-tiny/golden.safetensors")),
        (canopy_e2e::embedded::drafter(), golden("canopy-tiny/shipped-draft.safetensors")),
    ]
}

fn tiny_request(files: &ModelFiles, golden: &Golden) -> (DFlash, DraftRequest) {
    let target = target_in(&canopy_e2e::embedded::target(), 1);
    let drafter = drafter_in(files, &target, 1);
    let anchor = ids(golden, "draft.anchor")[0] as usize;
    let root = ids(golden, "draft.ids")[anchor];
    let horizon = drafter.block_size() - 1;
    (drafter, DraftRequest { slot: 0, root, horizon })
}

fn check_tiny_draft(
    (files, golden): &(ModelFiles, Golden),
    drafter: &mut DFlash,
    request: DraftRequest,
    bound: f32,
) -> Tensor {
    let mut last = None;
    let logits = drafter.draft_observed(&[request], &mut |_, rows| last = Some(rows.clone())).expect("draft");
    let weights = files.weights(WeightDtype::F32).expect("weights");
    let norm = weights.f32("norm.weight", &[256], &Device::Cpu).expect("norm");
    let hidden = canopy_candle::rms_norm(&last.expect("layers"), &norm, 1e-6, canopy_candle::NormKind::Plain)
        .expect("norm");
    check("hidden", &hidden, &golden["draft.hidden"], bound);
    let want = golden["draft.logits"].narrow(0, 1, request.horizon).expect("rows");
    check("logits", &logits[0], &want, bound);
    logits[0].clone()
}

#[test]
fn tiny_drafters_and_their_trees() {
    for set in tiny_drafters() {
        let (mut drafter, request) = tiny_request(&set.0, &set.1);
        drafter.extend(0, &set.1["draft.features"]).expect("extend");
        let logits = check_tiny_draft(&set, &mut drafter, request, 2e-4);
        for budget in [16, 32] {
            let options = BuildOptions { budget, ..Default::default() };
            let marginals = Marginals::from_tensor(&logits, options).expect("marginals");
            let tree = ddtree_from(&marginals, request.root, options).expect("tree");
            let rows: Vec<u32> = (1..=budget)
                .flat_map(|node| {
                    [tree.tree().parents()[node] as u32, tree.tree().depths()[node], tree.tokens()[node]]
                })
                .collect();
            assert_eq!(rows, ids(&set.1, &format!("draft.tree{budget}")), "budget {budget}");
        }
    }
}

#[test]
fn tiny_drafters_from_our_own_target() {
    for set in tiny_drafters() {
        let (mut drafter, request) = tiny_request(&set.0, &set.1);
        let mut target = target_in(&canopy_e2e::embedded::target(), 1);
        target.set_taps(drafter.taps()).expect("taps");
        let tokens = &ids(&set.1, "draft.ids")[..set.1["draft.features"].dim(0).expect("rows")];
        let features = read(&mut target, tokens);
        check("taps", &features, &set.1["draft.features"], 1e-3);
        drafter.extend(0, &features).expect("extend");
        check_tiny_draft(&set, &mut drafter, request, 1e-3);
    }
}

// The block's first row is the root itself; a mask there is another draft.
#[test]
fn the_block_starts_with_the_root() {
    let [_, (files, golden)] = tiny_drafters();
    let (mut drafter, request) = tiny_request(&files, &golden);
    drafter.extend(0, &golden["draft.features"]).expect("extend");
    let with_root = drafter.draft(&[request]).expect("draft").remove(0);
    let masked = DraftRequest { root: drafter.config().mask_token, ..request };
    let with_mask = drafter.draft(&[masked]).expect("draft").remove(0);
    let want = golden["draft.logits"].narrow(0, 1, request.horizon).expect("rows");
    assert!(max_diff(&with_root, &want) < 2e-4);
    assert!(max_diff(&with_mask, &want) > 1.0);
}
