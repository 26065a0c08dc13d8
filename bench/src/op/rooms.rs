//! Per room: its inputs, its op, its outputs.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use canopy_candle::{
    AttnDims, BlockMask, DevicePaths, DeviceSequences, DeviceTree, DraftBlocks, GdnDims, Sequences,
    TreeBatch, Variant,
};

use super::file::Inputs;

/// Named tensors.
pub type Outputs = Vec<(&'static str, Tensor)>;

const QKV: &str = "[N, 2 Hk Dk + Hv Dv]";
const STATE: &str = "[slots, Hv, Dv, Dk]";
const CACHE: &str = "[slots, capacity, Hkv, D]";

/// What every form of the delta rule reads.
struct Rule {
    dims: GdnDims,
    qkv: Tensor,
    gates: Tensor,
    state: Tensor,
}

impl Rule {
    /// The head counts follow from the shapes; what comes before this has asked for the lists.
    fn read(inputs: &Inputs, rows: usize) -> Result<Self> {
        let qkv = inputs.float("qkv", QKV)?;
        let gates = inputs.float("gates", "[N, 2, Hv]")?;
        let state = inputs.float("state", STATE)?;
        inputs.finish()?;
        let (_, v_heads, dv, dk) = state.dims4()?;
        let (_, width) = qkv.dims2()?;
        let k_width =
            width.checked_sub(v_heads * dv).filter(|rest| dk > 0 && *rest > 0 && rest % (2 * dk) == 0);
        let Some(k_width) = k_width else {
            let expected = format!("[{rows}, 2 Hk {dk} + {}]", v_heads * dv);
            return Err(inputs.wrong("qkv", "F32, BF16 or F16", &expected, &qkv));
        };
        let dims = GdnDims::new(k_width / (2 * dk), v_heads, dk, dv).context("tensor `qkv`")?;
        Ok(Self { dims, qkv, gates, state })
    }
}

/// The inputs of the delta rule over trees.
pub struct Gdn {
    /// The trees and their slots.
    pub batch: TreeBatch,
    /// Accepted paths, where the file has some.
    pub paths: Option<DevicePaths>,
    /// Head counts and sizes.
    pub dims: GdnDims,
    /// Rows.
    pub qkv: Tensor,
    /// Log gates and write strengths.
    pub gates: Tensor,
    /// The pool.
    pub state: Tensor,
}

impl Gdn {
    /// All of a file's tensors.
    pub fn read(inputs: &Inputs) -> Result<Self> {
        let batch = inputs.batch()?;
        let paths = paths(inputs, &batch)?;
        let Rule { dims, qkv, gates, state } = Rule::read(inputs, batch.rows())?;
        Ok(Self { batch, paths, dims, qkv, gates, state })
    }
}

/// The inputs of the delta rule over long chains.
pub struct Prompts {
    /// The chains and their slots.
    pub sequences: Sequences,
    /// Head counts and sizes.
    pub dims: GdnDims,
    /// Rows.
    pub qkv: Tensor,
    /// Log gates and write strengths.
    pub gates: Tensor,
    /// The pool.
    pub state: Tensor,
}

impl Prompts {
    /// All of a file's tensors.
    pub fn read(inputs: &Inputs) -> Result<Self> {
        let sequences = inputs.sequences()?;
        let Rule { dims, qkv, gates, state } = Rule::read(inputs, sequences.rows())?;
        Ok(Self { sequences, dims, qkv, gates, state })
    }
}

fn paths(inputs: &Inputs, batch: &TreeBatch) -> Result<Option<DevicePaths>> {
    let paths = inputs.paths(batch)?;
    Ok(paths.map(|paths| DevicePaths::new(paths, inputs.device())).transpose()?)
}

pub fn tree_gdn(inputs: &Inputs, variant: Variant) -> Result<Outputs> {
    let Gdn { batch, paths, dims, qkv, gates, state } = Gdn::read(inputs)?;
    let tree = DeviceTree::new(batch, inputs.device())?;
    let verified = canopy_candle::tree_gdn_verify(&tree, dims, variant, &qkv, &gates, &state)?;
    let mut outputs = Vec::new();
    if let Some(paths) = paths {
        canopy_candle::tree_gdn_commit(&state, &paths, dims, variant, &verified, &qkv, &gates)?;
        outputs.push(("state", state));
    }
    outputs.extend([("o", verified.o), ("u", verified.u), ("g_cum", verified.g_cum)]);
    Ok(outputs)
}

pub fn tree_gdn_serial(inputs: &Inputs) -> Result<Outputs> {
    let Gdn { batch, paths, dims, qkv, gates, state } = Gdn::read(inputs)?;
    let tree = DeviceTree::new(batch, inputs.device())?;
    let verified = canopy_candle::tree_gdn_serial_verify(&tree, dims, &qkv, &gates, &state)?;
    let mut outputs = Vec::new();
    if let Some(paths) = paths {
        canopy_candle::tree_gdn_serial_commit(&state, &paths, dims, &verified)?;
        outputs.push(("state", state));
    }
    outputs.extend([("o", verified.o), ("snapshots", verified.snapshots)]);
    Ok(outputs)
}

pub fn gdn_prefill(inputs: &Inputs) -> Result<Outputs> {
    let Prompts { sequences, dims, qkv, gates, state } = Prompts::read(inputs)?;
    let sequences = DeviceSequences::new(sequences, inputs.device())?;
    let qkv = if inputs.device().is_cpu() { qkv } else { qkv.to_dtype(DType::BF16)? };
    let o = canopy_candle::gdn_prefill(&sequences, dims, &qkv, &gates, &state)?;
    Ok(vec![("state", state), ("o", o)])
}

pub fn tree_conv(inputs: &Inputs) -> Result<Outputs> {
    let batch = inputs.batch()?;
    let paths = paths(inputs, &batch)?;
    let x = inputs.float("x", "[N, C]")?;
    let weight = inputs.float("weight", "[C, 4]")?;
    let conv_state = inputs.float("conv_state", "[slots, 3, C]")?;
    inputs.finish()?;
    let tree = DeviceTree::new(batch, inputs.device())?;
    let mut outputs = vec![("out", canopy_candle::tree_conv(&tree, &x, &weight, &conv_state)?)];
    if let Some(paths) = paths {
        canopy_candle::tree_conv_commit(&conv_state, &paths, &x)?;
        outputs.push(("conv_state", conv_state));
    }
    Ok(outputs)
}

pub fn gates(inputs: &Inputs) -> Result<Outputs> {
    let ab = inputs.float("ab", "[N, 2, Hv]")?;
    let a_log = inputs.float("a_log", "[Hv]")?;
    let dt_bias = inputs.float("dt_bias", "[Hv]")?;
    inputs.finish()?;
    Ok(vec![("out", canopy_candle::gates(&ab, &a_log, &dt_bias)?)])
}

/// Head counts from the query's and the cache's shapes.
fn attn_dims(q: &Tensor, k_cache: &Tensor, room: &str) -> Result<AttnDims> {
    let ((_, q_heads, head_dim), (_, _, kv_heads, _)) = (q.dims3()?, k_cache.dims4()?);
    AttnDims::new(q_heads, kv_heads, head_dim).with_context(|| format!("{room}: tensors `q` and `k_cache`"))
}

/// A cache in the dtype that the device's kernels take.
fn cache(inputs: &Inputs, name: &'static str) -> Result<Tensor> {
    let cache = inputs.float(name, CACHE)?;
    Ok(if inputs.device().is_cpu() { cache } else { cache.to_dtype(DType::BF16)? })
}

pub fn tree_attention(inputs: &Inputs) -> Result<Outputs> {
    let batch = inputs.batch()?;
    let q = inputs.float("q", "[N, Hq, D]")?;
    let (k_cache, v_cache) = (cache(inputs, "k_cache")?, cache(inputs, "v_cache")?);
    let prefix_lens = inputs.ints("prefix_lens", "[B]")?;
    inputs.finish()?;
    let dims = attn_dims(&q, &k_cache, "tree_attention")?;
    let tree = DeviceTree::new(batch, inputs.device())?;
    let out = canopy_candle::tree_attention(&tree, dims, &prefix_lens, &q, &k_cache, &v_cache)?;
    Ok(vec![("out", out)])
}

pub fn block_attention(inputs: &Inputs) -> Result<Outputs> {
    let q = inputs.float("q", "[B block_size, Hq, D]")?;
    let (k_cache, v_cache) = (cache(inputs, "k_cache")?, cache(inputs, "v_cache")?);
    let slots = inputs.ints("slots", "[B]")?;
    let context_lens = inputs.ints("context_lens", "[B]")?;
    let window = inputs.optional_ints("window", "[1]")?;
    let causal = inputs.optional_ints("causal", "[1]")?;
    inputs.finish()?;
    let dims = attn_dims(&q, &k_cache, "block_attention")?;
    let (rows, blocks) = (q.dim(0)?, slots.len());
    if blocks == 0 || rows % blocks != 0 {
        let expected = format!("[{blocks} block_size, Hq, D]");
        return Err(inputs.wrong("q", "F32, BF16 or F16", &expected, &q));
    }
    let window = match window.as_deref() {
        None => None,
        Some(&[window]) if window > 0 => Some(window as usize),
        Some(got) => {
            anyhow::bail!("block_attention: tensor `window`, expected: one value above 0, got: {got:?}")
        }
    };
    let causal = match causal.as_deref() {
        None | Some([0]) => false,
        Some([1]) => true,
        Some(got) => anyhow::bail!("block_attention: tensor `causal`, expected: 0 or 1, got: {got:?}"),
    };
    let blocks = DraftBlocks { block_size: rows / blocks, slots, context_lens };
    let mask = BlockMask { window, causal };
    Ok(vec![("out", canopy_candle::block_attention(&blocks, mask, dims, &q, &k_cache, &v_cache)?)])
}

pub fn kv_compact(inputs: &Inputs) -> Result<Outputs> {
    let batch = inputs.batch()?;
    let Some(paths) = paths(inputs, &batch)? else {
        return Err(inputs.missing("paths", "I32", "[P]"));
    };
    let cache = match inputs.float("cache", CACHE) {
        Ok(cache) => cache,
        Err(error) => inputs.float("cache", "[slots, capacity, width]").map_err(|_| error)?,
    };
    let prefix_lens = inputs.ints("prefix_lens", "[B]")?;
    inputs.finish()?;
    let shape = cache.shape().clone();
    let pool = match *cache.dims() {
        [slots, capacity, width] => cache.reshape((slots, capacity, 1, width))?,
        _ => cache,
    };
    canopy_candle::kv_compact(&pool, &paths, &prefix_lens)?;
    Ok(vec![("cache", pool.reshape(shape)?)])
}
