//! tree_conv: verify and commit.

use super::{Scene, Shape, Subject, half_sum, widened};
use crate::tree_conv::{cpu, oracle};
use crate::{ConvDims, Result};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Verify), Box::new(Commit)]
}

struct Verify;
struct Commit;

fn dims(scene: &Scene) -> ConvDims {
    ConvDims { channels: if scene.shape.wide { 1024 } else { 11 } }
}

/// Inputs 0, 1 and 2: x, weight and the conv-state pool.
fn scene(shape: &Shape) -> Result<Scene> {
    let scene = Scene::new(shape)?;
    let (rows, dims, slots) = (scene.batch.rows(), dims(&scene), shape.nodes.len());
    Ok(scene.with("x", rows * dims.channels, -1.0, 1.0).with("weight", 4 * dims.channels, -1.0, 1.0).with(
        "conv_state",
        slots * dims.state_len(),
        -1.0,
        1.0,
    ))
}

impl Subject for Verify {
    fn name(&self) -> String {
        "tree_conv verify".into()
    }

    fn bound(&self) -> f64 {
        1e-5
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn out_len(&self, scene: &Scene) -> usize {
        scene.input(0).len()
    }

    fn row_len(&self, scene: &Scene) -> usize {
        dims(scene).channels
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        cpu::verify(dims(scene), &scene.batch, scene.input(0), scene.input(1), scene.input(2), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        oracle::verify(dims(scene), &scene.batch, scene.input(0), scene.input(1), scene.input(2))
    }

    /// 256 + 1 + 1 - 256 = 2, of which bfloat16 keeps 0.
    fn sums(&self) -> Option<Result<Scene>> {
        let scene = scene(&Shape::tree(1)).map(|mut scene| {
            let channels = dims(&scene).channels;
            scene.inputs[0].values.fill(-256.0);
            scene.inputs[1].values.fill(1.0);
            for (row, value) in scene.inputs[2].values.chunks_mut(channels).zip([256.0, 1.0, 1.0]) {
                row.fill(value);
            }
            scene
        });
        Some(scene)
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

impl Subject for Commit {
    fn name(&self) -> String {
        "tree_conv commit".into()
    }

    fn bound(&self) -> f64 {
        0.0
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn out_len(&self, scene: &Scene) -> usize {
        scene.input(2).len()
    }

    fn row_len(&self, scene: &Scene) -> usize {
        dims(scene).channels
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(scene.input(2));
        cpu::commit(dims(scene), &scene.paths, scene.input(0), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        widened(&oracle::commit(dims(scene), &scene.paths, scene.input(0), scene.input(2)))
    }
}
