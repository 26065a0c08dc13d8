//! Times gdn_prefill on a CUDA device, beside tree_gdn_serial's chain form where that takes the rows: events around replays of a captured
//! graph, inputs rotated over more than the L2 cache (and once more on one set, warm), median of the replays. Outputs and states of both
//! are compared before.
//!
//!     cargo bench -p canopy-kernels --features cuda --bench prefill_cuda -- [--quick] [--json FILE]

mod replays;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Arc;

use canopy_kernels::cuda::{TreeOnDevice, has_driver};
use canopy_kernels::gdn_prefill::Sequences;
use canopy_kernels::gdn_prefill::launch::{self, Block, Plan, PrefillBuffers, SequencesOnDevice};
use canopy_kernels::tree_gdn_serial::launch::{ChainBuffers, Pool, chain};
use canopy_kernels::{DraftTree, GdnDims, TreeBatch};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;
use replays::{BYTES_PER_US, FLOPS_PER_US, Outcome, ROTATE, at, capture, replay};

const COMMAND: &str = "cargo bench -p canopy-kernels --features cuda --bench prefill_cuda -- --json FILE";
/// Values drawn once and repeated.
const DRAWN: usize = (1 << 22) + 3;
/// Replays that do not count, and that do.
const REPLAYS: (usize, usize) = (3, 40);
/// f32 of a chunk's record.
const RECORD: usize = 5_380;

/// One way to run the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// f32 outputs.
    TierA(Plan),
    /// bf16 outputs.
    TierB(Plan),
    /// Row after row, the state in registers.
    Walk(usize),
}

fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let part = |shift: u32| ((x >> shift) & 0xffff) as f32 / 65536.0;
        (part(0) + part(16) + part(32) + part(48) - 2.0) * 1.732
    };
    let drawn: Vec<f32> = (0..n.min(DRAWN)).map(|_| next()).collect();
    drawn.iter().copied().cycle().take(n).collect()
}

/// One set of inputs and its own pool.
struct Set {
    qkv: CudaSlice<bf16>,
    gates: CudaSlice<f32>,
    state: CudaSlice<f32>,
}

/// Everything on the device.
struct Case {
    dims: GdnDims,
    batch: usize,
    rows: usize,
    sequences: Sequences,
    on_device: SequencesOnDevice,
    chains: Option<(TreeBatch, TreeOnDevice)>,
    sets: Vec<Set>,
    scratch: CudaSlice<f32>,
    o: CudaSlice<f32>,
    o_half: CudaSlice<bf16>,
    u: CudaSlice<f32>,
    g_cum: CudaSlice<f32>,
}

impl Case {
    fn new(stream: &Arc<CudaStream>, batch: usize, rows: usize) -> Outcome<Self> {
        let dims = GdnDims::new(16, 32, 128, 128)?;
        let slots: Vec<i32> = (0..batch as i32).collect();
        let sequences = Sequences::new(&vec![rows; batch], slots.clone())?;
        let n = sequences.rows();
        let mut gates = Vec::new();
        let uniform = noise(2 * n * dims.v_heads, 5);
        for (at, row) in uniform.chunks(dims.v_heads).enumerate() {
            gates.extend(
                row.iter().map(|x| if at % 2 == 0 { -0.05 * x.abs() } else { 1.0 / (1.0 + x.exp()) }),
            );
        }
        let qkv: Vec<bf16> = noise(n * dims.qkv_width(), 1).into_iter().map(bf16::from_f32).collect();
        let state: Vec<f32> = noise(batch * dims.state_len(), 2).into_iter().map(|x| 0.1 * x).collect();
        let bytes = 2 * qkv.len() + 4 * (gates.len() + state.len());
        let first = Set {
            qkv: stream.clone_htod(&qkv)?,
            gates: stream.clone_htod(&gates)?,
            state: stream.clone_htod(&state)?,
        };
        let mut sets = vec![first];
        for _ in 0..(ROTATE / bytes + 1).min(64) {
            let from = &sets[0];
            sets.push(Set {
                qkv: from.qkv.try_clone()?,
                gates: from.gates.try_clone()?,
                state: from.state.try_clone()?,
            });
        }
        let chains = if rows <= DraftTree::MAX_NODES {
            let trees = TreeBatch::new(vec![DraftTree::chain(rows)?; batch], slots)?;
            let on_device = TreeOnDevice::new(stream, &trees)?;
            Some((trees, on_device))
        } else {
            None
        };
        let plane = n * dims.v_heads;
        let tape = if chains.is_some() { plane } else { 1 };
        Ok(Self {
            dims,
            batch,
            rows,
            on_device: SequencesOnDevice::new(stream, &sequences)?,
            chains,
            sets,
            scratch: stream.alloc_zeros(batch * dims.v_heads * RECORD * rows.div_ceil(64).min(64))?,
            o: stream.alloc_zeros(plane * dims.dv)?,
            o_half: stream.alloc_zeros(plane * dims.dv)?,
            u: stream.alloc_zeros(tape * dims.dv)?,
            g_cum: stream.alloc_zeros(tape)?,
            sequences,
        })
    }

