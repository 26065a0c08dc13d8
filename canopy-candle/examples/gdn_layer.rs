//! A Gated DeltaNet layer over a draft tree in plain candle: project, convolve, gate, verify, accept, commit; then the
//! accepted nodes once more, one at a time. `cargo run --release -p canopy-candle --example gdn_layer`

use candle_core::{DType, Device, Error, Result, Tensor};
use canopy_candle::{
    AcceptedPaths, DevicePaths, DeviceTree, DraftTree, GdnDims, PackedLinear, TreeBatch, Variant,
    gated_rms_norm, gates, tree_conv, tree_conv_commit, tree_gdn_commit, tree_gdn_verify,
};

struct GdnLayer {
    dims: GdnDims,
    in_proj: PackedLinear, // qkv, z and (a, b): one input, one pass over the weights
    out_proj: PackedLinear,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
}

/// What one sequence keeps between rounds: pools of one slot.
struct States {
    conv_state: Tensor,
    state: Tensor,
}

impl GdnLayer {
    fn new(hidden: usize, dims: GdnDims, dev: &Device) -> Result<Self> {
        let random = |rows: usize, columns: usize| Tensor::randn(0f32, 0.2, (rows, columns), dev);
        let (qkv, values, heads) = (dims.qkv_width(), dims.v_heads * dims.dv, dims.v_heads);
        let (w_qkv, w_z, w_ab) = (random(qkv, hidden)?, random(values, hidden)?, random(2 * heads, hidden)?);
        Ok(Self {
            dims,
            in_proj: PackedLinear::new(&[&w_qkv, &w_z, &w_ab], dev)?,
            out_proj: PackedLinear::new(&[&random(hidden, values)?], dev)?,
            conv: random(qkv, 4)?,
            a_log: Tensor::zeros(heads, DType::F32, dev)?,
            dt_bias: Tensor::zeros(heads, DType::F32, dev)?,
            norm: Tensor::ones(dims.dv, DType::F32, dev)?,
        })
    }

    fn empty_states(&self, dev: &Device) -> Result<States> {
        let GdnDims { v_heads, dk, dv, .. } = self.dims;
        Ok(States {
            conv_state: Tensor::zeros((1, 3, self.dims.qkv_width()), DType::F32, dev)?,
            state: Tensor::zeros((1, v_heads, dv, dk), DType::F32, dev)?,
        })
    }

    /// Every node's output; then the states advance along the path that `accept` picks from the outputs.
    fn round(
        &self,
        states: &States,
        tree: DraftTree,
        x: &Tensor,
        accept: impl Fn(&Tensor) -> Result<Vec<usize>>,
    ) -> Result<Tensor> {
        let batch = TreeBatch::single(tree, 0);
        let tree = DeviceTree::new(batch.clone(), x.device())?;
        let projected = self.in_proj.forward(x)?;
        let [raw, z, ab] = projected.as_slice() else { unreachable!("three weights give three outputs") };
        let qkv = tree_conv(&tree, raw, &self.conv, &states.conv_state)?;
        let gates = gates(ab, &self.a_log, &self.dt_bias)?;
        let verified = tree_gdn_verify(&tree, self.dims, Variant::Walk, &qkv, &gates, &states.state)?;
        let out = self.out_proj.forward_one(&gated_rms_norm(&verified.o, z, &self.norm, 1e-6)?)?;
        let paths = AcceptedPaths::new(&batch, &[accept(&out)?]).map_err(Error::wrap)?;
        let paths = DevicePaths::new(paths, x.device())?;
        tree_gdn_commit(&states.state, &paths, self.dims, Variant::Walk, &verified, &qkv, &gates)?;
        tree_conv_commit(&states.conv_state, &paths, raw)?;
        Ok(out)
    }
}

/// Stands in for a model's acceptance: from the root down, always the child with the largest first output.
fn accept(tree: &DraftTree, out: &Tensor) -> Result<Vec<usize>> {
    let score = out.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
    let (children, mut path) = (tree.children(), vec![0]);
    while let Some(&best) =
        children[path[path.len() - 1]].iter().max_by(|&&a, &&b| score[a].total_cmp(&score[b]))
    {
        path.push(best);
    }
    Ok(path)
}

fn main() -> Result<()> {
    let (dev, hidden) = (Device::Cpu, 64);
    let layer = GdnLayer::new(hidden, GdnDims::new(2, 4, 32, 32).map_err(Error::wrap)?, &dev)?;
    let tree = DraftTree::new(vec![-1, 0, 0, 1, 1, 2, 2, 6]).map_err(Error::wrap)?;
    let x = Tensor::randn(0f32, 1., (tree.len(), hidden), &dev)?;

    let drafted = layer.empty_states(&dev)?;
    let out = layer.round(&drafted, tree.clone(), &x, |out| accept(&tree, out))?;
    let path = accept(&tree, &out)?;
    println!("draft tree {:?}, accepted path {path:?}: acceptance length {}", tree.parents(), path.len());

    let serial = layer.empty_states(&dev)?;
    for &node in &path {
        let root = DraftTree::chain(1).map_err(Error::wrap)?;
        let alone = layer.round(&serial, root, &x.narrow(0, node, 1)?, |_| Ok(vec![0]))?;
        let same = alone.to_vec2::<f32>()? == out.narrow(0, node, 1)?.to_vec2::<f32>()?;
        let word = if same { "the same bits" } else { "DIFFERENT" };
        println!("node {node} at depth {}: in the tree and decoded alone, {word}", tree.depths()[node]);
    }
    let (a, b) =
        (drafted.state.flatten_all()?.to_vec1::<f32>()?, serial.state.flatten_all()?.to_vec1::<f32>()?);
    println!("state after one round = state after {} steps: {}", path.len(), a == b);
    Ok(())
}
