//! tree_attention against float64 on the same rounded inputs, at every tile edge and around every split; what a row cannot see is poisoned,
//! and the row must not notice; the same rows in another company must have the same bits.

use std::sync::Arc;

use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_attention::launch::{self, AttentionBuffers, Tile};
use canopy_kernels::tree_attention::oracle;
use canopy_kernels::{AttnDims, DraftTree, TreeBatch};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{bits, text};
use crate::scene::{GUARD, Kind, OnDevice, Pools};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_attention::the_truth_here_is_the_oracle", truth_is_the_oracle),
    ("tree_attention::every_tile_edge_is_within_the_bound", tile_edges),
    ("tree_attention::every_split_edge_is_within_the_bound", split_edges),
    ("tree_attention::served_shapes_are_within_the_bound", served),
    ("tree_attention::interleaved_branches_see_their_paths_only", interleaved),
    ("tree_attention::a_batch_has_the_bits_of_each_tree_alone", batches),
    ("tree_attention::five_runs_have_the_same_bits_and_inputs_stay", repeats),
    ("tree_attention::what_a_row_cannot_see_never_reaches_it", isolation),
    ("tree_attention::a_visible_value_that_is_not_finite_does_what_float64_says", visible),
    ("tree_attention::a_vanishing_weight_times_infinity_is_float64s", vanishing),
    ("tree_attention::sums_over_2100_equal_keys_are_f32", equal_keys),
    ("tree_attention::padding_is_zero_and_a_wrong_length_is_nan", padding),
    ("tree_attention::planted_faults_turn_the_check_red", controls),
    ("tree_attention::refusals_name_the_argument", refusals),
];

/// One call's inputs.
#[derive(Clone)]
pub struct Scene {
    pub pools: Pools,
    pub batch: TreeBatch,
    pub lens: Vec<i32>,
}

impl Scene {
    pub fn new(dims: AttnDims, batch: TreeBatch, lens: Vec<i32>, sharp: f32, seed: u64) -> Self {
        let needs = batch.trees().iter().zip(&lens).map(|(tree, &len)| tree.len() + len.max(0) as usize);
        let capacity = needs.max().unwrap_or(0) + 5;
        let slots = batch.slots().iter().max().map_or(0, |&slot| slot.max(0) as usize) + 2;
        let pools = Pools::new(dims, batch.rows(), slots, capacity, sharp, seed);
        Self { pools, batch, lens }
    }

    pub fn single(dims: AttnDims, tree: DraftTree, len: usize, seed: u64) -> Self {
        Self::new(dims, TreeBatch::single(tree, 1), vec![len as i32], 1.0, seed)
    }

    pub fn run<Out: Kind>(&self, stream: &Arc<CudaStream>, tile: Option<Tile>) -> Result<Vec<f32>, String> {
        let Self { pools, batch, lens } = self;
        let inputs = OnDevice::new(stream, pools)?;
        let tree = TreeOnDevice::new(stream, batch).map_err(text)?;
        let lens = stream.clone_htod(lens).map_err(text)?;
        let needed = launch::scratch_len(pools.dims, batch);
        let mut scratch = stream.clone_htod(&vec![f32::NAN; needed.max(1)]).map_err(text)?;
        let mut out = stream.clone_htod(&vec![Out::NAN; pools.q.len() + 2 * GUARD]).map_err(text)?;
        let end = GUARD + pools.q.len();
        let buffers = AttentionBuffers {
            q: inputs.q.slice(GUARD..end),
            k_cache: inputs.keys.slice(GUARD..GUARD + pools.keys.len()),
            v_cache: inputs.values.slice(GUARD..GUARD + pools.values.len()),
            capacity: pools.capacity,
            lens: lens.as_view(),
            scratch: &mut scratch,
            out: out.slice_mut(GUARD..end),
        };
        launch::verify_with(stream, pools.dims, batch, &tree, tile, buffers).map_err(text)?;
        let all: Vec<f32> = stream.clone_dtoh(&out).map_err(text)?.into_iter().map(Kind::widen).collect();
        if all[..GUARD].iter().chain(&all[end..]).any(|x| !x.is_nan()) {
            return Err("written outside out".into());
        }
        inputs.untouched(stream, pools)?;
        Ok(all[GUARD..end].to_vec())
    }