    fn launch(&mut self, stream: &Arc<CudaStream>, way: Way, n: usize) -> Outcome<()> {
        let sets = self.sets.len();
        let Set { qkv, gates, state } = &mut self.sets[n % sets];
        let (qkv, gates) = (qkv.as_view(), gates.as_view());
        let (dims, sequences, on_device, scratch) =
            (self.dims, &self.sequences, &self.on_device, &mut self.scratch);
        match (way, &self.chains) {
            (Way::TierA(plan), _) => {
                let o = self.o.as_view_mut();
                let buffers = PrefillBuffers { qkv, gates, state: state.as_view_mut(), scratch, o };
                launch::forward_with(stream, dims, sequences, on_device, plan, buffers)?;
            }
            (Way::TierB(plan), _) => {
                let o = self.o_half.as_view_mut();
                let buffers = PrefillBuffers { qkv, gates, state: state.as_view_mut(), scratch, o };
                launch::forward_with(stream, dims, sequences, on_device, plan, buffers)?;
            }
            (Way::Walk(columns), Some((trees, tree))) => {
                let buffers = ChainBuffers {
                    qkv,
                    gates,
                    state: Pool::Advance(state.as_view_mut()),
                    o: self.o.as_view_mut(),
                    u: self.u.as_view_mut(),
                    g_cum: self.g_cum.as_view_mut(),
                };
                chain(stream, dims, trees, tree, columns, buffers)?;
            }
            (Way::Walk(_), None) => return Err("more rows than the chain form takes".into()),
        }
        Ok(())
    }

    /// Outputs and state of set 0 from `state` on.
    fn output(&mut self, stream: &Arc<CudaStream>, way: Way, state: &[f32]) -> Outcome<(Vec<f32>, Vec<f32>)> {
        stream.memcpy_htod(state, &mut self.sets[0].state)?;
        self.launch(stream, way, 0)?;
        let o = match way {
            Way::TierB(_) => stream.clone_dtoh(&self.o_half)?.into_iter().map(bf16::to_f32).collect(),
            _ => stream.clone_dtoh(&self.o)?,
        };
        Ok((o, stream.clone_dtoh(&self.sets[0].state)?))
    }
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let (mut off, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        off += (f64::from(a) - f64::from(b)).powi(2);
        norm += f64::from(b).powi(2);
    }
    (off / norm).sqrt()
}

