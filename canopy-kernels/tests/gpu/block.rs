//! block_attention and kv_compact: every mask against float64, hidden keys poisoned; moves against a gather from a copy.

use std::sync::Arc;

use canopy_kernels::block_attention::cpu::BlockMask;
use canopy_kernels::block_attention::launch::{self, AttentionBuffers, Blocks, Tile};
use canopy_kernels::cuda::PathsOnDevice;
use canopy_kernels::{AcceptedPaths, AttnDims, DraftTree, TreeBatch, kv_compact};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use crate::Check;
use crate::attention::{same, small};
use crate::data::{Random, text};
use crate::scene::{GUARD, Kind, OnDevice, Pools};

pub const TESTS: &[(&str, Check)] = &[
    ("block_attention::every_mask_is_within_the_bound", masks),
    ("block_attention::a_batch_has_the_bits_of_each_block_alone", batches),
    ("block_attention::hidden_keys_never_reach_a_row", hidden),
    ("block_attention::padding_is_zero_and_a_wrong_length_is_nan", padding),
    ("block_attention::planted_faults_turn_the_check_red", controls),
    ("block_attention::refusals_name_the_argument", refusals),
    ("kv_compact::rows_move_in_every_pool_as_if_gathered_from_a_copy", compact),
];

#[derive(Clone)]
struct Scene {
    pools: Pools,
    block_size: usize,
    slots: Vec<i32>,
    lens: Vec<i32>,
    mask: BlockMask,
}

impl Scene {
    fn new(dims: AttnDims, block_size: usize, blocks: &[(i32, i32)], mask: BlockMask, seed: u64) -> Self {
        let (slots, lens): (Vec<i32>, Vec<i32>) = blocks.iter().copied().unzip();
        let capacity = lens.iter().max().map_or(0, |&len| len as usize) + block_size + 3;
        let pool = slots.iter().max().map_or(0, |&slot| slot.max(0) as usize) + 2;
        let pools = Pools::new(dims, block_size * blocks.len(), pool, capacity, 1.0, seed);
        Self { pools, block_size, slots, lens, mask }
    }

    fn run<Out: Kind>(&self, stream: &Arc<CudaStream>, tile: Option<Tile>) -> Result<Vec<f32>, String> {
        let Self { pools, block_size, slots, lens, mask } = self;
        let inputs = OnDevice::new(stream, pools)?;
        let on_device = stream.clone_htod(slots).map_err(text)?;
        let lens = stream.clone_htod(lens).map_err(text)?;
        let needed = launch::scratch_len(pools.dims, *block_size, slots.len());
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
        let blocks = Blocks { block_size: *block_size, slots, on_device: on_device.as_view() };
        launch::forward(stream, pools.dims, blocks, *mask, tile, buffers).map_err(text)?;
        let all: Vec<f32> = stream.clone_dtoh(&out).map_err(text)?.into_iter().map(Kind::widen).collect();
        if all[..GUARD].iter().chain(&all[end..]).any(|x| !x.is_nan()) {
            return Err("written outside out".into());
        }
        inputs.untouched(stream, pools)?;
        Ok(all[GUARD..end].to_vec())
    }

    /// Per row the slot and the keys that it sees: every key of the slot tested against the mask.
    fn rows(&self) -> Vec<Option<(usize, Vec<usize>)>> {
        let mut rows = Vec::new();
        for (&slot, &len) in self.slots.iter().zip(&self.lens) {
            for i in 0..self.block_size {
                let (len, slot) = (len.max(0) as usize, usize::try_from(slot).ok());
                let at = len + i;
                let seen = (0..len + self.block_size)
                    .filter(|&key| !self.mask.causal || key <= at)
                    .filter(|&key| self.mask.window.is_none_or(|window| key.abs_diff(at) < window));
                rows.push(slot.map(|slot| (slot, seen.collect())));
            }
        }
        rows
    }

    fn heads(&self, row: usize) -> std::ops::Range<usize> {
        row * self.pools.dims.q_width()..(row + 1) * self.pools.dims.q_width()
    }
}

fn all_masks(windows: &[Option<usize>]) -> impl Iterator<Item = BlockMask> {
    let pairs: Vec<_> = windows.iter().flat_map(|&window| [(window, false), (window, true)]).collect();
    pairs.into_iter().map(|(window, causal)| BlockMask { window, causal })
}

