//! tree_conv and gates against their float64 oracles.

use std::sync::Arc;

use canopy_kernels::cuda::{ChainsOnDevice, PathsOnDevice, TreeOnDevice};
use canopy_kernels::gates::launch::GateBuffers;
use canopy_kernels::gdn_prefill::Sequences;
use canopy_kernels::tree_conv::launch::ConvBuffers;
use canopy_kernels::{AcceptedPaths, ConvDims, DraftTree, TreeBatch, gates, tree_conv};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use crate::Check;
use crate::data::{Random, bits, compare, text};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_conv::verify_and_commit_equal_the_oracle", conv),
    ("tree_conv::long_chains_have_the_bits_of_trees", chains),
    ("tree_conv::gates_in_its_launch_have_the_bits_of_their_own", gates_in_conv),
    ("gates::forward_equals_the_oracle", gate_values),
];

fn conv(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = ConvDims::new(1024).map_err(text)?;
    // Siblings stand between parent and child in row order.
    let odd = DraftTree::new(vec![-1, 0, 0, 1, 2, 1, 3, 4, 6]).map_err(text)?;
    let trees = vec![odd, DraftTree::chain(1).map_err(text)?, DraftTree::bole(64, 4).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![2, 0, 1]).map_err(text)?;
    let mut random = Random::new(17);
    let (x, weight, state) =
        (random.normals(batch.rows() * 1024), random.normals(4 * 1024), random.normals(3 * dims.state_len()));
    let tree = TreeOnDevice::new(stream, &batch).map_err(text)?;
    let (dx, dw) = (stream.clone_htod(&x).map_err(text)?, stream.clone_htod(&weight).map_err(text)?);
    let mut ds = stream.clone_htod(&state).map_err(text)?;
    let mut out = stream.clone_htod(&vec![f32::NAN; x.len()]).map_err(text)?;
    tree_conv::launch::verify(stream, dims, &batch, &tree, buffers([&dx, &dw, &ds], &mut out))
        .map_err(text)?;
    let got = stream.clone_dtoh(&out).map_err(text)?;
    compare("conv", &got, &tree_conv::oracle::verify(dims, &batch, &x, &weight, &state))?;
    let mut narrow = stream.clone_htod(&vec![bf16::NAN; x.len()]).map_err(text)?;
    tree_conv::launch::verify(stream, dims, &batch, &tree, buffers([&dx, &dw, &ds], &mut narrow))
        .map_err(text)?;
    let narrow = stream.clone_dtoh(&narrow).map_err(text)?;
    if narrow.iter().zip(&got).any(|(&narrow, &wide)| narrow != bf16::from_f32(wide)) {
        return Err("rows written in bf16 are not the f32 rows rounded".into());
    }

    let paths = AcceptedPaths::new(&batch, &[vec![0, 1, 3, 6], vec![0], vec![]]).map_err(text)?;
    let on_device = PathsOnDevice::new(stream, &paths).map_err(text)?;
    tree_conv::launch::commit::<f32>(
        stream,
        dims,
        &paths,
        &on_device,
        &[dx.as_view()],
        &mut ds.as_view_mut(),
    )
    .map_err(text)?;
    let got = stream.clone_dtoh(&ds).map_err(text)?;
    if got != tree_conv::oracle::commit(dims, &paths, &x, &state) {
        return Err("the committed conv state differs".into());
    }
    Ok(())
}

