//! Files in, files out: every room's outputs against its float64 oracle, and what happens to files that are wrong.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use canopy_bench::op::{self, DeviceArg, ExampleArgs, OpArgs, Room};
use canopy_kernels::{AcceptedPaths, AttnDims, ConvDims, DraftTree, GdnDims, TreeBatch};
use canopy_kernels::{block_attention, gates, gdn_prefill, kv_compact, tree_attention, tree_conv, tree_gdn};

type Tensors = HashMap<String, Tensor>;

/// A directory with an example file of a room.
struct Files {
    dir: tempfile::TempDir,
    room: Room,
}

impl Files {
    fn new(room: Room) -> Result<Self> {
        let files = Self { dir: tempfile::tempdir()?, room };
        op::example(&ExampleArgs { room, out: files.input(), seed: 3, head: 16 })?;
        Ok(files)
    }

    fn input(&self) -> PathBuf {
        self.dir.path().join("in.safetensors")
    }

    fn args(&self) -> OpArgs {
        OpArgs {
            room: self.room,
            input: self.input(),
            out: self.dir.path().join("out.safetensors"),
            variant: None,
            solve: None,
            device: DeviceArg::Cpu,
            design: None,
        }
    }

    fn run(&self, args: &OpArgs) -> Result<(Tensors, Tensors)> {
        op::run(args)?;
        Ok((load(&self.input())?, load(&args.out)?))
    }

    /// Changes the input file.
    fn edit(&self, edit: impl FnOnce(&mut Tensors)) -> Result<()> {
        let mut tensors = load(&self.input())?;
        edit(&mut tensors);
        Ok(candle_core::safetensors::save(&tensors, self.input())?)
    }

    /// The refusal of the input file as it is.
    fn refusal(&self) -> String {
        match op::run(&self.args()) {
            Ok(()) => panic!("accepted"),
            Err(error) => format!("{error:#}").lines().next().unwrap_or_default().to_string(),
        }
    }
}

fn load(path: &Path) -> Result<Tensors> {
    Ok(candle_core::safetensors::load(path, &Device::Cpu)?)
}

fn f32s(tensors: &Tensors, name: &str) -> Vec<f32> {
    let tensor = tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
    tensor.flatten_all().and_then(|t| t.to_vec1()).expect("f32 values")
}

fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

fn close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((f64::from(*got) - expected).abs() < 1e-5, "{got} {expected}");
    }
}

/// The example's trees: five nodes on slot 1, one on slot 0; accepted 0, 1, 3 and 0.
fn batch() -> Result<(TreeBatch, AcceptedPaths)> {
    let trees = vec![DraftTree::new(vec![-1, 0, 0, 1, 1])?, DraftTree::chain(1)?];
    let batch = TreeBatch::new(trees, vec![1, 0])?;
    let paths = AcceptedPaths::new(&batch, &[vec![0, 1, 3], vec![0]])?;
    Ok((batch, paths))
}

fn check_gdn(args: &OpArgs, files: &Files) -> Result<()> {
    let (inputs, outputs) = files.run(args)?;
    let (dims, (batch, _)) = (GdnDims::new(2, 4, 16, 16)?, batch()?);
    let (qkv, gates, state) = (f32s(&inputs, "qkv"), f32s(&inputs, "gates"), f32s(&inputs, "state"));
    let (mut o, mut u, mut g_cum, mut pool) = (vec![], vec![], vec![], f64s(&state));
    for ((first, tree, slot), last) in batch.iter().zip([3, 0]) {
        let slot = slot.expect("a live slot") * dims.state_len();
        let part = |values: &[f32], width: usize| f64s(&values[first * width..(first + tree.len()) * width]);
        let (qkv, gates) = (part(&qkv, dims.qkv_width()), part(&gates, 8));
        let state = f64s(&state[slot..slot + dims.state_len()]);
        let input = tree_gdn::oracle::OracleInput { qkv: &qkv, gates: &gates, state: &state };
        let truth = tree_gdn::oracle::verify(dims, tree, input);
        o.extend(truth.o);
        u.extend(truth.u);
        g_cum.extend(truth.g_cum);
        pool[slot..slot + dims.state_len()]
            .copy_from_slice(&tree_gdn::oracle::commit(dims, tree, last, input));
    }
    close(&f32s(&outputs, "o"), &o);
    close(&f32s(&outputs, "state"), &pool);
    if files.room == Room::TreeGdn {
        close(&f32s(&outputs, "u"), &u);
        close(&f32s(&outputs, "g_cum"), &g_cum);
    }
    Ok(())
}

