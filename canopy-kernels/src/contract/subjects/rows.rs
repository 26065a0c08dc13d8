//! The rooms that work row by row: gates, linear, norms, SwiGLU.

use half::bf16;

use super::{Bound, Plane, Scene, Shape, Subject, half_sum, widened};
use crate::contract::scene::Input;
use crate::glue::cpu::Norm;
use crate::linear::cpu::PackedWeight;
use crate::linear::int8;
use crate::{Result, gates, glue, linear};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Gates), Box::new(LINEAR), Box::new(LINEAR_INT8), Box::new(RmsNorm), Box::new(Swiglu)]
}

struct Gates;
struct Linear {
    /// Over int8 weights.
    int8: bool,
}
struct RmsNorm;
struct Swiglu;

pub(in super::super) const HEADS: usize = 3;

/// Width of a row.
pub(in super::super) fn width(scene: &Scene) -> usize {
    match (scene.shape.wide, scene.shape.cuda, scene.shape.narrow) {
        (true, _, _) => 4096,
        (false, true, false) => 264,
        (false, true, true) => 260,
        (false, false, _) => 24,
    }
}

/// Output width of the product.
pub(in super::super) const OUT: usize = 21;

const LINEAR: Linear = Linear { int8: false };
const LINEAR_INT8: Linear = Linear { int8: true };

/// Weights that int8 holds as they are: whole numbers over 128 (over 256, 512 and 1,024 in other rows, so that neighbours have other scales), every
/// group with the largest.
fn int8_weights(width: usize, weights: &mut [f32]) {
    for (row, weights) in weights.chunks_mut(width).enumerate() {
        let unit = 1.0 / (128 << (row % 4)) as f32;
        for group in weights.chunks_mut(int8::GROUP) {
            group.iter_mut().for_each(|w| *w = (*w * 127.0).round() * unit);
            group[0] = 127.0 * unit;
        }
    }
}

const EPS: f32 = 1e-6;

/// Adds what the gates read: ab, a_log and dt_bias.
pub(super) fn with_gates(scene: Scene) -> Scene {
    let scene = scene.with_rows("ab", 2 * HEADS, -4.0, 4.0).with("a_log", HEADS, -2.0, 2.0);
    scene.with("dt_bias", HEADS, -1.0, 1.0)
}

/// 256 + 1, of which bfloat16 keeps 256, into ab, a_log and dt_bias.
pub(super) fn fill_gates(inputs: &mut [Input]) {
    for (input, value) in inputs.iter_mut().zip([256.0, 0.0, 1.0]) {
        input.values.fill(value);
    }
}

/// What a bfloat16 sum makes of them.
pub(super) fn half_gates(ab: &[f32], dt_bias: &[f32], out: &mut [f32]) {
    for (at, out) in out.iter_mut().enumerate() {
        let sum = || -half_sum([ab[at], dt_bias[at % HEADS]]);
        *out = if (at / HEADS).is_multiple_of(2) { sum() } else { 1.0 };
    }
}

impl Subject for Gates {
    fn name(&self) -> String {
        "gates".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-6)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        Ok(with_gates(Scene::new(shape)?))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, 2 * HEADS)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        gates::cpu::forward(HEADS, scene.input(0), scene.input(1), scene.input(2), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        gates::oracle::forward(HEADS, scene.input(0), scene.input(1), scene.input(2))
    }

    fn has_mask(&self) -> bool {
        false
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape::tree(3))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        fill_gates(&mut scene.inputs);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        half_gates(scene.input(0), scene.input(2), out);
    }
}