    /// Per packed row the slot and the pool rows that it sees.
    pub fn rows(&self) -> Vec<Option<(usize, Vec<usize>)>> {
        let mut rows = Vec::new();
        for ((_, tree, slot), &len) in self.batch.iter().zip(&self.lens) {
            rows.extend((0..tree.len()).map(|node| {
                let path = tree.path(node).into_iter().map(|node| len.max(0) as usize + node);
                slot.map(|slot| (slot, (0..len.max(0) as usize).chain(path).collect()))
            }));
        }
        rows
    }

    /// Checks f32 and bf16 outputs of one tile; the worst ratio.
    fn check<Out: Kind>(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        tile: Option<Tile>,
    ) -> Result<f64, String> {
        let got = self.run::<Out>(stream, tile)?;
        self.pools.truth(&self.rows()).worst(what, &got, Out::ROUNDED)
    }

    /// The f32 outputs of every tile against the truth, and their bits against each other within a family.
    pub fn check_tiles(&self, stream: &Arc<CudaStream>, what: &str) -> Result<f64, String> {
        let truth = self.pools.truth(&self.rows());
        let mut worst = 0.0f64;
        for family in Tile::families(stream).map_err(text)? {
            let first = self.run::<f32>(stream, Some(family[0]))?;
            worst = worst.max(truth.worst(&format!("{what}, {:?}", family[0]), &first, false)?);
            for &tile in &family[1..] {
                let what = format!("{what}, {tile:?} and {:?}", family[0]);
                same(&what, &self.run::<f32>(stream, Some(tile))?, &first)?;
            }
        }
        Ok(worst)
    }

    fn heads(&self, row: usize) -> std::ops::Range<usize> {
        row * self.pools.dims.q_width()..(row + 1) * self.pools.dims.q_width()
    }
}

pub fn same(what: &str, a: &[f32], b: &[f32]) -> Result<(), String> {
    let first = bits(a).iter().zip(bits(b)).position(|(a, b)| *a != b);
    match first {
        None if a.len() == b.len() => Ok(()),
        at => Err(format!("{what}: the bits differ at {at:?}")),
    }
}

/// One KV head with four query heads of both widths.
pub fn small() -> [AttnDims; 2] {
    [256, 128].map(|width| AttnDims::new(4, 1, width).expect("valid"))
}

fn truth_is_the_oracle(_: &Arc<CudaStream>) -> Result<(), String> {
    let trees = vec![DraftTree::random(9, 3).map_err(text)?, DraftTree::chain(4).map_err(text)?];
    let dims = AttnDims::new(4, 2, 128).map_err(text)?;
    let batch = TreeBatch::new(trees, vec![2, -1]).map_err(text)?;
    let scene = Scene::new(dims, batch, vec![11, 3], 1.0, 1);
    let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let (q, keys, values) = (wide(&scene.pools.q), wide(&scene.pools.keys), wide(&scene.pools.values));
    let cache = oracle::Cache { keys: &keys, values: &values, capacity: scene.pools.capacity };
    let want = oracle::verify(dims, &scene.batch, &scene.lens, &q, cache);
    let got = scene.pools.truth(&scene.rows()).out;
    match got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12) {
        true => Ok(()),
        false => Err("float64 sums differ".into()),
    }
}

fn tile_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut worst = 0.0f64;
    for dims in small() {
        for nodes in (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]) {
            let tree = DraftTree::random(nodes, nodes as u64).map_err(text)?;
            for len in [0, nodes % 7, 63 + nodes % 3, 127 + nodes % 3] {
                let what = format!("width {}, random tree of {nodes}, {len} committed", dims.head_dim);
                let scene = Scene::single(dims, tree.clone(), len, nodes as u64);
                worst = worst.max(scene.check_tiles(stream, &what)?);
            }
        }
        for nodes in [16, 64, 65, 128] {
            let scene = Scene::single(dims, DraftTree::chain(nodes).map_err(text)?, 130, 5);
            worst = worst.max(scene.check_tiles(stream, &format!("chain of {nodes}"))?);
        }
    }
    eprintln!("tree_attention tile edges: worst ratio {worst:.3}");
    Ok(())
}

fn split_edges(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut worst = 0.0f64;
    for dims in small() {
        for len in [255, 256, 257, 383, 384, 385, 4095, 4096, 4097, 8191, 8193, 12_289] {
            for sharp in [0.2, 3.0] {
                let tree = DraftTree::random(9, 2).map_err(text)?;
                let batch = TreeBatch::single(tree, 1);
                let scene = Scene::new(dims, batch, vec![len], sharp, len as u64);
                let what = format!("width {}, {len} committed, keys times {sharp}", dims.head_dim);
                worst = worst.max(scene.check_tiles(stream, &what)?);
            }
        }
    }
    eprintln!("tree_attention split edges: worst ratio {worst:.3}");
    Ok(())
}

