//! Every test compares with the float64 oracle, or demands equal bits of two runs that must not differ.
//! `Case` holds one batch with its inputs; its values are drawn from a seed.

use proptest::prelude::*;

use crate::tree::SplitMix64;
use crate::tree::tests::arb_tree;
use crate::tree_gdn::oracle::{self, OracleInput, OracleOutput};
use crate::tree_gdn::{Solve, Tape, Variant, VerifyInput, VerifyOutput, cpu};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

mod bits;
mod errors;
mod nonfinite;
mod numerics;
mod thousand;

/// Odd sizes, so that every vector loop has a rest.
const ODD: GdnDims = GdnDims { k_heads: 2, v_heads: 4, dk: 20, dv: 19 };
/// One production head.
const HEAD: GdnDims = GdnDims { k_heads: 1, v_heads: 1, dk: 128, dv: 128 };

/// Largest f32 error against the oracle: 1e-5 is 80 ulp of 1, for sums over up to 256 nodes.
const MAX_ABS: f64 = 1e-5;
/// Largest relative (Frobenius) f32 error against the oracle.
const RELATIVE: f64 = 1e-5;

/// Standard normal values.
pub(crate) fn normal(random: &mut SplitMix64, count: usize) -> Vec<f32> {
    let draw = |_| {
        let (a, b) = (random.unit(), random.unit());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    };
    (0..count).map(draw).collect()
}

/// Which gates and keys a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flavour {
    /// Decays of 0.01 to 1, write strengths of 0 to 1.
    Plain,
    /// All keys nearly equal, decay 1, write strength 1.
    EqualKeys,
    /// Gates of 0 and -30, write strengths of 0, 0.5 and 1.
    Extreme,
}

/// One batch with everything that verify reads.
#[derive(Clone, Debug)]
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
    /// Normal q, k and v, a small normal state; the first tree has the last slot.
    fn new(dims: GdnDims, trees: Vec<DraftTree>, flavour: Flavour, seed: u64) -> Self {
        let slots = (0..trees.len() as i32).rev().collect();
        let batch = TreeBatch::new(trees, slots).expect("distinct slots");
        let mut random = SplitMix64::new(seed);
        let n = batch.rows();
        let qkv = normal(&mut random, n * dims.qkv_width());
        let mut gates = Vec::new();
        for _ in 0..n {
            let mut draw = |plain: &dyn Fn(f64) -> f64, extreme: [f32; 3], equal: f32| match flavour {
                Flavour::Plain => plain(random.unit()) as f32,
                Flavour::EqualKeys => equal,
                Flavour::Extreme => extreme[random.below(3)],
            };
            let plain_g = |x: f64| 0.01f64.ln() * x * x;
            gates.extend((0..dims.v_heads).map(|_| draw(&plain_g, [0.0, 0.0, -30.0], 0.0)));
            gates.extend((0..dims.v_heads).map(|_| draw(&|x| x, [0.0, 0.5, 1.0], 1.0)));
        }
        let state =
            normal(&mut random, batch.sequences() * dims.state_len()).iter().map(|x| 0.3 * x).collect();
        let mut case = Self { dims, batch, qkv, gates, state };
        if flavour == Flavour::EqualKeys {
            case.equal_keys(&mut random, 0.02);
        }
        case
    }

    fn plain(dims: GdnDims, tree: DraftTree, seed: u64) -> Self {
        Self::new(dims, vec![tree], Flavour::Plain, seed)
    }

    /// Every key becomes the first row's unit key plus noise.
    fn equal_keys(&mut self, random: &mut SplitMix64, noise: f32) {
        let (width, dk) = (self.dims.qkv_width(), self.dims.dk);
        let range = self.dims.k_heads * dk..2 * self.dims.k_heads * dk;
        let mut first = self.qkv[range.clone()].to_vec();
        for head in first.chunks_mut(dk) {
            let norm = head.iter().map(|x| x * x).sum::<f32>().sqrt();
            head.iter_mut().for_each(|x| *x /= norm);
        }
        for row in self.qkv.chunks_mut(width) {
            for (x, (first, shake)) in
                row[range.clone()].iter_mut().zip(first.iter().zip(normal(random, first.len())))
            {
                *x = first + noise * shake;
            }
        }
    }

    fn tree(&self) -> &DraftTree {
        &self.batch.trees()[0]
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

    /// The given packed rows as the nodes of `tree`, continuing `state` on slot 0.
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

    /// Decodes the path to `node` one token per round: every round's o and u, and the final state.
    fn serial(&self, node: usize) -> (Vec<Verified>, Vec<f32>) {
        let mut state = self.state.clone();
        let mut rounds = Vec::new();
        for row in self.tree().path(node) {
            let round = self.alone(DraftTree::chain(1).expect("one node"), &[row], &state);
            let verified = round.verify(Variant::Walk);
            state = round.commit(Variant::Walk, &verified, &[vec![0]]);
            rounds.push(verified);
        }
        (rounds, state)
    }

    /// The oracle on the (only) tree.
    fn oracle(&self) -> OracleOutput {
        let [qkv, gates, state] = [&self.qkv, &self.gates, &self.state].map(|x| widen(x));
        oracle::verify(self.dims, self.tree(), OracleInput { qkv: &qkv, gates: &gates, state: &state })
    }

    /// The oracle's state after the path to `node` of the (only) tree.
    fn oracle_state(&self, node: usize) -> Vec<f64> {
        let [qkv, gates, state] = [&self.qkv, &self.gates, &self.state].map(|x| widen(x));
        oracle::commit(self.dims, self.tree(), node, OracleInput { qkv: &qkv, gates: &gates, state: &state })
    }
}

impl Verified {
    /// Bits of everything that one packed row received.
    fn row(&self, dims: GdnDims, row: usize) -> Vec<u32> {
        let width = dims.v_heads * dims.dv;
        let (o, u) = (&self.o[row * width..][..width], &self.u[row * width..][..width]);
        [o, u, &self.g_cum[row * dims.v_heads..][..dims.v_heads]]
            .concat()
            .iter()
            .map(|x| x.to_bits())
            .collect()
    }

    fn bits(&self) -> Vec<u32> {
        [bits(&self.o), bits(&self.u), bits(&self.g_cum)].concat()
    }
}

/// A tree with inputs of any flavour.
fn arb_case(nodes: usize) -> impl Strategy<Value = Case> {
    let flavour = prop_oneof![Just(Flavour::Plain), Just(Flavour::EqualKeys), Just(Flavour::Extreme)];
    (arb_tree(1..=nodes), flavour, any::<u64>())
        .prop_map(|(tree, flavour, seed)| Case::new(ODD, vec![tree], flavour, seed))
}

/// Every variant.
fn variants() -> impl Iterator<Item = Variant> {
    Variant::ALL.into_iter().map(|(_, variant)| variant)
}

/// The variants that hold their bound on every input: all but the two series.
fn stable_variants() -> impl Iterator<Item = Variant> {
    let series = [Variant::Solve(Solve::Neumann), Variant::Solve(Solve::Squaring)];
    variants().filter(move |variant| !series.contains(variant))
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Largest difference; NaN when there is one.
fn max_abs(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - b).abs());
    differences.fold(0.0, |max, d| if d > max || d.is_nan() { d } else { max })
}

/// Frobenius norm of the difference over that of `b`.
fn relative(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
    (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Bits, so that NaN equals NaN and 0 differs from -0.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
