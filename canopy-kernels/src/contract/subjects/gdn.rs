//! tree_gdn: verify and commit, the walk and the solves that serve.

use super::{Bound, Plane, Scene, Shape, Subject, half, widened};
use crate::tree_gdn::oracle::{self, OracleInput};
use crate::tree_gdn::{Solve, Tape, Variant, VerifyInput, VerifyOutput, cpu};
use crate::{AcceptedPaths, DraftTree, GdnDims, Result, TreeBatch};

/// Neumann, squaring and the dense inverse exist for comparison and keep no contract.
const VARIANTS: [(&str, Variant); 5] = [
    ("walk", Variant::Walk),
    ("forward", Variant::Solve(Solve::Forward)),
    ("blocked32", Variant::Solve(Solve::Blocked(32))),
    ("level", Variant::Solve(Solve::Level)),
    ("chains", Variant::Solve(Solve::Chains)),
];

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for (name, variant) in VARIANTS {
        subjects.push(Box::new(Verify { name, variant }));
    }
    for (name, variant) in VARIANTS.into_iter().take(2) {
        let run = move |scene: &Scene, pool: &mut [f32]| verify_and_commit(variant, scene, pool);
        subjects.push(Box::new(Commit { name: format!("tree_gdn commit {name}"), run }));
    }
    subjects.push(Box::new(Round));
    subjects.push(Box::new(Chain));
    subjects
}

/// Commit of the last round's paths, then a verify of the same trees from there: planes o, u, g_cum and the pool.
struct Round;

/// Verify and commit of whole chains: planes o, u, g_cum and the pool.
struct Chain;

struct Verify {
    name: &'static str,
    variant: Variant,
}

/// A commit in some form of the delta rule: `run` verifies the scene and commits its paths into the pool.
pub(super) struct Commit<F> {
    pub name: String,
    pub run: F,
}

pub(in super::super) fn dims(scene: &Scene) -> GdnDims {
    match (scene.shape.wide, scene.shape.cuda) {
        (true, true) => GdnDims { k_heads: 4, v_heads: 8, dk: 128, dv: 128 },
        (true, false) | (false, true) => GdnDims { k_heads: 1, v_heads: 2, dk: 128, dv: 128 },
        (false, false) => GdnDims { k_heads: 1, v_heads: 2, dk: 16, dv: 8 },
    }
}

/// Inputs 0, 1, 2 and 3: qkv, g, beta and the state pool.
pub(super) fn scene(shape: &Shape) -> Result<Scene> {
    let scene = Scene::new(shape)?;
    let dims = dims(&scene);
    let ([g, beta], spread) = if shape.hard { ([-1e-3, 0.98], 0.02) } else { ([-0.5, 0.0], 1.0) };
    let mut scene = scene
        .with_rows("qkv", dims.qkv_width(), -1.0, 1.0)
        .with_rows("g", dims.v_heads, g, 0.0)
        .with_rows("beta", dims.v_heads, beta, 1.0)
        .with_slots("state", dims.state_len(), -1.0, 1.0);
    if shape.hard {
        let keys = dims.k_heads * dims.dk..2 * dims.k_heads * dims.dk;
        let base = scene.input(0)[keys.clone()].to_vec();
        for row in scene.inputs[0].values.chunks_mut(dims.qkv_width()) {
            row[keys.clone()].iter_mut().zip(&base).for_each(|(k, base)| *k = base + spread * *k);
        }
    }
    Ok(scene)
}

/// `[N, 2, Hv]` from the two planes.
pub(in super::super) fn gates(scene: &Scene) -> Vec<f32> {
    let heads = dims(scene).v_heads;
    let planes = scene.input(1).chunks(heads).zip(scene.input(2).chunks(heads));
    planes.flat_map(|(g, beta)| [g, beta].concat()).collect()
}

/// A long chain of equal keys with small write strengths: each step adds less than half a unit of a bfloat16 state.
pub(in super::super) fn fill_sums(scene: &mut Scene) {
    for (input, value) in scene.inputs.iter_mut().zip([1.0, 0.0, 1.0 / 512.0, 0.0]) {
        input.values.fill(value);
    }
}

/// The planes of a verify.
pub(super) fn planes(scene: &Scene) -> Vec<Plane> {
    let dims = dims(scene);
    let values = |name| Plane::rows(name, scene, dims.v_heads * dims.dv);
    vec![values("o"), values("u"), Plane::rows("g_cum", scene, dims.v_heads)]
}

