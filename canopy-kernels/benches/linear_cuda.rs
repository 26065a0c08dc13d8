//! Times the products of the 9B and its drafter on a CUDA device over bf16 and int8 weights: events around replays of a captured graph, weights
//! rotated over more than the L2 cache, median of the replays. The int8 product is held against the bf16 product over the weights that it
//! stands for before (`tests/gpu/int8.rs` holds the two equal in bits).
//!
//! `--many` times a prefill pass's rows instead, by both orders of sums.
//!
//!     cargo bench -p canopy-kernels --features cuda --bench linear_cuda -- [--quick | --many] [--json FILE]

mod replays;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Arc;

use canopy_kernels::cuda::has_driver;
use canopy_kernels::linear::launch::{Rounding, WeightOnDevice, WeightShape, forward};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use replays::{BYTES_PER_US, FLOPS_PER_US, Outcome, ROTATE, at, capture, replay};

const COMMAND: &str = "cargo bench -p canopy-kernels --features cuda --bench linear_cuda -- --json FILE";
/// Replays that do not count, and that do.
const REPLAYS: (usize, usize) = (2, 15);

/// Name, whether the weights are int8, and how rows are taken.
type Variant = (&'static str, bool, Rounding);
/// Name, inputs and outputs.
type Matrix = (&'static str, usize, &'static [usize]);

const MATRICES: [Matrix; 7] = [
    ("gate and up", 4096, &[12288, 12288]),
    ("down", 12288, &[4096]),
    ("q, k and v of the drafter", 4096, &[4096, 1024, 1024]),
    ("o", 4096, &[4096]),
    ("the drafter's features", 32768, &[4096]),
    ("delta rule's projections", 4096, &[8192, 4096, 64]),
    ("head", 4096, &[248_320]),
];
const MANY: [usize; 5] = [256, 512, 1024, 2048, 4096];
const VARIANTS: [Variant; 2] = [("bf16", false, Rounding::Bf16), ("int8", true, Rounding::Bf16)];
const VARIANTS_OF_MANY: [Variant; 2] = [("bf16", false, Rounding::Bf16), ("whole", false, Rounding::Whole)];
const ROWS: [usize; 10] = [1, 2, 8, 16, 32, 64, 128, 256, 512, 1024];

fn outputs_of((_, _, outputs): Matrix) -> usize {
    outputs.iter().sum()
}

/// A matrix in several copies, and room for its product.
struct Case {
    matrix: Matrix,
    weights: Vec<WeightOnDevice>,
    rounding: Rounding,
    x: CudaSlice<f32>,
    scratch: CudaSlice<f32>,
    y: CudaSlice<f32>,
}

impl Case {
    fn new(stream: &Arc<CudaStream>, matrix: Matrix, rows: usize, variant: Variant) -> Outcome<Self> {
        let (_, int8, rounding) = variant;
        let (_, inputs, outputs) = matrix;
        let shape = WeightShape::new(inputs, outputs)?;
        let weight = |seed| {
            let weight = WeightOnDevice::random(stream, shape.clone(), seed, 0.02)?;
            Ok::<_, canopy_kernels::Error>(if int8 { weight.to_int8(stream)? } else { weight })
        };
        let first = weight(1)?;
        let copies = (ROTATE / first.bytes() + 2) as u64;
        let x: Vec<f32> = (0..rows * inputs).map(|i| ((i * 7919 % 4001) as f32 - 2000.0) / 1000.0).collect();
        Ok(Self {
            matrix,
            rounding,
            x: stream.clone_htod(&x)?,
            scratch: stream.alloc_zeros(first.scratch_len(rows).max(1))?,
            y: stream.alloc_zeros(rows * outputs_of(matrix))?,
            weights: std::iter::once(Ok(first))
                .chain((1..copies).map(|n| weight(n + 1)))
                .collect::<Result<_, _>>()?,
        })
    }

    fn launch(&mut self, stream: &Arc<CudaStream>, n: usize) -> Outcome<()> {
        let (_, inputs, outputs) = self.matrix;
        let (rows, copies) = (self.x.len() / inputs, self.weights.len());
        let starts: Vec<usize> =
            (0..outputs.len()).map(|part| rows * outputs[..part].iter().sum::<usize>()).collect();
        let (x, y) = (self.x.as_view(), self.y.as_view_mut());
        let weight = &mut self.weights[n % copies];
        Ok(forward(stream, weight, self.rounding, x, &mut self.scratch, &starts, y)?)
    }

    /// The product over the first copy.
    fn output(&mut self, stream: &Arc<CudaStream>) -> Outcome<Vec<f32>> {
        self.launch(stream, 0)?;
        Ok(stream.clone_dtoh(&self.y)?)
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

/// One JSON line.
fn row(stream: &Arc<CudaStream>, case: &mut Case, name: &str, device: &str, off: f64) -> Outcome<String> {
    let launches = case.weights.len().max(4);
    let graph = capture(stream, launches, |n| case.launch(stream, n))?;
    let times = replay(stream, &graph, launches, REPLAYS)?;
    let ((label, inputs, _), outputs) = (case.matrix, outputs_of(case.matrix));
    let rows = case.x.len() / inputs;
    let weight = case.weights[0].bytes();
    let bytes = weight + 4 * rows * (inputs + outputs);
    let flops = 2.0 * (rows * inputs * outputs) as f64;
    let floor = (bytes as f64 / BYTES_PER_US).max(flops / FLOPS_PER_US);
    let us = at(&times, 0.5);
    Ok(format!(
        "{{\"schema\":1,\"case\":\"linear\",\"variant\":\"{name}\",\"matrix\":\"{label}\",\"inputs\":{inputs},\"outputs\":{outputs},\"rows\":{rows},\
         \"us_median\":{us:.3},\"us_p10\":{:.3},\"us_p90\":{:.3},\"us_floor\":{floor:.3},\"weight_bytes\":{weight},\"weight_tb_per_s\":{:.3},\
         \"relative_to_bf16\":{off:.2e},\"bytes\":{bytes},\"flops\":{flops},\"repeats\":{},\"device\":\"{device}\",\"command\":\"{COMMAND}\"}}",
        at(&times, 0.1),
        at(&times, 0.9),
        weight as f64 / us / 1e6,
        times.len(),
    ))
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    if !has_driver() {
        eprintln!("no CUDA device on this machine: nothing is timed");
        return Ok(());
    }
    let many = args.iter().any(|arg| arg == "--many");
    let (rows_of, variants) = if many { (&MANY[..], VARIANTS_OF_MANY) } else { (&ROWS[..], VARIANTS) };
    let quick = args.iter().any(|arg| arg == "--quick");
    let json = args.iter().position(|arg| arg == "--json").and_then(|at| args.get(at + 1));
    let context = CudaContext::new(0)?;
    // SAFETY: every buffer of this context is used on the one stream below; a capture could not hold cross-stream events.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let device = context.name()?;
    for matrix in MATRICES {
        for &rows in rows_of {
            if (quick && ![1, 16, 64, 256].contains(&rows))
                || (outputs_of(matrix) > 1 << 17 && (many || rows > 256))
            {
                continue;
            }
            let mut truth: Option<Vec<f32>> = None;
            for variant in variants {
                let name = variant.0;
                let mut case = Case::new(&stream, matrix, rows, variant)?;
                let got = case.output(&stream)?;
                let off = truth.as_ref().map_or(0.0, |truth| distance(&got, truth));
                // a uniform weight in 127 steps is off by 1 / (127 * 2) of its root mean square
                if off > 0.01 || got.iter().any(|y| !y.is_finite()) {
                    return Err(format!("{name}, {matrix:?}, {rows} rows: {off:.2e} off").into());
                }
                truth.get_or_insert(got);
                let line = row(&stream, &mut case, name, &device, off)?;
                println!("{line}");
                if let Some(path) = json {
                    writeln!(OpenOptions::new().create(true).append(true).open(path)?, "{line}")?;
                }
            }
        }
    }
    Ok(())
}