#[test]
fn tree_gdn_in_every_variant() -> Result<()> {
    let files = Files::new(Room::TreeGdn)?;
    let walk = files.args();
    check_gdn(&walk, &files)?;
    for variant in ["walk", "solve", "blocked16"] {
        check_gdn(&OpArgs { variant: Some(variant.into()), ..walk.clone() }, &files)?;
    }
    for (solve, _) in &tree_gdn::Variant::ALL[1..] {
        check_gdn(&OpArgs { solve: Some((*solve).into()), ..walk.clone() }, &files)?;
    }
    Ok(())
}

#[test]
fn tree_gdn_serial() -> Result<()> {
    let files = Files::new(Room::TreeGdnSerial)?;
    check_gdn(&files.args(), &files)?;
    let (_, outputs) = files.run(&files.args())?;
    assert_eq!(outputs["snapshots"].dims(), [6, 4, 16, 16]);
    // Node 3 of the first tree is where its accepted path ends, on slot 1.
    let (snapshots, state) = (f32s(&outputs, "snapshots"), f32s(&outputs, "state"));
    assert_eq!(snapshots[3 * 1024..4 * 1024], state[1024..]);
    Ok(())
}

#[test]
fn gdn_prefill() -> Result<()> {
    let files = Files::new(Room::GdnPrefill)?;
    let (inputs, outputs) = files.run(&files.args())?;
    let dims = GdnDims::new(2, 4, 16, 16)?;
    let (qkv, gates, state) = (f32s(&inputs, "qkv"), f32s(&inputs, "gates"), f32s(&inputs, "state"));
    let (mut o, mut pool) = (Vec::new(), f64s(&state));
    for (first, rows, slot) in [(0, 5, 1), (5, 1, 0)] {
        let part = |values: &[f32], width: usize| f64s(&values[first * width..(first + rows) * width]);
        let own = slot * dims.state_len()..(slot + 1) * dims.state_len();
        let (qkv, gates, before) = (part(&qkv, dims.qkv_width()), part(&gates, 8), f64s(&state[own.clone()]));
        let input = gdn_prefill::oracle::OracleInput { qkv: &qkv, gates: &gates, state: &before };
        let (rows, after) = gdn_prefill::oracle::forward(dims, rows, input);
        o.extend(rows);
        pool[own].copy_from_slice(&after);
    }
    close(&f32s(&outputs, "o"), &o);
    close(&f32s(&outputs, "state"), &pool);
    files.edit(|tensors| drop(tensors.remove("slots")))?;
    assert!(files.refusal().starts_with("gdn_prefill: tensor `slots`, expected: I32 [2], got: none"));
    files.edit(|tensors| drop(tensors.remove("cu_rows")))?;
    let (_, one) = files.run(&files.args())?;
    assert_eq!(one["o"].dims(), [6, 4, 16]);
    Ok(())
}

