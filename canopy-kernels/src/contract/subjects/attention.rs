//! tree_attention, block_attention and kv_compact.

use super::{Scene, Shape, Subject, half_sum, widened};
use crate::block_attention::cpu::{BlockMask, DraftBlocks};
use crate::tree_attention::cpu::AttentionInput;
use crate::{AttnDims, Result, block_attention, kv_compact, tree_attention};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Tree), Box::new(Block), Box::new(Compact)]
}

struct Tree;
struct Block;
struct Compact;

fn dims(scene: &Scene) -> AttnDims {
    match scene.shape.wide {
        true => AttnDims { q_heads: 4, kv_heads: 1, head_dim: 256 },
        false => AttnDims { q_heads: 2, kv_heads: 1, head_dim: 12 },
    }
}

/// Inputs 0, 1 and 2: q for `rows` rows, and the pools.
fn scene(shape: &Shape, rows: impl Fn(&Scene) -> usize) -> Result<Scene> {
    let scene = Scene::new(shape)?;
    let (dims, rows) = (dims(&scene), rows(&scene));
    let pool = shape.nodes.len() * scene.capacity() * dims.kv_width();
    Ok(scene
        .with("q", rows * dims.q_width(), -1.0, 1.0)
        .with("k_cache", pool, -1.0, 1.0)
        .with("v_cache", pool, -1.0, 1.0))
}

/// Equal scores over 1,000 equal values: a bfloat16 sum of them stops at 256.
fn sums_scene(scene: Result<Scene>) -> Option<Result<Scene>> {
    Some(scene.map(|mut scene| {
        scene.inputs[0].values.fill(0.0);
        scene.inputs[2].values.fill(1.0);
        scene
    }))
}

fn half_mean(seen: usize) -> f32 {
    half_sum(std::iter::repeat_n(1.0, seen)) / seen as f32
}

/// Rows per slot as the scene was made, whatever a fault did to its lengths.
fn capacity(scene: &Scene) -> usize {
    scene.input(1).len() / (scene.shape.nodes.len() * dims(scene).kv_width())
}

fn input(scene: &Scene) -> AttentionInput<'_> {
    let (q, k_cache, v_cache) = (scene.input(0), scene.input(1), scene.input(2));
    AttentionInput { q, k_cache, v_cache, capacity: capacity(scene) }
}

impl Subject for Tree {
    fn name(&self) -> String {
        "tree_attention".into()
    }

    fn bound(&self) -> f64 {
        1e-5
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape, |scene| scene.batch.rows())
    }

    fn out_len(&self, scene: &Scene) -> usize {
        scene.input(0).len()
    }

    fn row_len(&self, scene: &Scene) -> usize {
        dims(scene).q_width()
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        tree_attention::cpu::verify(dims(scene), &scene.batch, &scene.lens, input(scene), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let (keys, values, capacity) = (scene.input(1), scene.input(2), capacity(scene));
        let cache = tree_attention::oracle::Cache { keys, values, capacity };
        tree_attention::oracle::verify(dims(scene), &scene.batch, &scene.lens, scene.input(0), cache)
    }

    /// A head that meets a non-finite number is computed again in float64.
    fn group(&self, scene: &Scene) -> usize {
        dims(scene).head_dim
    }

    /// Values are added one position after another, so rounding grows with their number: 1,000 here.
    fn sums_bound(&self) -> f64 {
        1e-4
    }

    fn sums(&self) -> Option<Result<Scene>> {
        sums_scene(self.scene(&Shape { context: 1000, ..Shape::tree(3) }))
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        out.fill(half_mean(scene.lens[0] as usize + 1));
    }
}

/// Every sequence's block has as many rows as the first tree has nodes.
fn blocks(scene: &Scene) -> DraftBlocks {
    let block_size = scene.shape.nodes.iter().copied().min().unwrap_or(1);
    DraftBlocks { block_size, slots: scene.batch.slots().to_vec(), context_lens: scene.lens.clone() }
}

/// Four masks, by the context, so that a sweep over contexts and nodes meets all.
fn mask(scene: &Scene) -> BlockMask {
    let pick = scene.shape.context + scene.shape.nodes.len();
    BlockMask { window: pick.is_multiple_of(2).then_some(5), causal: pick % 4 >= 2 }
}

impl Subject for Block {
    fn name(&self) -> String {
        "block_attention".into()
    }

    fn bound(&self) -> f64 {
        1e-5
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        scene(shape, |scene| scene.shape.nodes.len() * blocks(scene).block_size)
    }

    fn out_len(&self, scene: &Scene) -> usize {
        scene.input(0).len()
    }

    fn row_len(&self, scene: &Scene) -> usize {
        dims(scene).q_width()
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
        let (keys, values, capacity) = (scene.input(1), scene.input(2), capacity(scene));
        let seen = block_attention::oracle::Scene { keys, values, capacity, window, causal };
        let places = places.collect::<Vec<_>>();
        block_attention::oracle::forward(dims(scene), &places, blocks.block_size, scene.input(0), seen)
    }

    /// A head that meets a non-finite number is computed again in float64.
    fn group(&self, scene: &Scene) -> usize {
        dims(scene).head_dim
    }

    /// Values are added one position after another, so rounding grows with their number: 1,000 here.
    fn sums_bound(&self) -> f64 {
        1e-4
    }

    fn sums(&self) -> Option<Result<Scene>> {
        sums_scene(self.scene(&Shape { context: 1000, ..Shape::tree(3) }))
    }

    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        out.fill(half_mean(scene.lens[0] as usize + 1));
    }
}

impl Subject for Compact {
    fn name(&self) -> String {
        "kv_compact".into()
    }

    fn bound(&self) -> f64 {
        0.0
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let scene = Scene::new(shape)?;
        let pool = shape.nodes.len() * scene.capacity() * dims(&scene).kv_width();
        Ok(scene.with("cache", pool, -1.0, 1.0))
    }

    fn out_len(&self, scene: &Scene) -> usize {
        scene.input(0).len()
    }

    fn row_len(&self, scene: &Scene) -> usize {
        dims(scene).kv_width()
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(scene.input(0));
        let width = dims(scene).kv_width();
        let capacity = out.len() / (scene.shape.nodes.len() * width);
        kv_compact::cpu::compact(&scene.paths, &scene.lens, width, capacity, out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let width = dims(scene).kv_width();
        let (capacity, cache) = (scene.capacity(), scene.input(0));
        widened(&kv_compact::oracle::compact(&scene.paths, &scene.lens, width, capacity, cache))
    }
}
