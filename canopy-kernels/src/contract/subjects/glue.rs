//! Fused row-wise steps: norms with a sum or a gate, the attention's output gate, heads normed, rotated and appended; top tokens.

use super::{Bound, Plane, Scene, Shape, Subject, half_sum, widened};
use crate::glue::cpu::{Norm, QkNormRope};
use crate::glue::{cpu, oracle};
use crate::top_tokens::{self, Row, row_words};
use crate::{AttnDims, Result};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(AddNorm),
        Box::new(GatedNorm),
        Box::new(AttnGate),
        Box::new(RopeAppend),
        Box::new(Append),
        Box::new(TopTokens),
    ]
}

struct AddNorm;
struct GatedNorm;
struct AttnGate;
struct RopeAppend;
struct Append;
struct TopTokens;

pub(in super::super) const EPS: f32 = 1e-6;
/// Best tokens of a row.
pub(in super::super) const BEST: usize = 8;

/// Width of a row.
pub(in super::super) fn width(scene: &Scene) -> usize {
    super::rows::width(scene)
}

fn norm(weight: &[f32]) -> Norm<'_> {
    Norm { weight, eps: EPS, unit_offset: true }
}

fn factor(weight: &[f32]) -> Vec<f64> {
    weight.iter().map(|&w| 1.0 + f64::from(w)).collect()
}