#[test]
fn one_tree_needs_no_packing_tensors_and_no_paths_no_commit() -> Result<()> {
    let files = Files::new(Room::TreeGdn)?;
    files.edit(|tensors| {
        for (name, rows) in [("qkv", 5), ("gates", 5), ("parents", 5)] {
            let front = tensors[name].narrow(0, 0, rows).expect("five rows");
            tensors.insert(name.into(), front);
        }
        let slot = tensors["state"].narrow(0, 1, 1).expect("slot 1");
        tensors.insert("state".into(), slot);
        for name in ["cu_nodes", "slots", "paths", "cu_paths"] {
            tensors.remove(name);
        }
    })?;
    let (_, single) = files.run(&files.args())?;
    assert!(!single.contains_key("state"));
    let whole = Files::new(Room::TreeGdn)?;
    let (_, whole) = whole.run(&whole.args())?;
    assert_eq!(f32s(&single, "o"), f32s(&whole, "o")[..5 * 4 * 16]);
    Ok(())
}

#[test]
fn tree_conv() -> Result<()> {
    let files = Files::new(Room::TreeConv)?;
    let (inputs, outputs) = files.run(&files.args())?;
    let (dims, (batch, paths)) = (ConvDims::new(24)?, batch()?);
    let (x, weight, state) = (f32s(&inputs, "x"), f32s(&inputs, "weight"), f32s(&inputs, "conv_state"));
    close(&f32s(&outputs, "out"), &tree_conv::oracle::verify(dims, &batch, &x, &weight, &state));
    assert_eq!(f32s(&outputs, "conv_state"), tree_conv::oracle::commit(dims, &paths, &x, &state));
    Ok(())
}

#[test]
fn gates() -> Result<()> {
    let files = Files::new(Room::Gates)?;
    let (inputs, outputs) = files.run(&files.args())?;
    let [ab, a_log, dt_bias] = ["ab", "a_log", "dt_bias"].map(|name| f32s(&inputs, name));
    close(&f32s(&outputs, "out"), &gates::oracle::forward(4, &ab, &a_log, &dt_bias));
    Ok(())
}

#[test]
fn tree_attention() -> Result<()> {
    let files = Files::new(Room::TreeAttention)?;
    let (inputs, outputs) = files.run(&files.args())?;
    let [q, keys, values] = ["q", "k_cache", "v_cache"].map(|name| f32s(&inputs, name));
    let cache = tree_attention::oracle::Cache { keys: &keys, values: &values, capacity: 16 };
    let truth = tree_attention::oracle::verify(AttnDims::new(4, 2, 16)?, &batch()?.0, &[7, 3], &q, cache);
    close(&f32s(&outputs, "out"), &truth);
    Ok(())
}

#[test]
fn block_attention() -> Result<()> {
    let files = Files::new(Room::BlockAttention)?;
    let places =
        [(1, 7), (0, 3)].map(|(slot, context)| block_attention::oracle::Block { slot: Some(slot), context });
    for (window, causal) in [(Some(6), false), (None, true)] {
        files.edit(|tensors| {
            if window.is_none() {
                tensors.remove("window");
            }
            tensors
                .insert("causal".into(), Tensor::new(&[i32::from(causal)], &Device::Cpu).expect("a value"));
        })?;
        let (inputs, outputs) = files.run(&files.args())?;
        let [q, keys, values] = ["q", "k_cache", "v_cache"].map(|name| f32s(&inputs, name));
        let (keys, values) = (&keys[..], &values[..]);
        let scene = block_attention::oracle::Scene { keys, values, capacity: 16, window, causal };
        close(
            &f32s(&outputs, "out"),
            &block_attention::oracle::forward(AttnDims::new(4, 2, 16)?, &places, 4, &q, scene),
        );
    }
    Ok(())
}

#[test]
fn kv_compact() -> Result<()> {
    let files = Files::new(Room::KvCompact)?;
    let (inputs, outputs) = files.run(&files.args())?;
    let before = f32s(&inputs, "cache");
    let expected = kv_compact::oracle::compact(&batch()?.1, &[7, 3], 32, 16, &before);
    assert_eq!(f32s(&outputs, "cache"), expected);
    files.edit(|tensors| {
        let flat = tensors["cache"].reshape((2, 16, 32)).expect("2 x 16 rows of 32");
        tensors.insert("cache".into(), flat);
    })?;
    let (_, flat) = files.run(&files.args())?;
    assert_eq!((f32s(&flat, "cache"), flat["cache"].dims()), (expected, &[2, 16, 32][..]));
    Ok(())
}

