//! gdn_prefill: chunks against the float64 oracle on the same rounded rows, every block, and against each other bit for bit.

use std::sync::Arc;

use canopy_kernels::GdnDims;
use canopy_kernels::gdn_prefill::launch::{self, Block, Plan, PrefillBuffers, SequencesOnDevice, Tier};
use canopy_kernels::gdn_prefill::{Sequences, oracle};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Hardness, Random, bits, compare, compare_within, round_bf16, small, text, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("gdn_prefill::rows_and_states_equal_the_oracle_at_every_chunk_edge", edges),
    ("gdn_prefill::nearly_equal_keys_and_decays_keep_the_bound", hard),
    ("gdn_prefill::long_prompts_keep_the_bound", long),
    ("gdn_prefill::bits_do_not_depend_on_block_launches_batch_or_slot", invariant),
    ("gdn_prefill::any_number_of_value_heads_shares_a_key_head", ratios),
    ("gdn_prefill::padding_is_zero_and_other_slots_are_untouched", padding),
    ("gdn_prefill::a_nan_reaches_later_rows_only", nan),
    ("gdn_prefill::infinite_log_gates_forget_everything", infinite_gates),
    ("gdn_prefill::five_runs_are_byte_identical", repeat),
    ("gdn_prefill::wrong_arguments_are_refused_by_name", refused),
];

/// One call's inputs, rounded to what the device reads.
#[derive(Clone)]
struct Case {
    dims: GdnDims,
    sequences: Sequences,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    fn new(
        dims: GdnDims,
        lens: &[usize],
        slots: Vec<i32>,
        pool: usize,
        hardness: Hardness,
    ) -> Result<Self, String> {
        let sequences = Sequences::new(lens, slots).map_err(text)?;
        let (mut random, key) = (Random::new(sequences.rows() as u64 + 77), dims.k_heads * dims.dk);
        let mut qkv = random.normals(sequences.rows() * dims.qkv_width());
        if hardness == Hardness::EqualKeys {
            let base = random.normals(key);
            for row in qkv.chunks_mut(dims.qkv_width()) {
                for (k, b) in row[key..2 * key].iter_mut().zip(&base) {
                    *k = b + 0.02 * *k;
                }
            }
        }
        qkv.iter_mut().for_each(|x| *x = round_bf16(*x));
        let mut gates = Vec::new();
        for row in 0..sequences.rows() {
            gates.extend((0..dims.v_heads).map(|_| match hardness {
                Hardness::Random => -2.0 * random.uniform().powi(4),
                Hardness::EqualKeys => 0.0,
                Hardness::Decay => -20.0 * (row % 2) as f32,
            }));
            let beta = |_| if hardness == Hardness::EqualKeys { 1.0 } else { random.uniform() };
            gates.extend((0..dims.v_heads).map(beta));
        }
        let state = random.normals(pool * dims.state_len()).into_iter().map(|x| 0.1 * x).collect();
        Ok(Self { dims, sequences, qkv, gates, state })
    }

    fn single(len: usize, hardness: Hardness) -> Result<Self, String> {
        Self::new(small(), &[len], vec![0], 1, hardness)
    }

    /// Outputs and pool in float64.
    fn truth(&self) -> (Vec<f64>, Vec<f64>) {
        let (qkv, gates, mut state) = (wide(&self.qkv), wide(&self.gates), wide(&self.state));
        let (dims, len) = (self.dims, self.dims.state_len());
        let mut o = Vec::new();
        for (first, rows, slot) in self.sequences.iter() {
            let Some(slot) = slot else {
                o.resize(o.len() + rows * dims.v_heads * dims.dv, 0.0);
                continue;
            };
            let input = oracle::OracleInput {
                qkv: &qkv[first * dims.qkv_width()..],
                gates: &gates[first * 2 * dims.v_heads..],
                state: &state[slot * len..(slot + 1) * len],
            };
            let (own_o, own_state) = oracle::forward(dims, rows, input);
            o.extend(own_o);
            state[slot * len..(slot + 1) * len].copy_from_slice(&own_state);
        }
        (o, state)
    }

    fn plan(&self) -> Plan {
        Plan::new(self.dims, &self.sequences)
    }
}