fn served(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut worst = 0.0f64;
    for (heads, width) in [((16, 4), 256), ((32, 8), 128), ((24, 4), 256), ((16, 2), 256), ((8, 2), 256)] {
        let dims = AttnDims::new(heads.0, heads.1, width).map_err(text)?;
        for (nodes, len) in [(1, 700), (16, 2_049), (64, 1_000), (128, 300)] {
            let tree = DraftTree::random(nodes, 7).map_err(text)?;
            let scene = Scene::single(dims, tree, len, 11);
            let what = format!("{heads:?} heads of {width}, {nodes} nodes, {len} committed");
            worst = worst.max(scene.check::<bf16>(stream, &what, None)?);
            worst = worst.max(scene.check::<f32>(stream, &what, Some(Tile::Tight))?);
        }
    }
    eprintln!("tree_attention served shapes: worst ratio {worst:.3}");
    Ok(())
}

/// known-failures 13.
fn interleaved(stream: &Arc<CudaStream>) -> Result<(), String> {
    for run in [1, 16, 32, 64] {
        let mut parents = vec![-1i32];
        let mut tips = [0i32; 2];
        while parents.len() + run <= 193 {
            let branch = (parents.len() - 1) / run % 2;
            for _ in 0..run {
                parents.push(tips[branch]);
                tips[branch] = parents.len() as i32 - 1;
            }
        }
        for dims in small() {
            let scene = Scene::single(dims, DraftTree::new(parents.clone()).map_err(text)?, 21, run as u64);
            scene.check_tiles(stream, &format!("branches in runs of {run}"))?;
        }
    }
    Ok(())
}

fn batches(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = AttnDims::new(8, 2, 256).map_err(text)?;
    for dims in [dims, AttnDims::new(8, 2, 128).map_err(text)?] {
        let trees: Result<Vec<_>, _> =
            [7, 21, 1, 64, 200, 3].into_iter().map(|nodes| DraftTree::random(nodes, nodes as u64)).collect();
        let batch = TreeBatch::new(trees.map_err(text)?, vec![5, 0, 4, 1, 2, -1]).map_err(text)?;
        let scene = Scene::new(dims, batch, vec![9, 1_300, 0, 65, 4_200, 8], 1.0, 7);
        let together = scene.run::<f32>(stream, None)?;
        scene.pools.truth(&scene.rows()).worst("a batch", &together, false)?;
        for (b, (first, tree, slot)) in scene.batch.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let rows = scene.heads(first).start..scene.heads(first + tree.len() - 1).end;
            for to in [slot, 3] {
                let mut alone = scene.clone();
                alone.batch = TreeBatch::single(tree.clone(), to);
                alone.lens = vec![scene.lens[b]];
                alone.pools.q = scene.pools.q[rows.clone()].to_vec();
                let width = scene.pools.capacity * dims.kv_width();
                for pool in [&mut alone.pools.keys, &mut alone.pools.values] {
                    pool.copy_within(slot * width..(slot + 1) * width, to * width);
                }
                same(
                    &format!("tree {b} in slot {to}"),
                    &alone.run::<f32>(stream, None)?,
                    &together[rows.clone()],
                )?;
            }
        }
    }
    Ok(())
}

fn repeats(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let scene = Scene::single(dims, DraftTree::bole(64, 4).map_err(text)?, 3_000, 3);
        let want = scene.run::<bf16>(stream, None)?;
        for _ in 0..4 {
            same("a second run", &scene.run::<bf16>(stream, None)?, &want)?;
        }
    }
    Ok(())
}

const POISONS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38];