impl Subject for Linear {
    fn name(&self) -> String {
        if self.int8 { "linear int8".into() } else { "linear".into() }
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-4)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = width(&scene);
        let mut scene = scene.with_rows("x", width, -1.0, 1.0).with("weight", OUT * width, -1.0, 1.0);
        if self.int8 {
            int8_weights(width, &mut scene.inputs[1].values);
        }
        Ok(scene)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("y", scene, OUT)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let weight = match self.int8 {
            true => {
                let mut weights = scene.input(1).iter().map(|&w| bf16::from_f32(w)).collect::<Vec<_>>();
                int8::round_trip(width(scene), &mut weights);
                PackedWeight::from_bf16(width(scene), &[&weights])?
            }
            false => PackedWeight::from_f32(width(scene), &[scene.input(1)])?,
        };
        linear::cpu::forward(&weight, scene.input(0), &mut [out])
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        linear::oracle::forward(width(scene), &widened(scene.input(1)), &widened(scene.input(0)))
    }

    /// `sum |x w|`.
    fn sizes(&self, scene: &Scene) -> Vec<f64> {
        let sizes = |values: &[f32]| values.iter().map(|&x| f64::from(x).abs()).collect::<Vec<_>>();
        linear::oracle::forward(width(scene), &sizes(scene.input(1)), &sizes(scene.input(0)))
    }

    fn has_mask(&self) -> bool {
        false
    }

    /// 4,096 ones (as nearly as int8 holds one): a bfloat16 sum stops at 256.
    fn sums(&self) -> Option<Shape> {
        Some(Shape { wide: true, ..Shape::tree(3) })
    }

    fn fill_sums(&self, scene: &mut Scene) {
        scene.inputs[0].values.fill(1.0);
        scene.inputs[1].values.fill(if self.int8 { 127.0 / 128.0 } else { 1.0 });
    }

    /// An infinite weight leaves its group without a scale.
    fn exact_classes(&self) -> bool {
        !self.int8
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let width = width(scene);
        for (at, out) in out.iter_mut().enumerate() {
            let x = &scene.input(0)[at / OUT * width..][..width];
            let weight = &scene.input(1)[at % OUT * width..][..width];
            *out = half_sum(x.iter().zip(weight).map(|(x, w)| x * w));
        }
    }
}

impl Subject for RmsNorm {
    fn name(&self) -> String {
        "glue rms_norm".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = width(&scene);
        Ok(scene.with_rows("x", width, -1.0, 1.0).with("weight", width, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, width(scene))]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let norm = Norm { weight: scene.input(1), eps: EPS, unit_offset: true };
        glue::cpu::rms_norm(norm, scene.input(0), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let factor = scene.input(1).iter().map(|&w| 1.0 + f64::from(w)).collect::<Vec<_>>();
        let rows = scene.input(0).chunks(width(scene));
        rows.flat_map(|row| glue::oracle::rms_norm(&widened(row), &factor, EPS.into())).collect()
    }

    fn has_mask(&self) -> bool {
        false
    }

    /// The mean of 4,096 ones: a bfloat16 sum makes it 1 / 16.
    fn sums(&self) -> Option<Shape> {
        Some(Shape { wide: true, ..Shape::tree(3) })
    }

    fn fill_sums(&self, scene: &mut Scene) {
        scene.inputs[0].values.fill(1.0);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let width = width(scene);
        for (x, out) in scene.input(0).chunks(width).zip(out.chunks_mut(width)) {
            let mean = half_sum(x.iter().map(|x| x * x)) / width as f32;
            for ((out, x), w) in out.iter_mut().zip(x).zip(scene.input(1)) {
                *out = x / (mean + EPS).sqrt() * (1.0 + w);
            }
        }
    }
}

impl Subject for Swiglu {
    fn name(&self) -> String {
        "glue swiglu".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-6)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let width = width(&scene);
        Ok(scene.with_rows("gate", width, -4.0, 4.0).with_rows("up", width, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, width(scene))]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        glue::cpu::swiglu(scene.input(0), scene.input(1), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let values = scene.input(0).iter().zip(scene.input(1));
        values.map(|(&gate, &up)| glue::oracle::silu(gate.into()) * f64::from(up)).collect()
    }

    fn has_mask(&self) -> bool {
        false
    }
}