/// Every length in one call per mask: a block's bits are those it has alone (`batches`).
fn masks(stream: &Arc<CudaStream>) -> Result<(), String> {
    let families = Tile::families(stream).map_err(text)?;
    let lens = [0, 1, 63, 64, 120, 128, 129, 300];
    let blocks: Vec<_> = (0..).zip(lens).collect();
    let mut worst = 0.0f64;
    for dims in small() {
        for rows in [1, 7, 8, 15, 16, 33] {
            let mut scene = Scene::new(dims, rows, &blocks, BlockMask { window: None, causal: false }, 3);
            for mask in all_masks(&[None, Some(1), Some(5), Some(64), Some(130)]) {
                scene.mask = mask;
                let what = format!("width {}, {rows} rows after {lens:?}, {mask:?}", dims.head_dim);
                let truth = scene.pools.truth(&scene.rows());
                for family in &families {
                    let first = scene.run::<f32>(stream, Some(family[0]))?;
                    worst = worst.max(truth.worst(&format!("{what}, {:?}", family[0]), &first, false)?);
                    for &tile in &family[1..] {
                        same(&format!("{what}, {tile:?}"), &scene.run::<f32>(stream, Some(tile))?, &first)?;
                    }
                }
            }
        }
        for len in [4_080, 4_095, 4_096, 4_097, 9_000] {
            for mask in all_masks(&[None, Some(4_096)]) {
                let scene = Scene::new(dims, 16, &[(0, len)], mask, 5);
                let got = scene.run::<bf16>(stream, None)?;
                let what = format!("16 rows after {len}, {mask:?}");
                worst = worst.max(scene.pools.truth(&scene.rows()).worst(&what, &got, true)?);
            }
        }
    }
    let served = AttnDims::new(32, 8, 128).map_err(text)?;
    for mask in all_masks(&[None, Some(512)]) {
        let scene = Scene::new(served, 16, &[(1, 700), (0, 33)], mask, 9);
        let got = scene.run::<bf16>(stream, None)?;
        worst = worst.max(scene.pools.truth(&scene.rows()).worst("the drafter's heads", &got, true)?);
    }
    eprintln!("block_attention: worst ratio {worst:.3}");
    Ok(())
}

fn batches(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        for mask in all_masks(&[None, Some(100)]) {
            let blocks = [(3, 500), (-1, 7), (0, 0), (1, 2_049), (3, 65)];
            let scene = Scene::new(dims, 15, &blocks, mask, 4);
            let together = scene.run::<f32>(stream, None)?;
            scene.pools.truth(&scene.rows()).worst("a batch", &together, false)?;
            for (b, &(slot, len)) in blocks.iter().enumerate().filter(|(_, (slot, _))| *slot >= 0) {
                let rows = scene.heads(15 * b).start..scene.heads(15 * b + 14).end;
                let mut alone = scene.clone();
                (alone.slots, alone.lens) = (vec![slot], vec![len]);
                alone.pools.q = scene.pools.q[rows.clone()].to_vec();
                same(&format!("block {b}"), &alone.run::<f32>(stream, None)?, &together[rows])?;
            }
        }
    }
    Ok(())
}