fn isolation(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let tree = DraftTree::random(40, 9).map_err(text)?;
        let scene = Scene::single(dims, tree.clone(), 300, 2);
        let families = Tile::families(stream).map_err(text)?;
        for poison in POISONS {
            for in_values in [false, true] {
                for node in [3, 17, 39] {
                    let mut dirty = scene.clone();
                    let (hurt, behind) = (scene.pools.at(1, 300 + node, 0), scene.pools.at(1, 340, 0));
                    let mine = scene.pools.at(1, 0, 0)..behind;
                    let pool = if in_values { &mut dirty.pools.values } else { &mut dirty.pools.keys };
                    let poison = bf16::from_f32(poison);
                    pool[hurt..hurt + dims.head_dim].fill(poison);
                    for (i, x) in pool.iter_mut().enumerate() {
                        // other slots, and the pool rows behind the tree
                        if !mine.contains(&i) {
                            *x = poison;
                        }
                    }
                    for &tile in families.iter().copied().flatten() {
                        let clean = scene.run::<f32>(stream, Some(tile))?;
                        let got = dirty.run::<f32>(stream, Some(tile))?;
                        for row in (0..tree.len()).filter(|&row| !tree.path(row).contains(&node)) {
                            let what = format!("{poison} in node {node}, row {row}, {tile:?}");
                            same(&what, &got[scene.heads(row)], &clean[scene.heads(row)])?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// One value at a time; elsewhere in the row, outputs that stay finite keep their bits.
fn visible(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let scene = Scene::single(dims, DraftTree::random(20, 4).map_err(text)?, 300, 8);
        let clean = scene.run::<f32>(stream, None)?;
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38] {
            let poison = bf16::from_f32(poison);
            for row in [5usize, 140, 299, 300, 307] {
                for place in 0..3 {
                    let mut dirty = scene.clone();
                    let at = scene.pools.at(1, row, 0) + 37;
                    let (pool, at) = match place {
                        0 => (&mut dirty.pools.q, row % 20 * dims.q_width() + 37),
                        1 => (&mut dirty.pools.keys, at),
                        _ => (&mut dirty.pools.values, at),
                    };
                    pool[at] = poison;
                    let what = format!("{poison} in place {place}, pool row {row}");
                    let got = dirty.run::<f32>(stream, None)?;
                    dirty.pools.truth(&dirty.rows()).worst(&what, &got, false)?;
                    if place == 2 {
                        for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
                            if i % dims.head_dim != 37 && got.to_bits() != clean.to_bits() {
                                return Err(format!("{what}: element {i} has other bits"));
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

fn vanishing(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        for (score, want) in
            [(-20.0f32, f32::INFINITY), (-150.0, f32::INFINITY), (-700.0, f32::INFINITY), (-800.0, f32::NAN)]
        {
            let mut scene = Scene::single(dims, DraftTree::chain(1).map_err(text)?, 1, 0);
            scene.pools.q.fill(bf16::ZERO);
            for head in 0..4 {
                scene.pools.q[head * dims.head_dim] = bf16::from_f32((dims.head_dim as f32).sqrt());
            }
            let (far, near) = (scene.pools.at(1, 0, 0), scene.pools.at(1, 1, 0));
            scene.pools.keys[far] = bf16::from_f32(score);
            scene.pools.keys[near..near + dims.head_dim].fill(bf16::ZERO);
            scene.pools.values[far] = bf16::INFINITY;
            let got = scene.run::<f32>(stream, None)?;
            // at width 128 the query is not exactly sqrt(128): the truth says what the score became
            scene.pools.truth(&scene.rows()).worst(&format!("score {score}"), &got, false)?;
            if dims.head_dim == 256 && bits(&got[..1]) != bits(&[want]) && !(want.is_nan() && got[0].is_nan())
            {
                return Err(format!("score {score}: got {}, expected {want}", got[0]));
            }
        }
    }
    Ok(())
}

fn equal_keys(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let mut scene = Scene::single(dims, DraftTree::chain(1).map_err(text)?, 2_099, 6);
        // any equal keys: every weight is rounded alike
        let key: Vec<bf16> = scene.pools.keys[..dims.head_dim].to_vec();
        for row in scene.pools.keys.chunks_mut(dims.head_dim) {
            row.copy_from_slice(&key);
        }
        scene.check::<f32>(stream, "2,100 equal keys", None)?;
        // keys of score 0, whose weights are exactly 1
        scene.pools.keys.fill(bf16::ZERO);
        scene.pools.values.fill(bf16::ONE);
        if scene.run::<f32>(stream, None)?.iter().any(|&x| x != 1.0) {
            return Err("the mean of 2,100 ones is not 1".into());
        }
        // ones and 1/128s: a 16-bit sum would stop growing long before 2,100
        for (i, row) in scene.pools.values.chunks_mut(dims.head_dim).enumerate() {
            row.fill(if i % 2 == 0 { bf16::ONE } else { bf16::from_f32(1.0 / 128.0) });
        }
        let (got, truth) = (scene.run::<f32>(stream, None)?, scene.pools.truth(&scene.rows()));
        let off = got.iter().zip(&truth.out).map(|(&g, t)| (f64::from(g) - t).abs()).fold(0.0, f64::max);
        if off > 1e-6 {
            return Err(format!("the mean of 2,100 values is off by {off:.1e}"));
        }
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let trees = [3, 9, 4].into_iter().map(|nodes| DraftTree::random(nodes, 4)).collect::<Result<_, _>>();
        let batch = TreeBatch::new(trees.map_err(text)?, vec![-1, 1, 0]).map_err(text)?;
        let mut scene = Scene::new(dims, batch, vec![4, 6, 2], 1.0, 8);
        let clean = scene.run::<f32>(stream, None)?;
        let padded = scene.heads(2).end;
        scene.pools.q[..padded].fill(bf16::NAN);
        scene.lens[0] = -7;
        let got = scene.run::<f32>(stream, None)?;
        if got[..padded].iter().any(|x| x.to_bits() != 0) {
            return Err("a padding row is not zero".into());
        }
        same("rows beside padding", &got, &clean)?;
        for len in [-1, scene.pools.capacity as i32 - 3, i32::MAX, i32::MIN] {
            scene.lens[2] = len;
            let got = scene.run::<f32>(stream, None)?;
            let wrong = scene.heads(12).start;
            if got[wrong..].iter().any(|x| !x.is_nan()) {
                return Err(format!("{len} keys in a slot of {}: not NaN", scene.pools.capacity));
            }
            same("rows beside a wrong length", &got[..wrong], &clean[..wrong])?;
        }
    }
    Ok(())
}

/// The check itself: truths with a planted fault must refuse what the kernel gives.
fn controls(stream: &Arc<CudaStream>) -> Result<(), String> {
    type Rows = Vec<Option<(usize, Vec<usize>)>>;
    type Fault = fn(&mut Pools, &mut Rows);
    let faults: [(&str, Fault); 5] = [
        ("paths cut short", |_, rows| {
            rows.iter_mut().flatten().filter(|(_, seen)| seen.len() > 302).for_each(|(_, seen)| {
                seen.remove(301);
            });
        }),
        ("score scale off by 1/16", |pools, _| {
            pools.q.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * 1.0625));
        }),
        ("a split dropped", |_, rows| {
            rows.iter_mut().flatten().for_each(|(_, seen)| drop(seen.drain(128..256)));
        }),
        ("a tile fetched into the stage being read", |pools, _| {
            let width = pools.dims.kv_width();
            let tile = pools.at(1, 0, 0)..pools.at(1, 64, 0);
            pools.values.copy_within(tile.clone(), tile.start + 64 * width);
        }),
        ("the last committed key left out", |_, rows| {
            rows.iter_mut().flatten().for_each(|(_, seen)| {
                seen.remove(299);
            });
        }),
    ];
    for dims in small() {
        let scene = Scene::single(dims, DraftTree::random(20, 4).map_err(text)?, 300, 12);
        let got = scene.run::<f32>(stream, None)?;
        scene.pools.truth(&scene.rows()).worst("no fault", &got, false)?;
        for (name, fault) in faults {
            let (mut pools, mut rows) = (scene.pools.clone(), scene.rows());
            fault(&mut pools, &mut rows);
            if let Ok(ratio) = pools.truth(&rows).worst(name, &got, false) {
                return Err(format!("{name}: the check stays green at {ratio:.3} of the bound"));
            }
        }
    }
    Ok(())
}

fn refusals(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = AttnDims::new(4, 1, 256).map_err(text)?;
    let scene = Scene::single(dims, DraftTree::chain(3).map_err(text)?, 4, 0);
    let refuse = |change: &dyn Fn(&mut Scene), want: &str| {
        let mut scene = scene.clone();
        change(&mut scene);
        match scene.run::<f32>(stream, None) {
            Err(why) if why.starts_with(&format!("tree_attention verify: {want}")) => Ok(()),
            other => Err(format!("expected {want}, got {:?}", other.map(|_| ()))),
        }
    };
    refuse(&|s| s.pools.keys.truncate(1), "k_cache, expected: whole slots")?;
    refuse(&|s| s.pools.values.truncate(256), "v_cache, expected: [3, 12, 1, 256]")?;
    refuse(&|s| s.lens.push(0), "lens, expected: [1], got: [2]")?;
    refuse(&|s| s.pools.capacity = 0, "capacity, expected: 1 to")?;
    refuse(&|s| s.batch = TreeBatch::single(s.batch.trees()[0].clone(), 3), "slots, expected: below")?;
    refuse(&|s| s.pools.dims.head_dim = 64, "no kernel for head_dim = 64; built: head_dim = 128, 256")
}
