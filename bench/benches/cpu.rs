//! CPU kernels at the embedded model's shapes, in a pool of one thread per physical core as in the engine.
//!
//! `cargo bench -p canopy-bench --bench cpu`. The group `linear` has products, and one of the 9B's: Criterion prints
//! elements/s (one element = one multiply-add, so twice that is the FLOP rate). `weights` reads every weight once and
//! reports bytes/s. `gdn` has the delta rule of one layer over a draft tree, in nodes/s: the baseline that keeps every
//! node's state, the walk and the closed form; before it is timed, each is compared with the baseline.

use std::hint::black_box;
use std::time::Instant;

use canopy_kernels::linear::cpu::{PackedWeight, forward};
use canopy_kernels::tree_gdn::{self, Solve, Variant, VerifyInput, VerifyOutput};
use canopy_kernels::tree_gdn_serial::{self, SerialInput, SerialOutput};
use canopy_kernels::{DraftTree, GdnDims, TreeBatch};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Row counts: plain decoding, trees with their root, a prefill chunk.
const ROWS: [usize; 6] = [1, 16, 17, 33, 65, 128];

/// Name, inputs and outputs of one product.
type Product = (&'static str, usize, &'static [usize]);

const PRODUCTS: [Product; 8] = [
    ("gdn in", 256, &[1024, 512, 4, 4]),
    ("gdn out", 512, &[256]),
    ("attention in", 256, &[2048, 512, 512]),
    ("attention out", 1024, &[256]),
    ("mlp gate+up", 256, &[768, 768]),
    ("mlp down", 768, &[256]),
    ("head", 256, &[6144]),
    ("9b mlp down", 12288, &[4096]),
];

/// Times `run` on a thread of the engine's pool.
fn time(group: &mut BenchmarkGroup<'_, WallTime>, id: BenchmarkId, mut run: impl FnMut() + Send) {
    let pool = canopy_e2e::threads::pool(None).expect("threads");
    group.bench_function(id, |b| {
        b.iter_custom(|rounds| {
            pool.install(|| {
                canopy_e2e::pool::run(|| {
                    let start = Instant::now();
                    (0..rounds).for_each(|_| run());
                    start.elapsed()
                })
            })
        });
    });
}

/// Repeatable values in [-0.5, 0.5).
fn values(len: usize) -> impl Iterator<Item = f32> {
    let mut state = 1u64;
    (0..len).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    })
}

fn packed((_, inputs, outputs): Product) -> PackedWeight {
    let parts: Vec<Vec<_>> =
        outputs.iter().map(|out| values(out * inputs).map(half::bf16::from_f32).collect()).collect();
    let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
    PackedWeight::from_bf16(inputs, &parts).expect("the table's shapes are valid")
}

/// A weight with its input and output buffers.
struct Case {
    weight: PackedWeight,
    x: Vec<f32>,
    outs: Vec<Vec<f32>>,
}

impl Case {
    fn new(product: Product, rows: usize) -> Self {
        let weight = packed(product);
        let outs = weight.outputs().iter().map(|out| vec![0f32; rows * out]).collect();
        Self { x: values(rows * weight.inputs()).collect(), outs, weight }
    }

    fn run(&mut self) {
        let mut outs: Vec<_> = self.outs.iter_mut().map(Vec::as_mut_slice).collect();
        forward(&self.weight, black_box(&self.x), &mut outs).expect("buffers fit");
    }

    fn multiply_adds(&self) -> u64 {
        (self.x.len() * self.weight.outputs().iter().sum::<usize>()) as u64
    }
}

fn products(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear");
    for product in PRODUCTS {
        for rows in ROWS {
            let mut case = Case::new(product, rows);
            group.throughput(Throughput::Elements(case.multiply_adds()));
            time(&mut group, BenchmarkId::new(product.0, rows), || case.run());
        }
    }
    group.finish();
}

/// The products of one pass of the embedded target, in order: weights come from beyond the second cache.
fn weights(c: &mut Criterion) {
    let [gdn_in, gdn_out, attention_in, attention_out, gate_up, down, head, _] = PRODUCTS;
    let (gdn, attention) = ([gdn_in, gdn_out, gate_up, down], [attention_in, attention_out, gate_up, down]);
    let layers = (0..8).flat_map(|layer| if layer % 4 == 3 { attention } else { gdn });
    let pass: Vec<_> = layers.chain([head]).collect();
    let mut group = c.benchmark_group("weights");
    for rows in ROWS {
        let mut cases: Vec<_> = pass.iter().map(|&product| Case::new(product, rows)).collect();
        let bytes: usize = cases.iter().map(|case| case.weight.bytes()).sum();
        group.throughput(Throughput::Bytes(bytes as u64));
        time(&mut group, BenchmarkId::new("pass", rows), || cases.iter_mut().for_each(Case::run));
    }
    group.finish();
}

/// The delta rule of one layer over one tree.
struct Layer {
    dims: GdnDims,
    batch: TreeBatch,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
    o: Vec<f32>,
    /// Pseudo-values and cumulative gates, or every node's state.
    rest: [Vec<f32>; 2],
}

impl Layer {
    fn new(nodes: usize, variant: Option<Variant>) -> Self {
        let dims = GdnDims::new(2, 4, 128, 128).expect("2 divides 4");
        let batch = TreeBatch::single(DraftTree::random(nodes, 1).expect("up to 256 nodes"), 0);
        let head = |plane: f32| std::iter::repeat_n(plane, dims.v_heads);
        let len = nodes * dims.v_heads * dims.dv;
        Self {
            qkv: values(nodes * dims.qkv_width()).collect(),
            gates: (0..nodes).flat_map(|_| head(-0.05).chain(head(0.5))).collect(),
            state: values(dims.state_len()).collect(),
            o: vec![0.0; len],
            rest: match variant {
                Some(_) => [vec![0.0; len], vec![0.0; nodes * dims.v_heads]],
                None => [vec![0.0; nodes * dims.state_len()], Vec::new()],
            },
            dims,
            batch,
        }
    }

    /// `None` is the baseline.
    fn run(&mut self, variant: Option<Variant>) {
        let Self { dims, batch, qkv, gates, state, o, rest: [first, second] } = self;
        let done = match variant {
            Some(variant) => {
                let input = VerifyInput { qkv: black_box(qkv), gates, state };
                tree_gdn::cpu::verify(
                    *dims,
                    batch,
                    variant,
                    input,
                    VerifyOutput { o, u: first, g_cum: second },
                )
            }
            None => {
                let input = SerialInput { qkv: black_box(qkv), gates, state };
                tree_gdn_serial::cpu::verify(*dims, batch, input, SerialOutput { o, snapshots: first })
            }
        };
        done.expect("buffers fit");
    }
}

fn gdn(c: &mut Criterion) {
    let variants =
        [("serial", None), ("walk", Some(Variant::Walk)), ("forward", Some(Variant::Solve(Solve::Forward)))];
    let mut group = c.benchmark_group("gdn");
    for nodes in [1, 17, 65, 129] {
        let mut baseline = Layer::new(nodes, None);
        baseline.run(None);
        for (name, variant) in variants {
            let mut layer = Layer::new(nodes, variant);
            layer.run(variant);
            let near = layer.o.iter().zip(&baseline.o).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(near, "{name} differs from the baseline at {nodes} nodes");
            group.throughput(Throughput::Elements(nodes as u64));
            time(&mut group, BenchmarkId::new(name, nodes), || layer.run(variant));
        }
    }
    group.finish();
}

criterion_group!(benches, products, weights, gdn);
criterion_main!(benches);
