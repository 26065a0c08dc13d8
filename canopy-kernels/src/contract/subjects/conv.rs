//! tree_conv: verify, alone and with the gates in its launch, and commit.

use super::rows::{HEADS, fill_gates, half_gates, with_gates};
use super::{Bound, Plane, Scene, Shape, Subject, half_sum, widened};
use crate::tree_conv::{cpu, oracle};
use crate::{ConvDims, Result, gates};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Verify), Box::new(VerifyGates), Box::new(Commit)]
}

struct Verify;
struct VerifyGates;
struct Commit;

pub(in super::super) fn dims(scene: &Scene) -> ConvDims {
    let channels = match (scene.shape.wide, scene.shape.cuda) {
        (true, _) => 1024,
        (false, true) => 132,
        (false, false) => 11,
    };
    ConvDims { channels }
}

/// Inputs 0, 1 and 2: x, weight and the conv-state pool.
fn scene(shape: &Shape) -> Result<Scene> {
    let scene = Scene::new(shape)?;
    let dims = dims(&scene);
    Ok(scene
        .with_rows("x", dims.channels, -1.0, 1.0)
        .with("weight", 4 * dims.channels, -1.0, 1.0)
        .with_slots("conv_state", dims.state_len(), -1.0, 1.0))
}

impl Subject for Verify {
    fn name(&self) -> String {
        "tree_conv verify".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, dims(scene).channels)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        cpu::verify(dims(scene), &scene.batch, scene.input(0), scene.input(1), scene.input(2), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        oracle::verify(dims(scene), &scene.batch, scene.input(0), scene.input(1), scene.input(2))
    }

    /// 256 + 1 + 1 - 256 = 2, of which bfloat16 keeps 0.
    fn sums(&self) -> Option<Shape> {
        Some(Shape::tree(1))
    }

    fn fill_sums(&self, scene: &mut Scene) {
        let channels = dims(scene).channels;
        scene.inputs[0].values.fill(-256.0);
        scene.inputs[1].values.fill(1.0);
        for (row, value) in scene.inputs[2].values.chunks_mut(channels).zip([256.0, 1.0, 1.0]) {
            row.fill(value);
        }
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let channels = dims(scene).channels;
        for (c, out) in out.iter_mut().enumerate() {
            let old = (0..3).map(|row| scene.input(2)[row * channels + c]);
            let sum = half_sum(old.chain([scene.input(0)[c]]));
            *out = sum / (1.0 + (-sum).exp());
        }
    }
}

/// Elements of plane `out`.
fn conv_len(scene: &Scene) -> usize {
    scene.batch.rows() * dims(scene).channels
}

/// Inputs 3, 4 and 5 are the gates': ab, a_log and dt_bias.
impl Subject for VerifyGates {
    fn name(&self) -> String {
        "tree_conv verify with gates".into()
    }

    fn bound(&self) -> Bound {
        Verify.bound()
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        Ok(with_gates(scene(shape)?))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        let mut planes = Verify.planes(scene);
        planes.push(Plane::rows("gates", scene, 2 * HEADS));
        planes
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (out, gate) = out.split_at_mut(conv_len(scene));
        Verify.run(scene, out)?;
        gates::cpu::forward(HEADS, scene.input(3), scene.input(4), scene.input(5), gate)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let mut out = Verify.oracle(scene);
        out.extend(gates::oracle::forward(HEADS, scene.input(3), scene.input(4), scene.input(5)));
        out
    }

    fn sums(&self) -> Option<Shape> {
        Verify.sums()
    }

    fn fill_sums(&self, scene: &mut Scene) {
        Verify.fill_sums(scene);
        fill_gates(&mut scene.inputs[3..]);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let (out, gate) = out.split_at_mut(conv_len(scene));
        Verify.half_sum(scene, out);
        half_gates(scene.input(3), scene.input(5), gate);
    }
}

impl Subject for Commit {
    fn name(&self) -> String {
        "tree_conv commit".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::slots("conv_state", scene, dims(scene).state_len())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(scene.input(2));
        cpu::commit(dims(scene), &scene.paths, scene.input(0), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        widened(&oracle::commit(dims(scene), &scene.paths, scene.input(0), scene.input(2)))
    }
}