impl Subject for AddNorm {
    fn name(&self) -> String {
        "glue add_rms_norm".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = width(&scene);
        let scene = scene.with_rows("x", width, -1.0, 1.0).with_rows("residual", width, -1.0, 1.0);
        Ok(scene.with("weight", width, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        ["sum", "out"].map(|name| Plane::rows(name, scene, width(scene))).into()
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (sum, out) = out.split_at_mut(scene.input(0).len());
        cpu::add_rms_norm(norm(scene.input(2)), scene.input(0), scene.input(1), sum, out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let sum = scene.input(0).iter().zip(scene.input(1)).map(|(x, y)| f64::from(*x) + f64::from(*y));
        let mut all = sum.collect::<Vec<_>>();
        let factor = factor(scene.input(2));
        let normed = all.chunks(width(scene)).flat_map(|row| oracle::rms_norm(row, &factor, EPS.into()));
        let normed = normed.collect::<Vec<_>>();
        all.extend(normed);
        all
    }

    fn has_mask(&self) -> bool {
        false
    }
}

impl Subject for GatedNorm {
    fn name(&self) -> String {
        "glue gated_rms_norm".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = width(&scene);
        let scene = scene.with_rows("o", width, -1.0, 1.0).with_rows("z", width, -4.0, 4.0);
        Ok(scene.with("weight", width, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, width(scene))]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        cpu::gated_rms_norm(norm(scene.input(2)), scene.input(0), scene.input(1), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let (width, factor) = (width(scene), factor(scene.input(2)));
        let rows = scene.input(0).chunks(width).zip(scene.input(1).chunks(width));
        let row = |(o, z): (&[f32], &[f32])| {
            let normed = oracle::rms_norm(&widened(o), &factor, EPS.into());
            normed.into_iter().zip(z).map(|(o, &z)| o * oracle::silu(z.into())).collect::<Vec<_>>()
        };
        rows.flat_map(row).collect()
    }

    fn has_mask(&self) -> bool {
        false
    }
}

/// Heads of the attention's steps, and half the rotated width.
pub(in super::super) fn heads(scene: &Scene) -> (AttnDims, usize) {
    let Shape { cuda, narrow, wide, .. } = scene.shape;
    let heads = |q_heads, kv_heads, head_dim| AttnDims { q_heads, kv_heads, head_dim };
    match (cuda, narrow, wide) {
        (false, _, _) => (heads(2, 1, 12), 2),
        (true, false, false) => (heads(4, 1, 256), 32),
        (true, false, true) => (heads(16, 4, 256), 32),
        (true, true, false) => (heads(4, 1, 128), 64),
        (true, true, true) => (heads(32, 8, 128), 64),
    }
}

impl Subject for AttnGate {
    fn name(&self) -> String {
        "glue attn_gate".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-6)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = heads(&scene).0.q_width();
        Ok(scene.with_rows("attn", width, -1.0, 1.0).with_rows("q_proj", 2 * width, -4.0, 4.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, heads(scene).0.q_width())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        cpu::attn_gate(heads(scene).0, scene.input(0), scene.input(1), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let d = heads(scene).0.head_dim;
        let gate = |i: usize| f64::from(scene.input(1)[i / d * 2 * d + d + i % d]);
        let attn = scene.input(0).iter().enumerate();
        attn.map(|(i, &x)| f64::from(x) * oracle::sigmoid(gate(i))).collect()
    }

    fn has_mask(&self) -> bool {
        false
    }
}

/// `[half]`.
pub(in super::super) fn inv_freq(half: usize) -> Vec<f32> {
    (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64) as f32).collect()
}

/// Far apart, so that angles are large.
pub(in super::super) fn positions(scene: &Scene) -> Vec<i32> {
    let rows = |(tree, &len): (&crate::DraftTree, &i32)| {
        tree.depths().iter().map(|&depth| 1000 * len + depth as i32).collect::<Vec<_>>()
    };
    scene.batch.trees().iter().zip(&scene.lens).flat_map(rows).collect()
}

/// The pool row of every packed row: behind the committed ones.
pub(in super::super) fn destinations(scene: &Scene) -> Vec<i32> {
    let rows = |((_, tree, slot), &len): ((usize, &crate::DraftTree, Option<usize>), &i32)| {
        let first = slot.map_or(0, |slot| (slot * scene.capacity) as i32 + len);
        (0..tree.len() as i32).map(|node| first + node).collect::<Vec<_>>()
    };
    scene.batch.iter().zip(&scene.lens).flat_map(rows).collect()
}

/// `pool` with packed rows of `width` at their destinations.
fn appended<T: Copy>(scene: &Scene, width: usize, rows: &[T], pool: &mut [T]) {
    for (row, to) in rows.chunks(width).zip(destinations(scene)) {
        pool[to as usize * width..][..width].copy_from_slice(row);
    }
}

/// Planes q and both pools.
impl Subject for RopeAppend {
    fn name(&self) -> String {
        "glue qk_norm_rope_append".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let (dims, capacity) = (heads(&scene).0, scene.capacity);
        let slot = capacity * dims.kv_width();
        Ok(scene
            .with_rows("q_proj", 2 * dims.q_width(), -1.0, 1.0)
            .with_rows("k_proj", dims.kv_width(), -1.0, 1.0)
            .with_rows("v_proj", dims.kv_width(), -1.0, 1.0)
            .with("q_weight", dims.head_dim, -1.0, 1.0)
            .with("k_weight", dims.head_dim, -1.0, 1.0)
            .with_slots("keys", slot, -1.0, 1.0)
            .with_slots("values", slot, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        let dims = heads(scene).0;
        let pool = |name| Plane::slots(name, scene, scene.capacity * dims.kv_width());
        vec![Plane::rows("q", scene, dims.q_width()), pool("keys"), pool("values")]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (dims, half) = heads(scene);
        let (q, pools) = out.split_at_mut(scene.batch.rows() * dims.q_width());
        let (keys, values) = pools.split_at_mut(scene.input(5).len());
        keys.copy_from_slice(scene.input(5));
        values.copy_from_slice(scene.input(6));
        let mut k = vec![0f32; scene.input(1).len()];
        let args = QkNormRope {
            dims,
            gated: true,
            q_norm: norm(scene.input(3)),
            k_norm: norm(scene.input(4)),
            inv_freq: &inv_freq(half),
            positions: &positions(scene),
        };
        cpu::qk_norm_rope(args, scene.input(0), scene.input(1), q, &mut k)?;
        appended(scene, dims.kv_width(), &k, keys);
        appended(scene, dims.kv_width(), scene.input(2), values);
        Ok(())
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let (dims, half) = heads(scene);
        let (d, freq) = (dims.head_dim, inv_freq(half));
        let rotated = |head: &[f32], weight: &[f32], position: i32| {
            let angles: Vec<f64> = freq.iter().map(|&f| (position as f32 * f).into()).collect();
            oracle::rotate(&oracle::rms_norm(&widened(head), &factor(weight), EPS.into()), &angles)
        };
        let (mut q, mut k) = (Vec::new(), Vec::new());
        for (row, position) in positions(scene).into_iter().enumerate() {
            for head in scene.input(0)[row * 2 * dims.q_width()..][..2 * dims.q_width()].chunks(2 * d) {
                q.extend(rotated(&head[..d], scene.input(3), position));
            }
            for head in scene.input(1)[row * dims.kv_width()..][..dims.kv_width()].chunks(d) {
                k.extend(rotated(head, scene.input(4), position));
            }
        }
        let (mut keys, mut values) = (widened(scene.input(5)), widened(scene.input(6)));
        appended(scene, dims.kv_width(), &k, &mut keys);
        appended(scene, dims.kv_width(), &widened(scene.input(2)), &mut values);
        [q, keys, values].concat()
    }
}

/// Rows of keys and values into both pools.
impl Subject for Append {
    fn name(&self) -> String {
        "glue kv_append".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let (width, capacity) = (heads(&scene).0.kv_width(), scene.capacity);
        Ok(scene
            .with_rows("k", width, -1.0, 1.0)
            .with_rows("v", width, -1.0, 1.0)
            .with_slots("keys", capacity * width, -1.0, 1.0)
            .with_slots("values", capacity * width, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        let width = scene.capacity * heads(scene).0.kv_width();
        ["keys", "values"].map(|name| Plane::slots(name, scene, width)).into()
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (width, (keys, values)) = (heads(scene).0.kv_width(), out.split_at_mut(scene.input(2).len()));
        keys.copy_from_slice(scene.input(2));
        values.copy_from_slice(scene.input(3));
        appended(scene, width, scene.input(0), keys);
        appended(scene, width, scene.input(1), values);
        Ok(())
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let mut pools = [widened(scene.input(2)), widened(scene.input(3))];
        for (pool, rows) in pools.iter_mut().zip([0, 1]) {
            appended(scene, heads(scene).0.kv_width(), &widened(scene.input(rows)), pool);
        }
        pools.concat()
    }
}

pub(in super::super) fn vocab(scene: &Scene) -> usize {
    match (scene.shape.wide, scene.shape.cuda) {
        (true, _) => 6144,
        (false, true) => 3001,
        (false, false) => 300,
    }
}

/// The words of `out` as numbers.
pub(in super::super) fn read_rows(words: &[u32], out: &mut [f32]) -> Result<()> {
    for (words, out) in words.chunks(row_words(BEST)).zip(out.chunks_mut(row_words(BEST))) {
        let row = Row::new(words)?;
        (out[0], out[1]) = (words[0] as f32, row.ln_sum());
        for (place, (token, logit)) in row.best().enumerate() {
            (out[2 + place], out[2 + BEST + place]) = (logit, token as f32);
        }
    }
    Ok(())
}

impl Subject for TopTokens {
    fn name(&self) -> String {
        "top_tokens".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-6)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let vocab = vocab(&scene);
        Ok(scene.with_rows("logits", vocab, -8.0, 8.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, row_words(BEST))]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let mut words = vec![0u32; out.len()];
        top_tokens::cpu::forward(vocab(scene), BEST, scene.input(0), &mut words)?;
        read_rows(&words, out)
    }

    /// NaN ranks above infinity; a row with either is no distribution, nor is one of nothing but -infinity.
    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let row = |logits: &[f32]| {
            let mut order = (0..logits.len()).collect::<Vec<_>>();
            let rank = |i: usize| if logits[i].is_nan() { (1, 0.0) } else { (0, logits[i] + 0.0) };
            order.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).expect("no NaN left").then(a.cmp(&b)));
            let best = f64::from(logits[order[0]]);
            let ln_sum = logits.iter().map(|&x| (f64::from(x) - best).exp()).sum::<f64>().ln();
            let flags = match (best.is_finite(), logits.contains(&f32::NEG_INFINITY)) {
                (false, _) => top_tokens::NO_DISTRIBUTION,
                (true, true) => top_tokens::FORBIDDEN,
                (true, false) => 0,
            };
            let ln_sum = if best.is_finite() { ln_sum } else { f64::NAN };
            let logits = order[..BEST].iter().map(|&i| f64::from(logits[i])).collect::<Vec<_>>();
            let tokens = order[..BEST].iter().map(|&i| i as f64).collect();
            [vec![f64::from(flags), ln_sum], logits, tokens].concat()
        };
        scene.input(0).chunks(vocab(scene)).flat_map(row).collect()
    }

    fn has_mask(&self) -> bool {
        false
    }

    /// Equal logits: their number.
    fn sums(&self) -> Option<Shape> {
        Some(Shape::tree(3))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        scene.inputs[0].values.fill(0.0);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let sum = half_sum(std::iter::repeat_n(1.0, vocab(scene)));
        for out in out.chunks_mut(row_words(BEST)) {
            out.fill(0.0);
            out[1] = sum.ln();
            (0..BEST).for_each(|place| out[2 + BEST + place] = place as f32);
        }
    }
}
