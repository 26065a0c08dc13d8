//! The ops in a model of candle-transformers: its Qwen3, rebuilt from the ops here, verifies a whole draft tree at once.
//! The reference knows no trees, so it runs every node's path as a sequence of its own; what is compared shares no code.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3::{Config, Model};
use canopy_candle::{
    AcceptedPaths, AttnDims, DevicePaths, DraftTree, NormKind, PackedLinear, QkNormRope, TreeBatch,
    add_rms_norm, kv_append, kv_compact, qk_norm_rope, rms_norm, swiglu, tree_attention,
};

use crate::support::{Rng, f32s, f64s, max_abs, on_cpu};

const LAYERS: usize = 3;
const HIDDEN: usize = 24;
const MLP: usize = 40;
const VOCAB: usize = 50;
const CAPACITY: usize = 40;

fn attn() -> AttnDims {
    AttnDims::new(4, 2, 8).expect("2 divides 4")
}

fn config() -> Config {
    Config {
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: MLP,
        num_hidden_layers: LAYERS,
        num_attention_heads: attn().q_heads,
        head_dim: attn().head_dim,
        attention_bias: false,
        num_key_value_heads: attn().kv_heads,
        max_position_embeddings: CAPACITY,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: true,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    }
}

/// Random weights under the names of the checkpoints.
fn weights() -> Result<HashMap<String, Tensor>> {
    let (mut rng, dims) = (Rng(50), attn());
    let mut weights = HashMap::new();
    let norm = |rng: &mut Rng, width: usize| rng.tensor(&[width]).affine(0.3, 1.0);
    weights.insert("model.embed_tokens.weight".to_string(), rng.tensor(&[VOCAB, HIDDEN]));
    weights.insert("model.norm.weight".to_string(), norm(&mut rng, HIDDEN)?);
    for layer in 0..LAYERS {
        let mut add =
            |name: &str, tensor| weights.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        add("input_layernorm", norm(&mut rng, HIDDEN)?);
        add("post_attention_layernorm", norm(&mut rng, HIDDEN)?);
        add("self_attn.q_norm", norm(&mut rng, dims.head_dim)?);
        add("self_attn.k_norm", norm(&mut rng, dims.head_dim)?);
        for (name, out, inputs) in [
            ("self_attn.q_proj", dims.q_width(), HIDDEN),
            ("self_attn.k_proj", dims.kv_width(), HIDDEN),
            ("self_attn.v_proj", dims.kv_width(), HIDDEN),
            ("self_attn.o_proj", HIDDEN, dims.q_width()),
            ("mlp.gate_proj", MLP, HIDDEN),
            ("mlp.up_proj", MLP, HIDDEN),
            ("mlp.down_proj", HIDDEN, MLP),
        ] {
            add(name, rng.tensor(&[out, inputs]).affine((inputs as f64).powf(-0.5) * 1.7, 0.0)?);
        }
    }
    Ok(weights)
}

struct Layer {
    norms: [Tensor; 2],
    qkv: PackedLinear,
    rope: QkNormRope,
    o: PackedLinear,
    gate_up: PackedLinear,
    down: PackedLinear,
    k_cache: Tensor,
    v_cache: Tensor,
}

/// Qwen3 from the ops; one sequence on slot 0.
struct Ours {
    embed: PackedLinear,
    norm: Tensor,
    layers: Vec<Layer>,
    committed: usize,
}

