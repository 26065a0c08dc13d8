//! CPU products at the embedded model's shapes and one of the 9B's: time, and the rates that follow from it.
//!
//! `cargo bench -p canopy-bench --bench cpu`; Criterion prints elements/s (one element = one multiply-add, so twice
//! that is the FLOP rate). The group `weights` reads every weight once and reports bytes/s.

use std::hint::black_box;

use canopy_kernels::linear::cpu::{PackedWeight, forward};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

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
            let id = BenchmarkId::new(product.0, rows);
            group.bench_function(id, |b| b.iter(|| case.run()));
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
        group.bench_function(BenchmarkId::new("pass", rows), |b| {
            b.iter(|| cases.iter_mut().for_each(Case::run));
        });
    }
    group.finish();
}

criterion_group!(benches, products, weights);
criterion_main!(benches);
