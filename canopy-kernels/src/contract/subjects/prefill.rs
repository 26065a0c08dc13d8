//! gdn_prefill: outputs of chains of the scene's lengths, then the pool after them.

use super::gdn::{dims, fill_sums, gates, half_states, scene};
use super::{Bound, Plane, Scene, Shape, Subject, widened};
use crate::gdn_prefill::oracle::{self, OracleInput};
use crate::gdn_prefill::{PrefillInput, Sequences, cpu};
use crate::{GdnDims, Result, TreeBatch};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Prefill)]
}

struct Prefill;

/// The scene's sequences as chains, whatever their trees: a chain's mask is its length.
pub(in super::super) fn sequences(batch: &TreeBatch) -> Result<Sequences> {
    let lens: Vec<usize> = batch.trees().iter().map(crate::DraftTree::len).collect();
    Sequences::new(&lens, batch.slots().to_vec())
}

fn o_len(scene: &Scene, dims: GdnDims) -> usize {
    scene.batch.rows() * dims.v_heads * dims.dv
}

impl Subject for Prefill {
    fn name(&self) -> String {
        "gdn_prefill".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(&Shape { chain: true, ..shape.clone() })
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        let dims = dims(scene);
        vec![Plane::rows("o", scene, dims.v_heads * dims.dv), Plane::slots("state", scene, dims.state_len())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let dims = dims(scene);
        let (o, pool) = out.split_at_mut(o_len(scene, dims));
        pool.copy_from_slice(scene.input(3));
        let input = PrefillInput { qkv: scene.input(0), gates: &gates(scene) };
        cpu::forward(dims, &sequences(&scene.batch)?, input, pool, o)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let (dims, gates) = (dims(scene), widened(&gates(scene)));
        let (qkv, mut pool) = (widened(scene.input(0)), widened(scene.input(3)));
        let (mut o, len) = (Vec::new(), dims.state_len());
        for (first, tree, slot) in scene.batch.iter() {
            let own = slot.unwrap_or_default() * len..(slot.unwrap_or_default() + 1) * len;
            let input = OracleInput {
                qkv: &qkv[first * dims.qkv_width()..],
                gates: &gates[first * 2 * dims.v_heads..],
                state: &pool[own.clone()],
            };
            let (rows, state) = oracle::forward(dims, tree.len(), input);
            o.extend(rows);
            pool[own].copy_from_slice(&state);
        }
        o.extend(pool);
        o
    }

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
        let dims = dims(scene);
        let (o, pool) = out.split_at_mut(o_len(scene, dims));
        let width = dims.v_heads * dims.dv;
        half_states(scene, |row, one, state| {
            o[row * width..(row + 1) * width].copy_from_slice(&one[..width]);
            pool.copy_from_slice(state);
        });
    }
}
