//! The drafter's config: every key in every place it may stand, both generations, the causal rule, and an error that
//! names the key for each one that is missing or contradicts.

use canopy_candle::BlockMask;
use canopy_e2e::config::draft::default_taps;
use canopy_e2e::config::{DraftConfig, TargetConfig};
use serde_json::{Value, json};

use crate::drafter_golden::golden_dir;

fn file(set: &str) -> Value {
    let json = std::fs::read(golden_dir(set).join("config.json")).expect("config");
    serde_json::from_slice(&json).expect("JSON")
}

fn target() -> TargetConfig {
    let json = std::fs::read(golden_dir("qwen35-random").join("config.json")).expect("config");
    TargetConfig::from_json("target", &json).expect("target")
}

fn parse(value: &Value) -> canopy_e2e::Result<DraftConfig> {
    DraftConfig::from_json("config.json", value.to_string().as_bytes(), &target())
}

#[track_caller]
fn ok(value: &Value) -> DraftConfig {
    parse(value).expect("a valid config")
}

#[track_caller]
fn refused(value: &Value, want: &str) {
    let error = parse(value).expect_err("refused").to_string();
    assert!(error.starts_with("config.json: ") && error.contains(want), "{error}\nexpected: {want}");
}

fn with(base: &Value, changes: &[(&str, Value)]) -> Value {
    let mut value = base.clone();
    for (pointer, new) in changes {
        let (place, key) = pointer.rsplit_once('/').expect("a pointer");
        let place = value.pointer_mut(place).and_then(Value::as_object_mut).expect("an object");
        place.insert(key.to_string(), new.clone());
    }
    value
}

fn without(base: &Value, pointer: &str) -> Value {
    let mut value = base.clone();
    let (place, key) = pointer.rsplit_once('/').expect("a pointer");
    let place = value.pointer_mut(place).and_then(Value::as_object_mut).expect("an object");
    place.remove(key).expect("the key was there");
    value
}

fn masks(config: &DraftConfig) -> Vec<(Option<usize>, bool)> {
    config.layers.iter().map(|&BlockMask { window, causal }| (window, causal)).collect()
}

#[test]
fn both_generations() {
    let old = ok(&file("dflash-random-old"));
    assert_eq!((old.block_size, old.mask_token, old.rope_theta), (8, 500, 1e7));
    assert_eq!(old.taps, [1, 4, 6]);
    assert_eq!(masks(&old), [(None, false); 3]);
    let new = ok(&file("dflash-random-new"));
    assert_eq!((new.block_size, new.mask_token, new.rope_theta), (8, 500, 1e7));
    assert_eq!(new.taps, [0, 2, 5, 6]);
    assert_eq!(masks(&new), [(Some(12), true), (Some(12), true), (None, false)]);
    assert_eq!((new.attn.q_heads, new.attn.kv_heads, new.attn.head_dim), (4, 1, 24));
}

#[test]
fn keys_count_wherever_they_stand() {
    for (set, theta) in
        [("dflash-random-old", "/rope_theta"), ("dflash-random-new", "/rope_parameters/rope_theta")]
    {
        let base = file(set);
        let want = ok(&base);
        let block = if set.ends_with("old") { "/block_size" } else { "/dflash_config/block_size" };
        let moved = [
            (block, "block_size"),
            ("/dflash_config/mask_token_id", "mask_token_id"),
            ("/dflash_config/target_layer_ids", "target_layer_ids"),
            (theta, "rope_theta"),
        ];
        for (from, key) in moved {
            let bare = without(&base, from);
            let value = base.pointer(from).expect("the key").clone();
            for place in ["", "/dflash_config"] {
                let placed = with(&bare, &[(&format!("{place}/{key}"), value.clone())]);
                assert_eq!(ok(&placed), want, "{set}: {key} in {place:?}");
            }
        }
    }
}

#[test]
fn missing_keys_are_named() {
    for (set, pointers) in [
        ("dflash-random-old", &["/block_size", "/rope_theta", "/dflash_config/mask_token_id"][..]),
        (
            "dflash-random-new",
            &[
                "/architectures",
                "/dflash_config/block_size",
                "/rope_parameters/rope_theta",
                "/hidden_size",
                "/vocab_size",
                "/intermediate_size",
                "/num_hidden_layers",
                "/num_attention_heads",
                "/num_key_value_heads",
                "/head_dim",
                "/rms_norm_eps",
                "/sliding_window",
            ],
        ),
    ] {
        for pointer in pointers {
            let key = pointer.rsplit('/').next().expect("a key");
            refused(&without(&file(set), pointer), &format!("{key}: expected"));
        }
    }
    let untyped = without(&without(&file("dflash-random-new"), "/layer_types"), "/use_sliding_window");
    refused(&untyped, "layer_types: expected layer_types or use_sliding_window, got neither");
}

