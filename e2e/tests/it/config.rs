//! Target configurations: every published dense size, where keys may live, and errors that name the key.

use canopy_e2e::config::{LayerKind, TargetConfig};
use serde_json::{Value, json};

/// `text_config` of the 9B, as published.
fn text_9b() -> Value {
    let interval = ["linear_attention", "linear_attention", "linear_attention", "full_attention"];
    json!({
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "full_attention_interval": 4, "layer_types": interval.repeat(8),
        "hidden_act": "silu", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "attn_output_gate": true, "attention_bias": false, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": true, "rope_type": "default"
        },
        "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "tie_word_embeddings": false,
        "eos_token_id": 248044, "bos_token_id": null, "pad_token_id": null, "mtp_num_hidden_layers": 1,
        "mlp_only_layers": [], "dtype": "bfloat16", "initializer_range": 0.02, "use_cache": true
    })
}

fn outer(text: Value) -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
        "tie_word_embeddings": false, "text_config": text, "vision_config": {"depth": 27, "hidden_size": 1152}
    })
}

fn parse(value: &Value) -> canopy_e2e::Result<TargetConfig> {
    TargetConfig::from_json("config.json", value.to_string().as_bytes())
}

fn error(value: &Value) -> String {
    parse(value).unwrap_err().to_string()
}

#[test]
fn the_9b_under_text_config() {
    let config = parse(&outer(text_9b())).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.intermediate_size), (248320, 4096, 12288));
    assert_eq!((config.attn.q_heads, config.attn.kv_heads, config.attn.head_dim), (16, 4, 256));
    assert_eq!((config.gdn.k_heads, config.gdn.v_heads, config.gdn.dk, config.gdn.dv), (16, 32, 128, 128));
    assert_eq!(config.layers.len(), 32);
    for (layer, kind) in config.layers.iter().enumerate() {
        assert_eq!(*kind == LayerKind::Attention, layer % 4 == 3);
    }
    assert_eq!((config.rope_theta, config.rotary_dim), (1e7, 64));
    assert_eq!(config.inv_freq().len(), 32);
    assert!(!config.tie_word_embeddings && config.attn_output_gate);
    assert_eq!(config.eos_token_ids, [248044]);
    assert_eq!(config.kv_row_len() * 2, 32768);
}

/// hidden, intermediate, layers, query heads, KV heads, GDN value heads, tied; 16 GDN key heads always.
#[test]
fn every_dense_size() {
    let sizes = [
        (1024, 3584, 24, 8, 2, 16, true),
        (2048, 6144, 24, 8, 2, 16, true),
        (2560, 9216, 32, 16, 4, 32, true),
        (4096, 12288, 32, 16, 4, 32, false),
        (5120, 17408, 64, 24, 4, 48, false),
    ];
    for (hidden, intermediate, layers, q, kv, v, tied) in sizes {
        let mut text = text_9b();
        text["hidden_size"] = hidden.into();
        text["intermediate_size"] = intermediate.into();
        text["num_hidden_layers"] = layers.into();
        text["num_attention_heads"] = q.into();
        text["num_key_value_heads"] = kv.into();
        text["linear_num_value_heads"] = v.into();
        text["tie_word_embeddings"] = tied.into();
        text.as_object_mut().unwrap().remove("layer_types");
        let config = parse(&outer(text)).unwrap();
        assert_eq!((config.layers.len(), config.tie_word_embeddings, config.gdn.v_heads), (layers, tied, v));
        assert_eq!(config.layers.iter().filter(|&&kind| kind == LayerKind::Attention).count(), layers / 4);
    }
}

