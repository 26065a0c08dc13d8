//! tree_attention where a call fills the device: a CTA then adds several splits, in memory where their levels agree, and a stream must not
//! notice; and where keys are so many that a stream's splits are more and its tiles taller.

use std::sync::Arc;

use canopy_kernels::{AttnDims, DraftTree, TreeBatch};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::attention::{Scene, same, small};
use crate::data::text;

pub const TESTS: &[(&str, Check)] = &[
    ("tree_attention::a_full_device_has_the_bits_of_each_tree_alone", full_device),
    ("tree_attention::many_keys_are_within_the_bound", many_keys),
    ("tree_attention::the_longest_context_is_within_the_bound", longest),
];

/// Sharp keys give splits of one row levels that differ.
fn full_device(stream: &Arc<CudaStream>) -> Result<(), String> {
    const STREAMS: usize = 48;
    for (width, sharp) in [(256, 1.0), (256, 25.0), (128, 1.0), (128, 25.0)] {
        let dims = AttnDims::new(4, 1, width).map_err(text)?;
        let nodes = |b: usize| [9, 40, 1][b % 3];
        let trees =
            (0..STREAMS).map(|b| DraftTree::random(nodes(b), b as u64)).collect::<Result<Vec<_>, _>>();
        let slots = (0..STREAMS as i32).rev().collect();
        let lens = (0..STREAMS).map(|b| [900, 1_300, 500, 0][b % 4]).collect::<Vec<i32>>();
        let batch = TreeBatch::new(trees.map_err(text)?, slots).map_err(text)?;
        let scene = Scene::new(dims, batch, lens, sharp, 7);
        let together = scene.run::<f32>(stream, None)?;
        for (b, (first, tree, slot)) in
            scene.batch.iter().enumerate().filter(|(b, _)| [0, 1, 4, 9].contains(b))
        {
            let rows = first * dims.q_width()..(first + tree.len()) * dims.q_width();
            let mut alone = scene.clone();
            alone.batch = TreeBatch::single(tree.clone(), slot.ok_or("no slot")?);
            alone.lens = vec![scene.lens[b]];
            alone.pools.q = scene.pools.q[rows.clone()].to_vec();
            let alone_out = alone.run::<f32>(stream, None)?;
            alone.pools.truth(&alone.rows()).worst(&format!("tree {b} alone"), &alone_out, false)?;
            let what = format!("width {width}, keys times {sharp}, tree {b} of {STREAMS}");
            same(&what, &alone_out, &together[rows])?;
        }
    }
    Ok(())
}

fn many_keys(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (dims, len) in small().into_iter().zip([41_000, 82_000]) {
        let tree = DraftTree::random(17, 2).map_err(text)?;
        let scene = Scene::single(dims, tree, len, 5);
        scene.check_tiles(stream, &format!("width {}, {len} committed", dims.head_dim))?;
    }
    Ok(())
}

/// 262,144 committed keys, some thousand of them over and over.
fn longest(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let tree = DraftTree::random(5, 2).map_err(text)?;
        let mut scene = Scene::single(dims, tree, 1_021, 5);
        let capacity = (1 << 18) + 5;
        for pool in [&mut scene.pools.keys, &mut scene.pools.values] {
            *pool = pool.iter().copied().cycle().take(2 * capacity * dims.kv_width()).collect();
        }
        scene.pools.capacity = capacity;
        scene.lens = vec![1 << 18];
        let got = scene.run::<f32>(stream, None)?;
        let what = format!("width {}, {} committed", dims.head_dim, scene.lens[0]);
        scene.pools.truth(&scene.rows()).worst(&what, &got, false)?;
    }
    Ok(())
}