/// Three chains and a padding one in one call, against each in trees of at most 256 nodes, committed one after another.
fn chains(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = ConvDims::new(1024).map_err(text)?;
    let (lens, slots) = ([700, 1, 3, 2], [2, 0, -1, 3]);
    let rows: usize = lens.iter().sum();
    let mut random = Random::new(18);
    let (x, weight, state) =
        (random.normals(rows * 1024), random.normals(4 * 1024), random.normals(4 * dims.state_len()));
    let (dx, dw) = (stream.clone_htod(&x).map_err(text)?, stream.clone_htod(&weight).map_err(text)?);
    let mut want_state = stream.clone_htod(&state).map_err(text)?;
    let mut want = stream.clone_htod(&vec![0f32; x.len()]).map_err(text)?;
    let mut first = 0;
    for (&len, &slot) in lens.iter().zip(&slots) {
        for start in (first..first + len).step_by(256) {
            let tree = DraftTree::chain((first + len - start).min(256)).map_err(text)?;
            let (nodes, range) = (tree.len(), start * 1024..(start + tree.len()) * 1024);
            let batch = TreeBatch::new(vec![tree], vec![slot]).map_err(text)?;
            let tree = TreeOnDevice::new(stream, &batch).map_err(text)?;
            let buffers = ConvBuffers {
                x: dx.slice(range.clone()),
                weight: dw.as_view(),
                conv_state: want_state.as_view(),
                out: want.slice_mut(range.clone()),
                gates: None,
            };
            tree_conv::launch::verify(stream, dims, &batch, &tree, buffers).map_err(text)?;
            let paths = AcceptedPaths::new(&batch, &[(0..nodes).collect()]).map_err(text)?;
            let on_device = PathsOnDevice::new(stream, &paths).map_err(text)?;
            let (x, state) = ([dx.slice(range)], &mut want_state.as_view_mut());
            tree_conv::launch::commit::<f32>(stream, dims, &paths, &on_device, &x, state).map_err(text)?;
        }
        first += len;
    }
    let sequences = Sequences::new(&lens, slots.to_vec()).map_err(text)?;
    let on_device = ChainsOnDevice::new(stream, &sequences).map_err(text)?;
    let mut got_state = stream.clone_htod(&state).map_err(text)?;
    let mut got = stream.clone_htod(&vec![f32::NAN; x.len()]).map_err(text)?;
    let sources = buffers([&dx, &dw, &got_state], &mut got);
    tree_conv::launch::forward_chains(stream, dims, &sequences, &on_device, sources).map_err(text)?;
    let (rows, state) = ([dx.as_view()], &mut got_state.as_view_mut());
    tree_conv::launch::advance_chains::<f32>(stream, dims, &sequences, &on_device, &rows, state)
        .map_err(text)?;
    for (name, got, want) in [("rows", &got, &want), ("states", &got_state, &want_state)] {
        let [got, want] = [got, want].map(|values| stream.clone_dtoh(values).map_err(text));
        let (got, want) = (got?, want?);
        if got.iter().zip(&want).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err(format!("{name} of long chains differ from those of trees"));
        }
    }
    Ok(())
}

fn buffers<'a, T, Out>(
    [x, weight, conv_state]: [&'a CudaSlice<T>; 3],
    out: &'a mut CudaSlice<Out>,
) -> ConvBuffers<'a, T, Out> {
    let (x, weight, conv_state) = (x.as_view(), weight.as_view(), conv_state.as_view());
    ConvBuffers { x, weight, conv_state, out: out.as_view_mut(), gates: None }
}

fn gate_buffers<'a, T>(
    ab: &'a CudaSlice<T>,
    [a_log, dt_bias]: [&'a CudaSlice<f32>; 2],
    out: &'a mut CudaSlice<f32>,
) -> GateBuffers<'a, T> {
    let (a_log, dt_bias) = (a_log.as_view(), dt_bias.as_view());
    GateBuffers { ab: ab.as_view(), a_log, dt_bias, out: out.as_view_mut() }
}