/// Outputs and pool after a call; `o` and the scratch start as NaN.
fn run<Out: Tier + Copy>(
    stream: &Arc<CudaStream>,
    case: &Case,
    plan: Plan,
    (nan, widen): (Out, fn(Out) -> f32),
) -> Result<(Vec<f32>, Vec<f32>), String> {
    let dims = case.dims;
    let qkv: Vec<bf16> = case.qkv.iter().map(|&x| bf16::from_f32(x)).collect();
    let qkv = stream.clone_htod(&qkv).map_err(text)?;
    let gates = stream.clone_htod(&case.gates).map_err(text)?;
    let mut state = stream.clone_htod(&case.state).map_err(text)?;
    let records = case.sequences.len() * plan.chunks.max(1) * dims.v_heads * 5_380;
    let mut scratch = stream.clone_htod(&vec![f32::NAN; records]).map_err(text)?;
    let values = case.sequences.rows() * dims.v_heads * dims.dv;
    let mut o = stream.clone_htod(&vec![nan; values]).map_err(text)?;
    let on_device = SequencesOnDevice::new(stream, &case.sequences).map_err(text)?;
    let buffers = PrefillBuffers {
        qkv: qkv.as_view(),
        gates: gates.as_view(),
        state: state.as_view_mut(),
        scratch: &mut scratch,
        o: o.as_view_mut(),
    };
    launch::forward_with(stream, dims, &case.sequences, &on_device, plan, buffers).map_err(text)?;
    let o = stream.clone_dtoh(&o).map_err(text)?.into_iter().map(widen).collect();
    Ok((o, stream.clone_dtoh(&state).map_err(text)?))
}

fn tier_a(stream: &Arc<CudaStream>, case: &Case, plan: Plan) -> Result<(Vec<f32>, Vec<f32>), String> {
    run::<f32>(stream, case, plan, (f32::NAN, |x| x))
}

fn check(stream: &Arc<CudaStream>, name: &str, case: &Case, blocks: &[Block]) -> Result<(), String> {
    let (o, state) = case.truth();
    for &block in blocks {
        let plan = Plan { block: Some(block), ..case.plan() };
        let got = tier_a(stream, case, plan)?;
        compare(&format!("{name}, {block:?}: o"), &got.0, &o)?;
        compare(&format!("{name}, {block:?}: state"), &got.1, &state)?;
        let got = run::<bf16>(stream, case, plan, (bf16::NAN, bf16::to_f32))?;
        compare_within(&format!("{name}, {block:?}: tier B o"), &got.0, &o, 1e-2)?;
        compare_within(&format!("{name}, {block:?}: tier B state"), &got.1, &state, 1e-2)?;
    }
    Ok(())
}

fn edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    for len in (1..=33).chain([47, 48, 49, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256]) {
        let case = Case::single(len, Hardness::Random)?;
        check(stream, &format!("{len} rows"), &case, &Block::ALL)?;
    }
    Ok(())
}

fn hard(stream: &Arc<CudaStream>) -> Result<(), String> {
    for len in [32, 64, 128, 200, 320] {
        for hardness in [Hardness::EqualKeys, Hardness::Decay] {
            let case = Case::single(len, hardness)?;
            check(stream, &format!("{len} rows, {hardness:?}"), &case, &[Block::Pairs32, Block::Alone128])?;
        }
    }
    Ok(())
}

fn long(stream: &Arc<CudaStream>) -> Result<(), String> {
    let case = Case::single(3_000, Hardness::Random)?;
    check(stream, "3,000 rows", &case, &[Block::Pairs64])?;
    let wide = GdnDims::new(16, 32, 128, 128).map_err(text)?;
    let case = Case::new(wide, &[190], vec![1], 2, Hardness::Random)?;
    check(stream, "190 rows of 32 heads", &case, &[Block::Pairs32])
}

fn same(what: &str, a: &[f32], b: &[f32]) -> Result<(), String> {
    if bits(a) == bits(b) { Ok(()) } else { Err(format!("{what}: the bits differ")) }
}

fn invariant(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let case = Case::new(dims, &[300, 64, 1, 210, 130], vec![3, 0, 4, 1, 2], 5, Hardness::Random)?;
    let together = tier_a(stream, &case, case.plan())?;
    for block in Block::ALL {
        for chunks in [1, 2, 5] {
            let got = tier_a(stream, &case, Plan { block: Some(block), chunks })?;
            same(&format!("{block:?}, {chunks} chunks a launch: o"), &together.0, &got.0)?;
            same(&format!("{block:?}, {chunks} chunks a launch: state"), &together.1, &got.1)?;
        }
    }
    let (width, len) = (dims.v_heads * dims.dv, dims.state_len());
    for (first, rows, slot) in case.sequences.iter() {
        let slot = slot.ok_or("no padding here")?;
        let cut = |x: &[f32], width: usize| x[first * width..(first + rows) * width].to_vec();
        let alone = Case {
            dims,
            sequences: Sequences::new(&[rows], vec![0]).map_err(text)?,
            qkv: cut(&case.qkv, dims.qkv_width()),
            gates: cut(&case.gates, 2 * dims.v_heads),
            state: case.state[slot * len..(slot + 1) * len].to_vec(),
        };
        let got = tier_a(stream, &alone, alone.plan())?;
        same(&format!("{rows} rows alone: o"), &got.0, &cut(&together.0, width))?;
        same(&format!("{rows} rows alone: state"), &got.1, &together.1[slot * len..(slot + 1) * len])?;
    }
    Ok(())
}

