//! tree_attention, block_attention and kv_compact.

use super::{Bound, Plane, Scene, Shape, Subject, half_sum, widened};
use crate::block_attention::cpu::{BlockMask, DraftBlocks};
use crate::tree_attention::cpu::AttentionInput;
use crate::{AttnDims, Result, block_attention, kv_compact, tree_attention};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Tree), Box::new(Block), Box::new(Compact)]
}

struct Tree;
struct Block;
struct Compact;

pub(in super::super) fn dims(scene: &Scene) -> AttnDims {
    let Shape { wide, cuda, narrow, .. } = scene.shape;
    match (wide, cuda, narrow) {
        (true, true, false) => AttnDims { q_heads: 16, kv_heads: 4, head_dim: 256 },
        (true, true, true) => AttnDims { q_heads: 32, kv_heads: 8, head_dim: 128 },
        (true, false, _) | (false, true, false) => AttnDims { q_heads: 4, kv_heads: 1, head_dim: 256 },
        (false, true, true) => AttnDims { q_heads: 4, kv_heads: 1, head_dim: 128 },
        (false, false, _) => AttnDims { q_heads: 2, kv_heads: 1, head_dim: 12 },
    }
}

/// Inputs 0, 1 and 2: q and the pools.
fn scene(shape: &Shape) -> Result<Scene> {
    let scene = Scene::new(shape)?;
    let dims = dims(&scene);
    let (slot, sharp) = (scene.capacity * dims.kv_width(), if shape.hard { 4.0 } else { 1.0 });
    Ok(scene
        .with_rows("q", dims.q_width(), -sharp, sharp)
        .with_slots("k_cache", slot, -1.0, 1.0)
        .with_slots("v_cache", slot, -1.0, 1.0))
}

/// Equal scores over 1,000 equal values: a bfloat16 sum of them stops at 256.
fn equal_scores(scene: &mut Scene) {
    scene.inputs[0].values.fill(0.0);
    scene.inputs[2].values.fill(1.0);
}

fn half_mean(seen: usize) -> f32 {
    half_sum(std::iter::repeat_n(1.0, seen)) / seen as f32
}

fn input(scene: &Scene) -> AttentionInput<'_> {
    let (q, k_cache, v_cache) = (scene.input(0), scene.input(1), scene.input(2));
    AttentionInput { q, k_cache, v_cache, capacity: scene.capacity }
}

fn absolute_values(scene: &Scene) -> Scene {
    let mut scene = scene.clone();
    scene.inputs[2].values.iter_mut().for_each(|x| *x = x.abs());
    scene
}

impl Subject for Tree {
    fn name(&self) -> String {
        "tree_attention".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, dims(scene).q_width())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        tree_attention::cpu::verify(dims(scene), &scene.batch, &scene.lens, input(scene), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let (keys, values, capacity) = (scene.input(1), scene.input(2), scene.capacity);
        let cache = tree_attention::oracle::Cache { keys, values, capacity };
        tree_attention::oracle::verify(dims(scene), &scene.batch, &scene.lens, scene.input(0), cache)
    }

    /// The mean of the values' sizes: `sum p |v| / sum p`.
    fn sizes(&self, scene: &Scene) -> Vec<f64> {
        self.oracle(&absolute_values(scene))
    }

    /// A head that meets a non-finite number is computed again in float64.
    fn group(&self, scene: &Scene) -> usize {
        dims(scene).head_dim
    }

    /// Values are added one position after another, so rounding grows with their number: 1,000 here.
    fn sums_bound(&self) -> Bound {
        Bound::Element(1e-4)
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape { context: 1000, ..Shape::tree(3) })
    }

    fn fill_sums(&self, scene: &mut Scene) {
        equal_scores(scene);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        out.fill(half_mean(scene.lens[0] as usize + 1));
    }
}

/// Every sequence's block has as many rows as the trees have nodes, all the same number.
pub(in super::super) fn blocks(scene: &Scene) -> DraftBlocks {
    let block_size = scene.shape.nodes.first().copied().unwrap_or(1);
    DraftBlocks { block_size, slots: scene.batch.slots().to_vec(), context_lens: scene.lens.clone() }
}

/// Four masks, by the context, so that a sweep over contexts and nodes meets all.
pub(in super::super) fn mask(scene: &Scene) -> BlockMask {
    BlockMask { window: scene.mode.is_multiple_of(2).then_some(5), causal: scene.mode % 4 >= 2 }
}

impl Subject for Block {
    fn name(&self) -> String {
        "block_attention".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(1e-5)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let rows = shape.nodes.iter().copied().max().unwrap_or(1);
        scene(&Shape { nodes: vec![rows; shape.nodes.len()], ..shape.clone() })
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("out", scene, dims(scene).q_width())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        block_attention::cpu::forward(dims(scene), &blocks(scene), mask(scene), input(scene), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let blocks = blocks(scene);
        let places = blocks.slots.iter().zip(&blocks.context_lens).map(|(&slot, &context)| {
            block_attention::oracle::Block { slot: usize::try_from(slot).ok(), context: context as usize }
        });
        let BlockMask { window, causal } = mask(scene);
        let (keys, values, capacity) = (scene.input(1), scene.input(2), scene.capacity);
        let seen = block_attention::oracle::Scene { keys, values, capacity, window, causal };
        let places = places.collect::<Vec<_>>();
        block_attention::oracle::forward(dims(scene), &places, blocks.block_size, scene.input(0), seen)
    }

    /// The mean of the values' sizes: `sum p |v| / sum p`.
    fn sizes(&self, scene: &Scene) -> Vec<f64> {
        self.oracle(&absolute_values(scene))
    }

    /// A head that meets a non-finite number is computed again in float64.
    fn group(&self, scene: &Scene) -> usize {
        dims(scene).head_dim
    }

    /// Values are added one position after another, so rounding grows with their number: 1,000 here.
    fn sums_bound(&self) -> Bound {
        Bound::Element(1e-4)
    }

    fn sums(&self) -> Option<Shape> {
        Some(Shape { context: 1000, ..Shape::tree(3) })
    }

    fn fill_sums(&self, scene: &mut Scene) {
        equal_scores(scene);
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        out.fill(half_mean(scene.lens[0] as usize + 1));
    }
}

impl Subject for Compact {
    fn name(&self) -> String {
        "kv_compact".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let slot = scene.capacity * dims(&scene).kv_width();
        Ok(scene.with_slots("cache", slot, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::slots("cache", scene, scene.capacity * dims(scene).kv_width())]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(scene.input(0));
        let width = dims(scene).kv_width();
        kv_compact::cpu::compact(&scene.paths, &scene.lens, width, scene.capacity, out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let width = dims(scene).kv_width();
        let cache =
            kv_compact::oracle::compact(&scene.paths, &scene.lens, width, scene.capacity, scene.input(0));
        widened(&cache)
    }
}