/// One JSON line for one way.
fn row(stream: &Arc<CudaStream>, case: &mut Case, way: Way, device: &str, off: [f64; 2]) -> Outcome<String> {
    let sets = case.sets.len();
    let cold = capture(stream, sets, |n| case.launch(stream, way, n))?;
    let warm = capture(stream, 4, |_| case.launch(stream, way, 0))?;
    let (times, warm) = (replay(stream, &cold, sets, REPLAYS)?, replay(stream, &warm, 4, REPLAYS)?);
    let (dims, n) = (case.dims, case.batch * case.rows);
    let (name, chunks, out) = match way {
        Way::TierA(plan) => (format!("a-{}", label(plan)), plan.chunks, 4),
        Way::TierB(plan) => (format!("b-{}", label(plan)), plan.chunks, 2),
        Way::Walk(columns) => (format!("chain-v{columns}"), 0, 4),
    };
    let bytes = 2 * n * dims.qkv_width()
        + 8 * n * dims.v_heads
        + out * n * dims.v_heads * dims.dv
        + 8 * case.batch * dims.state_len();
    // three products of a row with a state and two with a chunk
    let flops = 2.0 * (n * dims.v_heads * dims.dv) as f64 * (3 * dims.dk + 2 * 64) as f64;
    let floor = (bytes as f64 / BYTES_PER_US).max(flops / FLOPS_PER_US);
    Ok(format!(
        "{{\"schema\":1,\"case\":\"gdn_prefill\",\"variant\":\"{name}\",\"chunks\":{chunks},\"shape\":\"chain\",\"batch\":{},\"nodes\":{},\
         \"us_median\":{:.3},\"us_p10\":{:.3},\"us_p90\":{:.3},\"us_warm\":{:.3},\"us_floor\":{floor:.3},\"relative_o\":{:.2e},\
         \"relative_state\":{:.2e},\"bytes\":{bytes},\"flops\":{flops},\"repeats\":{},\"device\":\"{device}\",\"command\":\"{COMMAND}\"}}",
        case.batch,
        case.rows,
        at(&times, 0.5),
        at(&times, 0.1),
        at(&times, 0.9),
        at(&warm, 0.5),
        off[0],
        off[1],
        times.len(),
    ))
}

fn label(plan: Plan) -> String {
    plan.block.map_or("auto".into(), |block| format!("{block:?}").to_lowercase())
}

/// Ways to time at a size; the first is what the others are compared with.
fn ways(case: &Case, quick: bool) -> Vec<Way> {
    let plan = Plan::new(case.dims, &case.sequences);
    let mut ways = vec![Way::TierA(plan), Way::TierB(plan)];
    if case.chains.is_some() {
        ways.push(Way::Walk(if case.batch > 2 { 128 } else { 32 }));
    }
    if quick {
        return ways;
    }
    let blocks = [Block::Pairs32, Block::Pairs64, Block::Alone128, Block::Small64];
    ways.extend(blocks.map(|block| Way::TierA(Plan { block: Some(block), ..plan })));
    if case.rows >= 2_048 {
        ways.extend([8, 16, 32].map(|chunks| Way::TierA(Plan { block: None, chunks })));
    }
    ways
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    if !has_driver() {
        eprintln!("no CUDA device on this machine: nothing is timed");
        return Ok(());
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    let json = args.iter().position(|arg| arg == "--json").and_then(|at| args.get(at + 1));
    let context = CudaContext::new(0)?;
    // SAFETY: every buffer of this context is used on the one stream below; a capture could not hold cross-stream events.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let device = context.name()?;
    let sizes = [
        (1, 16),
        (1, 64),
        (1, 128),
        (1, 256),
        (1, 512),
        (1, 2_048),
        (1, 8_192),
        (1, 32_768),
        (2, 2_048),
        (4, 512),
        (4, 2_048),
        (16, 64),
        (16, 128),
        (16, 256),
        (16, 2_048),
    ];
    for (batch, rows) in sizes {
        let mut case = Case::new(&stream, batch, rows)?;
        let start = stream.clone_dtoh(&case.sets[0].state)?;
        let ways = ways(&case, quick);
        let want = case.output(&stream, ways[0], &start)?;
        if want.0.iter().chain(&want.1).any(|x| !x.is_finite()) {
            return Err("an output is not finite".into());
        }
        for way in ways {
            let got = case.output(&stream, way, &start)?;
            let off = [distance(&got.0, &want.0), distance(&got.1, &want.1)];
            let most = if matches!(way, Way::TierB(_)) { 1e-2 } else { 1e-5 };
            if !off.iter().all(|off| *off <= most) {
                return Err(format!("{way:?}, {batch} x {rows}: {off:?} off tier A").into());
            }
            let line = row(&stream, &mut case, way, &device, off)?;
            println!("{line}");
            if let Some(path) = json {
                writeln!(OpenOptions::new().create(true).append(true).open(path)?, "{line}")?;
            }
        }
    }
    Ok(())
}