fn ratios(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (k_heads, v_heads) in [(1, 1), (1, 3), (2, 8)] {
        let dims = GdnDims::new(k_heads, v_heads, 128, 128).map_err(text)?;
        let case = Case::new(dims, &[70, 9], vec![0, 1], 2, Hardness::Random)?;
        check(stream, &format!("{k_heads} key and {v_heads} value heads"), &case, &[Block::Alone128])?;
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = small();
    let case = Case::new(dims, &[70, 130], vec![-1, 1], 3, Hardness::Random)?;
    for block in Block::ALL {
        let (o, state) = tier_a(stream, &case, Plan { block: Some(block), chunks: 1 })?;
        if !o[..70 * dims.v_heads * dims.dv].iter().all(|&x| x == 0.0) {
            return Err(format!("{block:?}: a padding row is not zero"));
        }
        let len = dims.state_len();
        for slot in [0, 2] {
            let rows = slot * len..(slot + 1) * len;
            same(&format!("{block:?}: slot {slot}"), &case.state[rows.clone()], &state[rows])?;
        }
    }
    Ok(())
}

fn nan(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (dims, rows) = (small(), 150);
    let clean = Case::single(rows, Hardness::Random)?;
    let width = dims.v_heads * dims.dv;
    for block in Block::ALL {
        let plan = Plan { block: Some(block), ..clean.plan() };
        let before = tier_a(stream, &clean, plan)?;
        let inf = f32::INFINITY;
        // channels of q, k, v; then the log gate and the write strength of head 0
        let planted: [(usize, usize, f32); 10] = [
            (20, 5, f32::NAN),
            (21, 133, f32::NAN),
            (22, 140, inf),
            (70, 263, f32::NAN),
            (64, 300, -inf),
            (0, 256, f32::NAN),
            (63, 400, inf),
            (33, 512, f32::NAN),
            (34, 512, inf),
            (35, 514, f32::NAN),
        ];
        for (row, channel, value) in planted {
            let mut case = clean.clone();
            match channel.checked_sub(dims.qkv_width()) {
                None => case.qkv[row * dims.qkv_width() + channel] = value,
                Some(gate) => case.gates[row * 2 * dims.v_heads + gate] = value,
            }
            let name = format!("{block:?}, {value} in row {row}, channel {channel}");
            let (after, (o, state)) = (tier_a(stream, &case, plan)?, case.truth());
            same(&name, &before.0[..row * width], &after.0[..row * width])?;
            let pairs = after.0.iter().zip(&o).chain(after.1.iter().zip(&state));
            for (at, (got, want)) in pairs.enumerate() {
                if got.is_finite() != want.is_finite() {
                    return Err(format!(
                        "{name}: got {got}, float64 gives {want} at {at} (row {})",
                        at / width
                    ));
                }
            }
        }
    }
    Ok(())
}

fn infinite_gates(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut case = Case::single(140, Hardness::Random)?;
    for row in [2, 3, 40, 64, 127, 128] {
        case.gates[row * 2 * case.dims.v_heads] = f32::NEG_INFINITY;
    }
    check(stream, "decays of exactly 0", &case, &[Block::Pairs32, Block::Alone128])
}

fn repeat(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = GdnDims::new(8, 16, 128, 128).map_err(text)?;
    let case = Case::new(dims, &[500, 130], vec![0, 1], 2, Hardness::Random)?;
    let plan = Plan { block: None, chunks: 3 };
    let first = tier_a(stream, &case, plan)?;
    for _ in 0..4 {
        let again = tier_a(stream, &case, plan)?;
        same("o", &first.0, &again.0)?;
        same("state", &first.1, &again.1)?;
    }
    Ok(())
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let expect = |what: &str, case: &Case, plan: Plan| match tier_a(stream, case, plan) {
        Err(message) if message.contains(what) => Ok(()),
        Err(message) => Err(format!("the message does not name {what}: {message}")),
        Ok(_) => Err(format!("accepted, though {what} are wrong")),
    };
    let good = Case::single(5, Hardness::Random)?;
    expect("chunks", &good, Plan { block: None, chunks: 0 })?;
    let far = Case { sequences: Sequences::new(&[5], vec![3]).map_err(text)?, ..good.clone() };
    expect("slots", &far, good.plan())?;
    let mut short = good.clone();
    short.gates.pop();
    expect("gates", &short, good.plan())?;
    let mut short = good.clone();
    short.qkv.pop();
    expect("qkv", &short, good.plan())
}