#[test]
fn keys_may_live_elsewhere() {
    let flat = parse(&text_9b()).unwrap();
    assert_eq!(flat, parse(&outer(text_9b())).unwrap());

    let mut text = text_9b();
    text["rope_parameters"] = Value::Null;
    text["rope_theta"] = 5e5.into();
    let top_level = parse(&text).unwrap();
    assert_eq!((top_level.rope_theta, top_level.rotary_dim), (5e5, 64));

    let mut text = text_9b();
    text.as_object_mut().unwrap().remove("tie_word_embeddings");
    let mut config = outer(text);
    config["tie_word_embeddings"] = true.into();
    config["eos_token_id"] = json!([248046, 248044]);
    let config = parse(&config).unwrap();
    assert!(config.tie_word_embeddings);
    assert_eq!(config.eos_token_ids, [248044, 248046]);

    let mut text = text_9b();
    text.as_object_mut().unwrap().remove("head_dim");
    assert_eq!(parse(&text).unwrap().attn.head_dim, 256);
    text["eos_token_id"] = Value::Null;
    assert!(parse(&text).unwrap().eos_token_ids.is_empty());
}

#[test]
fn errors_name_the_key() {
    let required = [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "max_position_embeddings",
    ];
    for key in required {
        let mut config = outer(text_9b());
        config.as_object_mut().unwrap().remove("model_type");
        config["text_config"].as_object_mut().unwrap().remove(key);
        assert_eq!(error(&config), format!("config.json: text_config.{key}: expected a value, got none"));
        config["text_config"][key] = json!({});
        assert!(error(&config).starts_with(&format!("config.json: text_config.{key}: expected ")));
    }
    let wrong = [
        ("num_hidden_layers", json!(31), "layer_types: expected num_hidden_layers = 31 entries, got 32"),
        ("layer_types", json!(["sliding_attention"]), "layer_types: expected num_hidden_layers = 32 entries"),
        (
            "num_key_value_heads",
            json!(3),
            "num_attention_heads: expected a multiple of num_key_value_heads = 3",
        ),
        (
            "linear_num_key_heads",
            json!(5),
            "linear_num_value_heads: expected a multiple of linear_num_key_heads",
        ),
        ("hidden_size", json!(-1), "hidden_size: expected a non-negative integer, got -1"),
        ("vocab_size", json!(0), "vocab_size: expected at least 1, got 0"),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps: expected between 0 and 1, got 0"),
        ("hidden_act", json!("gelu"), "hidden_act: expected silu, got gelu"),
        ("attention_bias", json!(true), "attention_bias: expected false, got true"),
        ("linear_conv_kernel_dim", json!(3), "linear_conv_kernel_dim: expected 4, got 3"),
        ("num_experts", json!(256), "num_experts: expected a dense model, got 256 experts"),
        ("model_type", json!("qwen3"), "model_type: expected qwen3_5 or qwen3_5_text"),
        ("eos_token_id", json!("</s>"), "eos_token_id: expected a token id or a list of token ids"),
        (
            "rope_parameters",
            json!({"rope_type": "yarn"}),
            "rope_parameters.rope_type: expected default, got yarn",
        ),
    ];
    for (key, value, message) in wrong {
        let mut text = text_9b();
        text[key] = value;
        let error = error(&text);
        assert!(error.starts_with(&format!("config.json: {message}")), "{error}");
    }
    let mut text = text_9b();
    text["layer_types"][7] = "sliding_attention".into();
    assert!(error(&text).contains("layer_types: expected linear_attention or full_attention, got sliding"));
    for key in ["layer_types", "full_attention_interval"] {
        text.as_object_mut().unwrap().remove(key);
    }
    assert!(
        error(&text).contains("layer_types: expected layer_types or full_attention_interval, got neither")
    );
    let mut text = text_9b();
    text["rope_parameters"] = json!({"partial_rotary_factor": 0.25});
    assert!(error(&text).contains("rope_parameters.rope_theta: expected a value, got none"));
    text["rope_parameters"] = json!({"rope_theta": 1e7, "partial_rotary_factor": 0.001});
    assert!(
        error(&text).contains("rope_parameters.partial_rotary_factor: expected an even share of head_dim")
    );
    assert!(error(&json!([])).contains("(whole file): expected an object"));
    let json = TargetConfig::from_json("config.json", b"{").unwrap_err().to_string();
    assert!(json.starts_with("config.json: (whole file): expected JSON"), "{json}");
}