/// The planes o, u and g_cum of a verify.
fn verify(variant: Variant, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (dims, rows) = (dims(scene), scene.batch.rows());
    let (o, rest) = out.split_at_mut(rows * dims.v_heads * dims.dv);
    let (u, g_cum) = rest.split_at_mut(rows * dims.v_heads * dims.dv);
    let input = VerifyInput { qkv: scene.input(0), gates: &gates(scene), state: scene.input(3) };
    cpu::verify(dims, &scene.batch, variant, input, VerifyOutput { o, u, g_cum })
}

fn verify_len(scene: &Scene) -> usize {
    scene.batch.rows() * dims(scene).v_heads * (2 * dims(scene).dv + 1)
}

/// Each tree's rows and slot in float64.
pub(super) fn per_tree<T>(
    scene: &Scene,
    mut each: impl FnMut(usize, &DraftTree, usize, OracleInput<'_>) -> T,
) -> Vec<T> {
    let (dims, gates) = (dims(scene), gates(scene));
    let mut results = Vec::new();
    for (first, tree, slot) in scene.batch.iter() {
        let slot = slot.unwrap_or_default();
        let part =
            |values: &[f32], width: usize| widened(&values[first * width..(first + tree.len()) * width]);
        let (qkv, gates) = (part(scene.input(0), dims.qkv_width()), part(&gates, 2 * dims.v_heads));
        let state = widened(&scene.input(3)[slot * dims.state_len()..(slot + 1) * dims.state_len()]);
        results.push(each(first, tree, slot, OracleInput { qkv: &qkv, gates: &gates, state: &state }));
    }
    results
}

impl Subject for Verify {
    fn name(&self) -> String {
        format!("tree_gdn verify {}", self.name)
    }

    fn family(&self) -> String {
        "tree_gdn verify".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        planes(scene)
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        verify(self.variant, scene, out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        verified(scene, None)
    }

    fn exact_classes(&self) -> bool {
        false
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape::chain(256))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        fill_sums(scene);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let (dims, rows) = (dims(scene), scene.batch.rows());
        let (o, rest) = out.split_at_mut(rows * dims.v_heads * dims.dv);
        let (u, g_cum) = rest.split_at_mut(rows * dims.v_heads * dims.dv);
        g_cum.fill(0.0);
        half_states(scene, |node, one, _| {
            let width = dims.v_heads * dims.dv;
            o[node * width..(node + 1) * width].copy_from_slice(&one[..width]);
            u[node * width..(node + 1) * width].copy_from_slice(&one[width..2 * width]);
        });
    }
}

/// Serial decoding of a chain whose state is kept in bfloat16; hands out each node's verify and the state after it.
pub(super) fn half_states(scene: &Scene, mut each: impl FnMut(usize, &[f32], &[f32])) {
    let (dims, mut state) = (dims(scene), scene.input(3).to_vec());
    let Ok(batch) = DraftTree::chain(1).map(|root| TreeBatch::single(root, 0)) else { return };
    let Ok(paths) = AcceptedPaths::new(&batch, &[vec![0]]) else { return };
    let gates = gates(scene);
    for node in 0..scene.batch.rows() {
        let qkv = &scene.input(0)[node * dims.qkv_width()..(node + 1) * dims.qkv_width()];
        let gates = &gates[node * 2 * dims.v_heads..(node + 1) * 2 * dims.v_heads];
        let mut one = vec![0f32; dims.v_heads * (2 * dims.dv + 1)];
        let (o, rest) = one.split_at_mut(dims.v_heads * dims.dv);
        let (u, g_cum) = rest.split_at_mut(dims.v_heads * dims.dv);
        let input = VerifyInput { qkv, gates, state: &state };
        let verified = cpu::verify(dims, &batch, Variant::Walk, input, VerifyOutput { o, u, g_cum });
        let u = one[dims.v_heads * dims.dv..2 * dims.v_heads * dims.dv].to_vec();
        let g_cum = one[2 * dims.v_heads * dims.dv..].to_vec();
        let tape = Tape { qkv, gates, u: &u, g_cum: &g_cum };
        if verified.and_then(|()| cpu::commit(dims, &paths, Variant::Walk, tape, &mut state)).is_err() {
            return;
        }
        state.iter_mut().for_each(|x| *x = half(*x));
        each(node, &one, &state);
    }
}

/// The pool after every path's commit, in float64.
fn committed(scene: &Scene) -> Vec<f64> {
    let mut pool = widened(scene.input(3));
    let len = dims(scene).state_len();
    let states = per_tree(scene, |_, tree, slot, input| {
        (slot, oracle::commit(dims(scene), tree, tree.len() - 1, input))
    });
    for (slot, state) in states {
        pool[slot * len..(slot + 1) * len].copy_from_slice(&state);
    }
    pool
}

fn verify_and_commit(variant: Variant, scene: &Scene, pool: &mut [f32]) -> Result<()> {
    let (dims, rows) = (dims(scene), scene.batch.rows());
    let mut planes = vec![0f32; verify_len(scene)];
    verify(variant, scene, &mut planes)?;
    let values = rows * dims.v_heads * dims.dv;
    let (u, g_cum) = (&planes[values..2 * values], &planes[2 * values..]);
    let tape = Tape { qkv: scene.input(0), gates: &gates(scene), u, g_cum };
    cpu::commit(dims, &scene.paths, variant, tape, pool)
}

impl<F: Fn(&Scene, &mut [f32]) -> Result<()> + Send + Sync> Subject for Commit<F> {
    fn family(&self) -> String {
        "tree_gdn commit".into()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn bound(&self) -> Bound {
        Bound::Element(5e-6)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::slots("state", scene, dims(scene).state_len())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(scene.input(3));
        (self.run)(scene, out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        committed(scene)
    }

    fn exact_classes(&self) -> bool {
        false
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape::chain(256))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        fill_sums(scene);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        half_states(scene, |_, _, state| out.copy_from_slice(state));
    }
}

/// Float64's planes and pool of a verify, from `before` where it is not the scene's pool.
fn verified(scene: &Scene, before: Option<&[f64]>) -> Vec<f64> {
    let len = dims(scene).state_len();
    let trees = per_tree(scene, |_, tree, slot, input| {
        let state = before.map_or(input.state, |pool| &pool[slot * len..(slot + 1) * len]);
        oracle::verify(dims(scene), tree, OracleInput { state, ..input })
    });
    let planes = trees.iter().map(|tree| &tree.o).chain(trees.iter().map(|tree| &tree.u));
    planes.chain(trees.iter().map(|tree| &tree.g_cum)).flatten().copied().collect()
}

fn planes_and_pool(scene: &Scene) -> Vec<Plane> {
    let mut all = planes(scene);
    all.push(Plane::slots("state", scene, dims(scene).state_len()));
    all
}

impl Subject for Round {
    fn name(&self) -> String {
        "tree_gdn round walk".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        planes_and_pool(scene)
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (planes, pool) = out.split_at_mut(verify_len(scene));
        pool.copy_from_slice(scene.input(3));
        verify_and_commit(Variant::Walk, scene, pool)?;
        let mut next = scene.clone();
        next.inputs[3].values.copy_from_slice(pool);
        verify(Variant::Walk, &next, planes)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let pool = committed(scene);
        let mut all = verified(scene, Some(&pool));
        all.extend(pool);
        all
    }

    fn exact_classes(&self) -> bool {
        false
    }
}

impl Subject for Chain {
    fn name(&self) -> String {
        "tree_gdn chain walk".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(&Shape { chain: true, ..shape.clone() })
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        planes_and_pool(scene)
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (planes, pool) = out.split_at_mut(verify_len(scene));
        pool.copy_from_slice(scene.input(3));
        verify(Variant::Walk, scene, planes)?;
        verify_and_commit(Variant::Walk, scene, pool)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let mut all = verified(scene, None);
        all.extend(committed(scene));
        all
    }

    /// A chain with a parent off by one is no chain.
    fn has_mask(&self) -> bool {
        false
    }

    fn exact_classes(&self) -> bool {
        false
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape::chain(256))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        fill_sums(scene);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let (rows, heads, dv) = (scene.batch.rows(), dims(scene).v_heads, dims(scene).dv);
        let at = verify_len(scene);
        half_states(scene, |node, one, state| {
            for plane in 0..2 {
                let from = plane * heads * dv;
                out[(plane * rows + node) * heads * dv..][..heads * dv]
                    .copy_from_slice(&one[from..][..heads * dv]);
            }
            out[2 * rows * heads * dv + node * heads..][..heads].copy_from_slice(&one[2 * heads * dv..]);
            out[at..].copy_from_slice(state);
        });
    }
}
