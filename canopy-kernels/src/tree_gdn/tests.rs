//! Every test compares with the float64 oracle, or demands equal bits of two runs that must not differ.
//! `Case` holds one batch with its inputs; its values are drawn from a seed.

use crate::tree::SplitMix64;
use crate::tree_gdn::oracle::{self, OracleInput, OracleOutput};
use crate::tree_gdn::{Tape, Variant, VerifyInput, VerifyOutput, cpu};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

mod bits;

/// Standard normal values.
fn normal(random: &mut SplitMix64, count: usize) -> Vec<f32> {
    let draw = |_| {
        let (a, b) = (random.unit(), random.unit());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    };
    (0..count).map(draw).collect()
}

/// One batch with everything that verify reads.
#[derive(Clone)]
struct Case {
    dims: GdnDims,
    batch: TreeBatch,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    state: Vec<f32>,
}

/// What verify wrote.
#[derive(Clone, PartialEq, Debug)]
struct Verified {
    o: Vec<f32>,
    u: Vec<f32>,
    g_cum: Vec<f32>,
}

impl Case {
    /// Normal q, k, v and state, decays of 0.01 to 1, write strengths of 0 to 1.
    fn random(dims: GdnDims, trees: Vec<DraftTree>, seed: u64) -> Self {
        let slots = (0..trees.len() as i32).rev().collect();
        let batch = TreeBatch::new(trees, slots).expect("distinct slots");
        let mut random = SplitMix64::new(seed);
        let n = batch.rows();
        let qkv = normal(&mut random, n * dims.qkv_width());
        let mut gates = Vec::new();
        for _ in 0..n {
            gates.extend((0..dims.v_heads).map(|_| (0.01f64.ln() * random.unit().powi(2)) as f32));
            gates.extend((0..dims.v_heads).map(|_| random.unit() as f32));
        }
        let state =
            normal(&mut random, batch.sequences() * dims.state_len()).iter().map(|x| 0.3 * x).collect();
        Self { dims, batch, qkv, gates, state }
    }

    fn single(dims: GdnDims, tree: DraftTree, seed: u64) -> Self {
        Self::random(dims, vec![tree], seed)
    }

    fn input(&self) -> VerifyInput<'_> {
        VerifyInput { qkv: &self.qkv, gates: &self.gates, state: &self.state }
    }

    /// Runs verify into buffers full of NaN.
    fn verify(&self, variant: Variant) -> Verified {
        let n = self.batch.rows();
        let plane = n * self.dims.v_heads;
        let (mut o, mut u) = (vec![f32::NAN; plane * self.dims.dv], vec![f32::NAN; plane * self.dims.dv]);
        let mut g_cum = vec![f32::NAN; plane];
        let output = VerifyOutput { o: &mut o, u: &mut u, g_cum: &mut g_cum };
        cpu::verify(self.dims, &self.batch, variant, self.input(), output).expect("sizes fit");
        Verified { o, u, g_cum }
    }

    /// Commits one path per sequence and returns the pool.
    fn commit(&self, variant: Variant, verified: &Verified, paths: &[Vec<usize>]) -> Vec<f32> {
        let paths = AcceptedPaths::new(&self.batch, paths).expect("paths of the trees");
        let mut state = self.state.clone();
        let tape = Tape { qkv: &self.qkv, gates: &self.gates, u: &verified.u, g_cum: &verified.g_cum };
        cpu::commit(self.dims, &paths, variant, tape, &mut state).expect("sizes fit");
        state
    }

    /// The given rows of one tree and its state, as a case of their own on slot 0.
    fn alone(&self, tree: DraftTree, rows: &[usize], state: &[f32]) -> Self {
        let pick = |plane: &[f32], width: usize| -> Vec<f32> {
            rows.iter().flat_map(|&row| plane[row * width..(row + 1) * width].iter().copied()).collect()
        };
        Self {
            dims: self.dims,
            batch: TreeBatch::single(tree, 0),
            qkv: pick(&self.qkv, self.dims.qkv_width()),
            gates: pick(&self.gates, 2 * self.dims.v_heads),
            state: state.to_vec(),
        }
    }

    /// The oracle on the (only) tree.
    fn oracle(&self) -> OracleOutput {
        let [qkv, gates, state] = [&self.qkv, &self.gates, &self.state].map(|x| widen(x));
        let input = OracleInput { qkv: &qkv, gates: &gates, state: &state };
        oracle::verify(self.dims, &self.batch.trees()[0], input)
    }
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn max_abs(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

/// Bits, so that NaN equals NaN and 0 differs from -0.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Every variant.
fn variants() -> impl Iterator<Item = Variant> {
    Variant::ALL.into_iter().map(|(_, variant)| variant)
}