#[test]
fn wide_integers_and_bf16_are_read() -> Result<()> {
    let files = Files::new(Room::TreeConv)?;
    files.edit(|tensors| {
        for name in ["parents", "cu_nodes", "slots", "paths", "cu_paths"] {
            let wide = tensors[name].to_dtype(DType::I64).expect("integers");
            tensors.insert(name.into(), wide);
        }
        for name in ["x", "weight", "conv_state"] {
            let rounded = tensors[name].to_dtype(DType::BF16).expect("floats");
            tensors.insert(name.into(), rounded);
        }
    })?;
    let (_, outputs) = files.run(&files.args())?;
    assert_eq!(outputs["out"].dtype(), DType::BF16);
    Ok(())
}

#[test]
fn a_missing_or_wrong_tensor_is_named_with_what_was_expected_and_what_came() -> Result<()> {
    let files = Files::new(Room::Gates)?;
    let put = |name: &str, tensor: Tensor| files.edit(|tensors| drop(tensors.insert(name.into(), tensor)));
    files.edit(|tensors| drop(tensors.remove("a_log")))?;
    let text = "gates: tensor `a_log`, expected: F32, BF16 or F16 [Hv], got: none (the file has ab [6, 2, 4], dt_bias [4])";
    assert_eq!(files.refusal(), text);
    put("a_log", Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?)?;
    assert_eq!(files.refusal(), "gates: tensor `a_log`, expected: F32, BF16 or F16 [Hv], got: F32 [4, 1]");
    put("a_log", Tensor::zeros(4, DType::I64, &Device::Cpu)?)?;
    assert_eq!(files.refusal(), "gates: tensor `a_log`, expected: F32, BF16 or F16 [Hv], got: I64 [4]");
    put("a_log", Tensor::zeros(4, DType::F32, &Device::Cpu)?)?;
    put("dt_bias", Tensor::zeros(3, DType::F32, &Device::Cpu)?)?;
    assert_eq!(files.refusal(), "gates: dt_bias, expected: [4], got: [3]");
    put("dt_bias", Tensor::zeros(4, DType::F32, &Device::Cpu)?)?;
    put("dt_bais", Tensor::zeros(4, DType::F32, &Device::Cpu)?)?;
    let text = "gates: tensor `dt_bais`, expected: one of a_log, ab, dt_bias, got: an unknown name";
    assert_eq!(files.refusal(), text);
    Ok(())
}

#[test]
fn wrong_trees_and_paths_are_named() -> Result<()> {
    let refusal = |name: &str, values: Option<&[i32]>| {
        let files = Files::new(Room::TreeGdn)?;
        files.edit(|tensors| match values {
            Some(values) => {
                drop(tensors.insert(name.into(), Tensor::new(values, &Device::Cpu).expect("values")))
            }
            None => drop(tensors.remove(name)),
        })?;
        Ok::<_, anyhow::Error>(files.refusal())
    };
    assert_eq!(
        refusal("parents", Some(&[-1, 0, 0, 4, 1, -1]))?,
        "tree_gdn: tensor `parents`, tree 0: draft tree: node 3 has parent 4; a parent must come before its child"
    );
    assert_eq!(
        refusal("cu_nodes", Some(&[0, 5, 7]))?,
        "tree_gdn: tensor `cu_nodes`, expected: ascending from 0 to 6, got: [0, 5, 7]"
    );
    assert!(refusal("slots", None)?.starts_with("tree_gdn: tensor `slots`, expected: I32 [2], got: none"));
    assert!(refusal("slots", Some(&[1, 1]))?.starts_with("tree_gdn: tensor `slots`: tree batch: slots"));
    assert!(
        refusal("paths", Some(&[0, 2, 3, 0]))?
            .starts_with("tree_gdn: tensor `paths`: accepted path of sequence 0")
    );
    assert!(
        refusal("paths", Some(&[0, 1, -3, 0]))?
            .starts_with("tree_gdn: tensor `paths`: accepted path of sequence 0")
    );
    Ok(())
}