#[test]
fn taps_alone_have_a_default_rule() {
    assert_eq!(default_taps(32, 5), [1, 8, 15, 22, 29]);
    assert_eq!(default_taps(32, 8), [1, 5, 9, 13, 17, 21, 25, 29]);
    assert_eq!(default_taps(64, 5), [1, 16, 31, 46, 61]);
    assert_eq!(default_taps(32, 1), [16]);
    let config = ok(&without(&file("dflash-random-old"), "/dflash_config/target_layer_ids"));
    assert_eq!(config.taps, [1, 3, 5]);
}

#[test]
fn causal_rule() {
    let base = file("dflash-random-new");
    let windows = |causal: [bool; 3]| [(Some(12), causal[0]), (Some(12), causal[1]), (None, causal[2])];
    for (changes, want) in [
        (vec![("/is_causal", json!(false))], [false; 3]),
        (vec![("/is_causal", json!(true))], [true; 3]),
        (vec![("/dflash_config/causal", json!(false))], [false; 3]),
        (vec![("/dflash_config/causal", json!(true))], [true; 3]),
        (vec![("/is_causal", json!(false)), ("/dflash_config/causal", json!(true))], [false; 3]),
        (vec![("/is_causal", Value::Null)], [true, true, false]),
    ] {
        assert_eq!(masks(&ok(&with(&base, &changes))), windows(want), "{changes:?}");
    }
}

#[test]
fn layer_kinds_without_layer_types() {
    let bare = without(&file("dflash-random-new"), "/layer_types");
    let first = with(&bare, &[("/max_window_layers", json!(1))]);
    assert_eq!(masks(&ok(&first)), [(None, false), (Some(12), true), (Some(12), true)]);
    let none = with(&bare, &[("/use_sliding_window", json!(false))]);
    assert_eq!(masks(&ok(&none)), [(None, false); 3]);
}

#[test]
fn contradictions_and_foreign_targets_are_refused() {
    let base = file("dflash-random-new");
    for (change, want) in [
        (("/block_size", json!(16)), "dflash_config.block_size: expected one value, got 16 and elsewhere 8"),
        (("/rope_theta", json!(1e4)), "rope_parameters.rope_theta: expected one value"),
        (("/hidden_size", json!(128)), "hidden_size: expected the target's 64, got 128"),
        (("/vocab_size", json!(500)), "vocab_size: expected the target's 512, got 500"),
        (("/num_target_layers", json!(32)), "num_target_layers: expected the target's 8, got 32"),
        (
            ("/dflash_config/mask_token_id", json!(512)),
            "mask_token_id: expected a token id below 512, got 512",
        ),
        (
            ("/dflash_config/target_layer_ids", json!([0, 8])),
            "target_layer_ids: expected layer ids below 8, got 8",
        ),
        (("/dflash_config/target_layer_ids", json!([2, 2])), "target_layer_ids: expected distinct layer ids"),
        (("/dflash_config/target_layer_ids", json!([])), "target_layer_ids: expected at least one layer id"),
        (("/dflash_config/block_size", json!(1)), "block_size: expected at least 2"),
        (
            ("/dflash_config/block_size", json!("8")),
            "dflash_config.block_size: expected a non-negative integer",
        ),
        (
            ("/num_key_value_heads", json!(3)),
            "num_attention_heads: expected a multiple of num_key_value_heads = 3",
        ),
        (
            ("/layer_types", json!(["full_attention"])),
            "layer_types: expected num_hidden_layers = 3 entries, got 1",
        ),
        (
            ("/layer_types", json!(["full_attention", "x", "x"])),
            "expected sliding_attention or full_attention, got x",
        ),
        (("/architectures", json!(["DFlash2DraftModel"])), "architectures: expected DFlashDraftModel"),
        (("/hidden_act", json!("gelu")), "hidden_act: expected silu, got gelu"),
        (("/attention_bias", json!(true)), "attention_bias: expected false, got true"),
        (
            ("/rope_scaling", json!({"rope_type": "yarn"})),
            "rope_scaling.rope_type: expected default, got yarn",
        ),
        (("/sliding_window", json!(0)), "sliding_window: expected at least 1, got 0"),
    ] {
        refused(&with(&base, std::slice::from_ref(&change)), want);
    }
    refused(&json!([1]), "(whole file): expected an object");
}