fn hidden(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        for mask in [
            BlockMask { window: None, causal: true },
            BlockMask { window: Some(100), causal: true },
            BlockMask { window: Some(100), causal: false },
            BlockMask { window: Some(5), causal: false },
        ] {
            let scene = Scene::new(dims, 16, &[(1, 333)], mask, 6);
            let clean = scene.run::<f32>(stream, None)?;
            let rows = scene.rows();
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for in_values in [false, true] {
                    for key in [0, 100, 233, 234, 240, 332, 333, 340, 348, 349] {
                        let mut dirty = scene.clone();
                        let pool = if in_values { &mut dirty.pools.values } else { &mut dirty.pools.keys };
                        let at = scene.pools.at(1, key, 0);
                        pool[at..at + dims.head_dim].fill(bf16::from_f32(poison));
                        let got = dirty.run::<f32>(stream, None)?;
                        let what = format!("{poison} in key {key}, {mask:?}");
                        dirty.pools.truth(&rows).worst(&what, &got, false)?;
                        for (row, seen) in rows.iter().enumerate() {
                            if seen.as_ref().is_some_and(|(_, seen)| !seen.contains(&key)) {
                                same(
                                    &format!("{what}, row {row}"),
                                    &got[scene.heads(row)],
                                    &clean[scene.heads(row)],
                                )?;
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

fn padding(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let mask = BlockMask { window: None, causal: false };
        let mut scene = Scene::new(dims, 8, &[(0, 40), (-1, 3), (1, 20)], mask, 2);
        let clean = scene.run::<f32>(stream, None)?;
        let (from, to) = (scene.heads(8).start, scene.heads(16).start);
        if clean[from..to].iter().any(|x| x.to_bits() != 0) {
            return Err("a padding row is not zero".into());
        }
        for len in [-1, scene.pools.capacity as i32 - 7, i32::MAX] {
            scene.lens[2] = len;
            let got = scene.run::<f32>(stream, None)?;
            if got[to..].iter().any(|x| !x.is_nan()) {
                return Err(format!("{len} keys in a slot of {}: not NaN", scene.pools.capacity));
            }
            same("blocks beside a wrong length", &got[..to], &clean[..to])?;
        }
    }
    Ok(())
}

/// The check itself: truths under a mask that is off by one must refuse what the kernel gives.
fn controls(stream: &Arc<CudaStream>) -> Result<(), String> {
    for dims in small() {
        let mask = BlockMask { window: Some(40), causal: true };
        let scene = Scene::new(dims, 16, &[(1, 333)], mask, 6);
        let got = scene.run::<f32>(stream, None)?;
        scene.pools.truth(&scene.rows()).worst("no fault", &got, false)?;
        for (name, window, ahead) in
            [("window one short", 39, 0), ("window one long", 41, 0), ("causal mask off by one", 40, 1)]
        {
            let rows: Vec<_> = (333..349usize)
                .map(|at| Some((1, (0..349).filter(|&key| key + window > at && key <= at + ahead).collect())))
                .collect();
            if let Ok(ratio) = scene.pools.truth(&rows).worst(name, &got, false) {
                return Err(format!("{name}: the check stays green at {ratio:.3} of the bound"));
            }
        }
    }
    Ok(())
}

fn refusals(stream: &Arc<CudaStream>) -> Result<(), String> {
    let dims = AttnDims::new(4, 1, 128).map_err(text)?;
    let scene = Scene::new(dims, 8, &[(0, 40)], BlockMask { window: None, causal: false }, 2);
    let refuse = |change: &dyn Fn(&mut Scene), want: &str| {
        let mut scene = scene.clone();
        change(&mut scene);
        match scene.run::<f32>(stream, None) {
            Err(why) if why.starts_with(&format!("block_attention: {want}")) => Ok(()),
            other => Err(format!("expected {want}, got {:?}", other.map(|_| ()))),
        }
    };
    refuse(&|s| s.mask.window = Some(0), "window, expected: at least 1, got: 0")?;
    refuse(&|s| s.block_size = 300, "block_size, expected: 1 to 256, got: 300")?;
    refuse(&|s| s.slots[0] = 9, "slots, expected: below")?;
    refuse(&|s| s.lens.push(1), "lens, expected: [1], got: [2]")
}

fn compact(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (width, capacity) = (1024, 90);
    let trees = [40, 64, 5, 1, 30].into_iter().map(|nodes| DraftTree::random(nodes, 2 + nodes as u64));
    let batch =
        TreeBatch::new(trees.collect::<Result<_, _>>().map_err(text)?, vec![3, 0, -1, 1, 4]).map_err(text)?;
    let deepest = |tree: &DraftTree| (0..tree.len()).max_by_key(|&node| tree.depths()[node]).unwrap_or(0);
    let mut longest: Vec<_> = batch.trees().iter().map(|tree| tree.path(deepest(tree))).collect();
    longest[4].clear();
    let chain = TreeBatch::new(vec![DraftTree::chain(64).map_err(text)?], vec![2]).map_err(text)?;
    let chains = vec![(0..40).collect::<Vec<_>>()];
    for (batch, paths, lens) in [(&batch, &longest, vec![7, 26, 9, 89, 3]), (&chain, &chains, vec![11])] {
        let paths = AcceptedPaths::new(batch, paths).map_err(text)?;
        let on_device = PathsOnDevice::new(stream, &paths).map_err(text)?;
        let lens_on_device = stream.clone_htod(&lens).map_err(text)?;
        let mut random = Random::new(3);
        // more pools than one launch takes
        let pools: Vec<Vec<bf16>> = (0..67)
            .map(|_| random.normals(5 * capacity * 16).into_iter().map(bf16::from_f32))
            .map(|some| some.flat_map(|x| [x; 64]).collect())
            .collect();
        let mut device: Vec<CudaSlice<bf16>> =
            pools.iter().map(|pool| stream.clone_htod(pool)).collect::<Result<_, _>>().map_err(text)?;
        let mut views: Vec<_> = device.iter_mut().map(|pool| pool.as_view_mut()).collect();
        let shape = (width, capacity);
        kv_compact::launch::compact(stream, &paths, &on_device, lens_on_device.as_view(), shape, &mut views)
            .map_err(text)?;
        for (i, (pool, device)) in pools.iter().zip(&device).enumerate() {
            let want = kv_compact::oracle::compact(&paths, &lens, width, capacity, pool);
            if stream.clone_dtoh(device).map_err(text)? != want {
                return Err(format!("pool {i} differs"));
            }
        }
    }
    Ok(())
}