/// Rows and gates of one launch against those of two, of trees and of long chains.
fn gates_beside<T, Out>(
    stream: &Arc<CudaStream>,
    heads: usize,
    round: fn(f32) -> T,
    nan: Out,
) -> Result<(), String>
where
    T: tree_conv::launch::Element + gates::launch::Element,
    Out: tree_conv::launch::OutputOf<T> + Clone + Default + PartialEq,
{
    let dims = ConvDims::new(1028).map_err(text)?;
    let trees = vec![DraftTree::bole(37, 3).map_err(text)?, DraftTree::chain(2).map_err(text)?];
    let batch = TreeBatch::new(trees, vec![1, -1]).map_err(text)?;
    let sequences = Sequences::new(&[37, 2], vec![1, -1]).map_err(text)?;
    let mut random = Random::new(29);
    let mut up = |len: usize| {
        let values = random.normals(len).into_iter().map(round).collect::<Vec<_>>();
        stream.clone_htod(&values).map_err(text)
    };
    let (rows, ab) = ([up(39 * 1028)?, up(4 * 1028)?, up(2 * dims.state_len())?], up(39 * 2 * heads)?);
    let inputs = rows.each_ref();
    let a_log = stream.clone_htod(&random.normals(heads)).map_err(text)?;
    let dt_bias = stream.clone_htod(&random.normals(heads)).map_err(text)?;
    let outs = || -> Result<_, String> {
        let out = stream.clone_htod(&vec![nan.clone(); 39 * 1028]).map_err(text)?;
        Ok((out, stream.clone_htod(&vec![f32::NAN; ab.len()]).map_err(text)?))
    };
    let tree = TreeOnDevice::new(stream, &batch).map_err(text)?;
    let chains = ChainsOnDevice::new(stream, &sequences).map_err(text)?;
    for over in ["trees", "chains"] {
        let run = |buffers: ConvBuffers<'_, T, Out>| match over {
            "trees" => tree_conv::launch::verify(stream, dims, &batch, &tree, buffers).map_err(text),
            _ => tree_conv::launch::forward_chains(stream, dims, &sequences, &chains, buffers).map_err(text),
        };
        let (mut want, mut want_gates) = outs()?;
        run(buffers(inputs, &mut want))?;
        let apart = gate_buffers(&ab, [&a_log, &dt_bias], &mut want_gates);
        gates::launch::forward(stream, apart).map_err(text)?;
        let (mut got, mut got_gates) = outs()?;
        let together = Some(gate_buffers(&ab, [&a_log, &dt_bias], &mut got_gates));
        run(ConvBuffers { gates: together, ..buffers(inputs, &mut got) })?;
        if stream.clone_dtoh(&got).map_err(text)? != stream.clone_dtoh(&want).map_err(text)? {
            return Err(format!("{heads} heads, {over}: the rows differ"));
        }
        let [got, want] = [got_gates, want_gates].map(|gates| stream.clone_dtoh(&gates).map_err(text));
        if bits(&got?) != bits(&want?) {
            return Err(format!("{heads} heads, {over}: the gates differ"));
        }
    }
    Ok(())
}

fn gates_in_conv(stream: &Arc<CudaStream>) -> Result<(), String> {
    for heads in [1, 3, 32, 64, 129, 300] {
        gates_beside::<f32, f32>(stream, heads, |x| x, f32::NAN)?;
        gates_beside::<f32, bf16>(stream, heads, |x| x, bf16::NAN)?;
        gates_beside::<bf16, bf16>(stream, heads, bf16::from_f32, bf16::NAN)?;
    }
    Ok(())
}

fn gate_values(stream: &Arc<CudaStream>) -> Result<(), String> {
    let heads = 32;
    let mut random = Random::new(23);
    let mut ab = random.normals(40 * 2 * heads);
    ab[0] = 100.0;
    ab[1] = -100.0;
    ab[2] = -200.0;
    let mut a_log = random.normals(heads);
    a_log[2] = 100.0;
    let dt_bias = vec![0.0; heads];
    let upload = |x: &[f32]| stream.clone_htod(x).map_err(text);
    let (dab, da, db) = (upload(&ab)?, upload(&a_log)?, upload(&dt_bias)?);
    let mut out = upload(&vec![f32::NAN; ab.len()])?;
    gates::launch::forward(stream, gate_buffers(&dab, [&da, &db], &mut out)).map_err(text)?;
    let got = stream.clone_dtoh(&out).map_err(text)?;
    // The head with A_log = 100 spans forty orders of magnitude: compare it relative to itself.
    let truth = gates::oracle::forward(heads, &ab, &a_log, &dt_bias);
    for (i, (&g, &t)) in got.iter().zip(&truth).enumerate() {
        let beyond = t.abs() > f64::from(f32::MAX) && g == t as f32;
        if !(beyond || (f64::from(g) - t).abs() <= 1e-5 * t.abs() + 1e-30) {
            return Err(format!("gates[{i}]: got {g}, expected {t}"));
        }
    }
    Ok(())
}
