//! tree_gdn_serial: the outputs of the baseline, and the pool after it.

use super::gdn::{Commit, dims, fill_sums, gates, half_states, per_tree, scene};
use super::{Bound, Plane, Scene, Shape, Subject};
use crate::Result;
use crate::tree_gdn::oracle;
use crate::tree_gdn_serial::{SerialInput, SerialOutput, cpu};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Verify), Box::new(Commit { name: "tree_gdn_serial commit".into(), run: verify_and_commit })]
}

/// The planes o and snapshots of a verify. The oracle has no state of every node within reason, so `Verify` shows o
/// and `Commit` the snapshots that are committed.
fn verify(scene: &Scene, o: &mut [f32]) -> Result<Vec<f32>> {
    let dims = dims(scene);
    let mut snapshots = vec![f32::NAN; scene.batch.rows() * dims.state_len()];
    let input = SerialInput { qkv: scene.input(0), gates: &gates(scene), state: scene.input(3) };
    cpu::verify(dims, &scene.batch, input, SerialOutput { o, snapshots: &mut snapshots })?;
    Ok(snapshots)
}

fn verify_and_commit(scene: &Scene, pool: &mut [f32]) -> Result<()> {
    let snapshots = verify(scene, &mut vec![0f32; o_len(scene)])?;
    cpu::commit(dims(scene), &scene.paths, &snapshots, pool)
}

fn o_len(scene: &Scene) -> usize {
    scene.batch.rows() * dims(scene).v_heads * dims(scene).dv
}

struct Verify;

impl Subject for Verify {
    fn name(&self) -> String {
        "tree_gdn_serial verify".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("o", scene, dims(scene).v_heads * dims(scene).dv)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        verify(scene, out).map(drop)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        per_tree(scene, |_, tree, _, input| oracle::verify(dims(scene), tree, input).o).concat()
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
        let width = dims(scene).v_heads * dims(scene).dv;
        half_states(scene, |node, one, _| {
            out[node * width..(node + 1) * width].copy_from_slice(&one[..width]);
        });
    }
}
