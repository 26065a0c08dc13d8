use anyhow::{Result, ensure};
use candle_core::{DType, Device};
use canopy_candle::{
    DeviceSequences, DeviceTree, DraftTree, GateInputs, Sequences, TreeBatch, chain_conv, chain_conv_gates,
    gates, tree_conv_gates, tree_conv_to,
};

use crate::{Check, bits, random};

pub const TESTS: &[(&str, Check)] = &[("conv::gates_in_its_launch_have_the_bits_of_their_own", with_gates)];

fn with_gates(device: &Device) -> Result<()> {
    let (rows, channels, heads) = (23, 520, 32);
    let trees = vec![DraftTree::bole(20, 1)?, DraftTree::chain(3)?];
    let tree = DeviceTree::new(TreeBatch::new(trees, vec![1, 0])?, device)?;
    let chains = DeviceSequences::new(Sequences::new(&[20, 3], vec![1, 0])?, device)?;
    for (from, to) in [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)] {
        let make = |seed, shape: &[usize]| random(device, seed, shape)?.to_dtype(from);
        let (x, weight) = (make(1, &[rows, channels])?, make(2, &[channels, 4])?);
        let (state, ab) = (make(3, &[2, 3, channels])?, make(4, &[rows, 2 * heads])?);
        let (a_log, dt_bias) = (random(device, 5, &[heads])?, random(device, 6, &[heads])?);
        let inputs = GateInputs { ab: &ab, a_log: &a_log, dt_bias: &dt_bias };
        let want_gates = bits(&gates(&ab, &a_log, &dt_bias)?)?;
        let pairs = [
            (
                tree_conv_gates(&tree, &x, &weight, &state, inputs, to)?,
                tree_conv_to(&tree, &x, &weight, &state, to)?,
            ),
            (
                chain_conv_gates(&chains, &x, &weight, &state, inputs, to)?,
                chain_conv(&chains, &x, &weight, &state, to)?,
            ),
        ];
        for ((got, got_gates), want) in pairs {
            ensure!(got.dtype() == to && bits(&got)? == bits(&want)?, "{from:?} to {to:?}: rows");
            ensure!(bits(&got_gates)? == want_gates, "{from:?} to {to:?}: gates");
        }
    }
    Ok(())
}