impl Ours {
    fn new(weights: &HashMap<String, Tensor>) -> Result<Self> {
        let layer = |layer: usize| {
            let get = |name: &str| weights[&format!("model.layers.{layer}.{name}.weight")].clone();
            let packed = |names: &[&str]| {
                let parts = names.iter().map(|name| get(name)).collect::<Vec<_>>();
                PackedLinear::new(&parts.iter().collect::<Vec<_>>(), &Device::Cpu)
            };
            let inv_freq: Vec<_> = (0..4).map(|i| 10_000f32.powf(-(2 * i) as f32 / 8.0)).collect();
            let cache =
                || Tensor::zeros((1, CAPACITY, attn().kv_heads, attn().head_dim), DType::F32, &Device::Cpu);
            Ok(Layer {
                norms: [get("input_layernorm"), get("post_attention_layernorm")],
                qkv: packed(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?,
                rope: QkNormRope {
                    dims: attn(),
                    gated: false,
                    q_norm: get("self_attn.q_norm"),
                    k_norm: get("self_attn.k_norm"),
                    eps: 1e-6,
                    kind: NormKind::Plain,
                    inv_freq: Tensor::new(inv_freq, &Device::Cpu)?,
                },
                o: packed(&["self_attn.o_proj"])?,
                gate_up: packed(&["mlp.gate_proj", "mlp.up_proj"])?,
                down: packed(&["mlp.down_proj"])?,
                k_cache: cache()?,
                v_cache: cache()?,
            })
        };
        Ok(Self {
            embed: PackedLinear::new(&[&weights["model.embed_tokens.weight"]], &Device::Cpu)?,
            norm: weights["model.norm.weight"].clone(),
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            committed: 0,
        })
    }

    /// Every node's final hidden row; the keys and values stay behind the committed ones.
    fn verify(&self, tree: &DraftTree, tokens: &[u32]) -> Result<Tensor> {
        let (nodes, start) = (tree.len() as i32, self.committed as i32);
        let positions = tree.depths().iter().map(|&depth| start + depth as i32).collect::<Vec<_>>();
        let tree = on_cpu(TreeBatch::single(tree.clone(), 0));
        let mut x = self.embed.lookup(tokens)?;
        for layer in &self.layers {
            let normed = rms_norm(&x, &layer.norms[0], 1e-6, NormKind::Plain)?;
            let qkv = layer.qkv.forward(&normed)?;
            let (q, k) = qk_norm_rope(&layer.rope, &qkv[0], &qkv[1], &positions)?;
            let v = qkv[2].reshape((nodes as usize, attn().kv_heads, attn().head_dim))?;
            kv_append(&layer.k_cache, &k, &[0, nodes], &[0], &[start])?;
            kv_append(&layer.v_cache, &v, &[0, nodes], &[0], &[start])?;
            let out = tree_attention(&tree, attn(), &[start], &q, &layer.k_cache, &layer.v_cache)?;
            let out = layer.o.forward_one(&out.flatten_from(1)?)?;
            let (sum, normed) = add_rms_norm(&out, &x, &layer.norms[1], 1e-6, NormKind::Plain)?;
            let gate_up = layer.gate_up.forward(&normed)?;
            x = (sum + layer.down.forward_one(&swiglu(&gate_up[0], &gate_up[1])?)?)?;
        }
        rms_norm(&x, &self.norm, 1e-6, NormKind::Plain)
    }

    fn commit(&mut self, tree: &DraftTree, path: &[usize]) -> Result<()> {
        let batch = TreeBatch::single(tree.clone(), 0);
        let paths = AcceptedPaths::new(&batch, &[path.to_vec()]).expect("a path");
        let paths = DevicePaths::new(paths, &Device::Cpu)?;
        for layer in &self.layers {
            kv_compact(&layer.k_cache, &paths, &[self.committed as i32])?;
            kv_compact(&layer.v_cache, &paths, &[self.committed as i32])?;
        }
        self.committed += path.len();
        Ok(())
    }
}

#[test]
fn a_tree_verified_at_once_equals_candles_qwen3_on_every_path() -> Result<()> {
    let weights = weights()?;
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
    let mut ours = Ours::new(&weights)?;
    let mut sequence: Vec<u32> = Vec::new();
    let rounds = [
        (DraftTree::chain(7), vec![0, 1, 2, 3, 4, 5, 6]),
        (DraftTree::new(vec![-1, 0, 0, 1, 1, 2, 5, 4]), vec![0, 2, 5, 6]),
        (DraftTree::random(12, 9), vec![0]),
        (DraftTree::new(vec![-1, 0, 0, 0, 3]), vec![0, 3, 4]),
    ];
    for (round, (tree, path)) in rounds.into_iter().enumerate() {
        let tree = tree.expect("a tree");
        let tokens =
            (0..tree.len()).map(|node| ((17 * round + 5 * node + 3) % VOCAB) as u32).collect::<Vec<_>>();
        let rows = ours.verify(&tree, &tokens)?;
        for node in 0..tree.len() {
            let mut alone = sequence.clone();
            alone.extend(tree.path(node).iter().map(|&node| tokens[node]));
            let last = alone.len() - 1;
            let expected = Model::new(&config(), vb.clone())?
                .forward(&Tensor::new(alone, &Device::Cpu)?.unsqueeze(0)?, 0)?;
            let expected = f64s(&expected.get(0)?.get(last)?);
            let error = max_abs(&f32s(&rows.get(node)?), &expected);
            assert!(error < 1e-5, "round {round}, node {node}: {error}");
        }
        ours.commit(&tree, &path)?;
        sequence.extend(path.iter().map(|&node| tokens[node]));
    }
    assert_eq!(sequence.len(), ours.committed);
    Ok(())
}