#[test]
fn what_this_build_cannot_do_is_said() -> Result<()> {
    let files = Files::new(Room::TreeConv)?;
    let error = |args: OpArgs| format!("{:#}", op::run(&args).expect_err("refused"));
    assert_eq!(
        error(OpArgs { device: DeviceArg::Cuda, ..files.args() }),
        "tree_conv: --device: device: cuda: expected a build with --features cuda, got one without"
    );
    assert_eq!(
        error(OpArgs { solve: Some("forward".into()), ..files.args() }),
        "tree_conv: --variant and --solve, expected: tree_gdn only, got: them here"
    );
    let gdn = Files::new(Room::TreeGdn)?;
    assert_eq!(
        error(OpArgs { design: Some("blocked-b-v32".into()), ..gdn.args() }),
        "tree_gdn: --design, expected: a build with feature cuda, got: blocked-b-v32 in one without"
    );
    assert_eq!(
        error(OpArgs { variant: Some("walk".into()), solve: Some("level".into()), ..gdn.args() }),
        "tree_gdn: --solve, expected: --variant solve, got: --variant walk"
    );
    let text = error(OpArgs { solve: Some("fastest".into()), ..gdn.args() });
    assert!(
        text.starts_with("tree_gdn: --solve, expected: ")
            && text.contains("blocked32")
            && text.ends_with(", got: fastest"),
        "{text}"
    );
    let text = error(OpArgs { input: files.dir.path().join("absent.safetensors"), ..files.args() });
    assert!(text.starts_with("tree_conv: input ") && text.contains("absent.safetensors"), "{text}");
    Ok(())
}

#[test]
fn every_help_has_an_example() -> Result<()> {
    for command in [&[][..], &["op"], &["example"], &["env"], &["contract"], &["compare"]] {
        let mut help = std::process::Command::new(env!("CARGO_BIN_EXE_canopy-bench"));
        let text = String::from_utf8(help.args(command).arg("--help").output()?.stdout)?;
        let (_, example) = text.split_once("Example:").unwrap_or_else(|| panic!("{command:?}: {text}"));
        assert!(example.contains("canopy-bench "), "{command:?}: {text}");
    }
    Ok(())
}

#[test]
fn the_binary_runs_the_example_of_its_help() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_canopy-bench"));
        command.args(args).current_dir(dir.path()).output()
    };
    assert!(run(&["example", "tree_gdn", "--out", "in.safetensors"])?.status.success());
    let args =
        ["op", "tree_gdn", "--input", "in.safetensors", "--out", "out.safetensors", "--solve", "forward"];
    assert!(run(&args)?.status.success());
    assert_eq!(load(&dir.path().join("out.safetensors"))?["o"].dims(), [6, 4, 16]);
    let wrong = run(&["op", "gates", "--input", "in.safetensors", "--out", "out.safetensors"])?;
    assert_eq!(wrong.status.code(), Some(1));
    assert!(
        String::from_utf8(wrong.stderr)?
            .starts_with("error: gates: tensor `ab`, expected: F32, BF16 or F16 [N, 2, Hv]")
    );
    let record: serde_json::Value = serde_json::from_slice(&run(&["env"])?.stdout)?;
    assert!(
        record["cores"].as_u64() > Some(0) && record["copy_bytes_per_s"].as_f64() > Some(1e8),
        "{record}"
    );
    Ok(())
}
