//! Times tree_attention and block_attention on a CUDA device: events around replays of a captured graph, inputs rotated over more than
//! the L2 cache (and once more on one set, warm), median of the replays. Every tile's output is compared with the default's
//! before.
//!
//!     cargo bench -p canopy-kernels --features cuda --bench attention_cuda -- [--quick] [--json FILE] [--only WIDTH,STREAMS,NODES,KEYS] [--tile NAME]

mod replays;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Arc;

use canopy_kernels::block_attention::{self, cpu::BlockMask, launch::Blocks};
use canopy_kernels::cuda::{TreeOnDevice, has_driver};
use canopy_kernels::tree_attention::launch::{self, AttentionBuffers, Tile};
use canopy_kernels::{AttnDims, DraftTree, TreeBatch};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;
use replays::{BYTES_PER_US, FLOPS_PER_US, Outcome, ROTATE, at, capture, replay};

/// Values drawn once and laid one after another into the pools.
const DRAWN: usize = 1 << 24;
const COMMAND: &str = "cargo bench -p canopy-kernels --features cuda --bench attention_cuda -- --json FILE";
/// Replays that do not count, and that do.
const REPLAYS: (usize, usize) = (2, 30);

/// Rows over keys: `nodes` rows of each of `streams` streams, after `context` keys.
#[derive(Clone, Copy)]
struct Shape {
    dims: AttnDims,
    streams: usize,
    nodes: usize,
    context: usize,
    /// A draft block with this mask instead of a tree.
    block: Option<BlockMask>,
}

impl Shape {
    /// Bytes of keys and values that a stream's rows see, once each, and of q and out; floating-point operations.
    fn work(&self) -> (f64, f64) {
        let seen = match self.block.and_then(|mask| mask.window) {
            Some(window) => self.context.min(window),
            None => self.context,
        } + self.nodes;
        let kv = 4 * self.dims.kv_width() * seen * self.streams;
        let rows = 4 * self.dims.q_width() * self.nodes * self.streams;
        let flops = 4.0 * (self.dims.q_width() * self.nodes * self.streams) as f64 * seen as f64;
        ((kv + rows) as f64, flops)
    }
}

/// Everything on the device; set n owns the slots `n streams ..`.
struct Case {
    shape: Shape,
    capacity: usize,
    batches: Vec<(TreeBatch, TreeOnDevice)>,
    q: Vec<CudaSlice<bf16>>,
    keys: CudaSlice<bf16>,
    values: CudaSlice<bf16>,
    lens: CudaSlice<i32>,
    scratch: CudaSlice<f32>,
    out: Vec<CudaSlice<bf16>>,
}

fn noise(n: usize, seed: u64) -> Vec<bf16> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let part = |shift: u32| ((x >> shift) & 0xffff) as f32 / 65536.0;
        bf16::from_f32((part(0) + part(16) + part(32) + part(48) - 2.0) * 1.732)
    };
    (0..n).map(|_| next()).collect()
}

/// `len` elements, `drawn` over and over.
fn filled(stream: &Arc<CudaStream>, drawn: &CudaSlice<bf16>, len: usize) -> Outcome<CudaSlice<bf16>> {
    // SAFETY: every element is written below, before anything reads it.
    let mut pool = unsafe { stream.alloc::<bf16>(len)? };
    for from in (0..len).step_by(DRAWN) {
        let some = (len - from).min(DRAWN);
        stream.memcpy_dtod(&drawn.slice(..some), &mut pool.slice_mut(from..from + some))?;
    }
    Ok(pool)
}

impl Case {
    fn new(stream: &Arc<CudaStream>, drawn: &CudaSlice<bf16>, shape: Shape) -> Outcome<Self> {
        let Shape { dims, streams, nodes, context, .. } = shape;
        let capacity = context + nodes;
        let slot = capacity * dims.kv_width();
        let sets = (ROTATE / (4 * slot * streams) + 2).min(256);
        let tree = DraftTree::random(nodes, 3)?;
        let batches = (0..sets)
            .map(|set| {
                let slots = (set * streams..(set + 1) * streams).map(|slot| slot as i32).collect();
                let batch = TreeBatch::new(vec![tree.clone(); streams], slots)?;
                let on_device = TreeOnDevice::new(stream, &batch)?;
                Ok((batch, on_device))
            })
            .collect::<Outcome<Vec<_>>>()?;
        let rows = streams * nodes * dims.q_width();
        let scratch = match shape.block {
            Some(_) => block_attention::launch::scratch_len(dims, nodes, streams),
            None => launch::scratch_len(dims, &batches[0].0),
        };
        let many = |n: usize| (0..sets).map(move |_| n);
        Ok(Self {
            shape,
            capacity,
            q: many(rows).map(|n| filled(stream, drawn, n)).collect::<Outcome<_>>()?,
            out: many(rows).map(|n| filled(stream, drawn, n)).collect::<Outcome<_>>()?,
            keys: filled(stream, drawn, sets * streams * slot)?,
            values: filled(stream, drawn, sets * streams * slot)?,
            lens: stream.clone_htod(&vec![context as i32; streams])?,
            scratch: stream.alloc_zeros(scratch)?,
            batches,
        })
    }

    fn launch(&mut self, stream: &Arc<CudaStream>, tile: Option<Tile>, n: usize) -> Outcome<()> {
        let set = n % self.batches.len();
        let (batch, tree) = &self.batches[set];
        let buffers = AttentionBuffers {
            q: self.q[set].as_view(),
            k_cache: self.keys.as_view(),
            v_cache: self.values.as_view(),
            capacity: self.capacity,
            lens: self.lens.as_view(),
            scratch: &mut self.scratch,
            out: self.out[set].as_view_mut(),
        };
        let dims = self.shape.dims;
        match self.shape.block {
            Some(mask) => {
                let blocks = Blocks {
                    block_size: self.shape.nodes,
                    slots: batch.slots(),
                    on_device: tree.slots.first(batch.sequences()),
                };
                block_attention::launch::forward(stream, dims, blocks, mask, tile, buffers)?;
            }
            None => launch::verify_with(stream, dims, batch, tree, tile, buffers)?,
        }
        Ok(())
    }

    fn output(&mut self, stream: &Arc<CudaStream>, tile: Option<Tile>) -> Outcome<Vec<bf16>> {
        self.launch(stream, tile, 0)?;
        Ok(stream.clone_dtoh(&self.out[0])?)
    }
}

fn tile_name(tile: Option<Tile>) -> String {
    tile.map_or("auto".into(), |tile| format!("{tile:?}").to_lowercase())
}

/// One JSON line for one tile.
fn row(stream: &Arc<CudaStream>, case: &mut Case, tile: Option<Tile>, device: &str) -> Outcome<String> {
    let sets = case.batches.len();
    let cold = capture(stream, sets, |n| case.launch(stream, tile, n))?;
    let warm = capture(stream, 4, |_| case.launch(stream, tile, 0))?;
    let times = replay(stream, &cold, sets, REPLAYS)?;
    let warm = replay(stream, &warm, 4, REPLAYS)?;
    let repeats = times.len();
    let Shape { dims, streams, nodes, context, block } = case.shape;
    let (bytes, flops) = case.shape.work();
    let floor = (bytes / BYTES_PER_US).max(flops / FLOPS_PER_US);
    let (name, kind) =
        if block.is_some() { ("block_attention", "block") } else { ("tree_attention.verify", "random") };
    let mask = block.map_or(String::new(), |mask| {
        let window = mask.window.map_or("null".into(), |window| window.to_string());
        format!("\"window\":{window},\"causal\":{},", mask.causal)
    });
    let tile = tile_name(tile);
    Ok(format!(
        "{{\"schema\":1,\"case\":\"{name}\",\"variant\":\"{tile}\",\"shape\":\"{kind}\",{mask}\"heads\":\"{}/{}\",\"head_dim\":{},\"batch\":{streams},\
         \"nodes\":{nodes},\"context\":{context},\"us_median\":{:.3},\"us_p10\":{:.3},\"us_p90\":{:.3},\"us_warm\":{:.3},\
         \"us_floor\":{floor:.3},\"bytes\":{bytes},\"flops\":{flops},\"repeats\":{repeats},\"device\":\"{device}\",\"command\":\"{COMMAND}\"}}",
        dims.q_heads,
        dims.kv_heads,
        dims.head_dim,
        at(&times, 0.5),
        at(&times, 0.1),
        at(&times, 0.9),
        at(&warm, 0.5),
    ))
}

fn shapes(quick: bool) -> Outcome<Vec<(Shape, bool)>> {
    let models = [AttnDims::new(16, 4, 256)?, AttnDims::new(32, 8, 128)?];
    let contexts: &[usize] =
        if quick { &[2_048, 8_192, 32_768] } else { &[0, 512, 2_048, 8_192, 32_768, 131_072] };
    let mut all = Vec::new();
    for dims in models {
        for streams in [1, 4, 16] {
            for nodes in [16, 64, 128] {
                for &context in contexts {
                    let key = nodes == 64 && (2_048..=32_768).contains(&context) && streams != 4;
                    if !quick || key {
                        all.push((Shape { dims, streams, nodes, context, block: None }, key));
                    }
                }
            }
        }
        // plain decoding
        for context in [2_048, 32_768] {
            all.push((Shape { dims, streams: 1, nodes: 1, context, block: None }, false));
        }
    }
    for window in [None, Some(4_096)] {
        for context in [2_048, 8_192, 32_768] {
            let mask = BlockMask { window, causal: window.is_some() };
            let shape = Shape { dims: models[1], streams: 1, nodes: 16, context, block: Some(mask) };
            all.push((shape, context == 8_192));
        }
    }
    Ok(all)
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    if !has_driver() {
        eprintln!("no CUDA device on this machine: nothing is timed");
        return Ok(());
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    let after = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let (json, only, one) = (after("--json"), after("--only"), after("--tile"));
    let context = CudaContext::new(0)?;
    // SAFETY: every buffer of this context is used on the one stream below; a capture could not hold cross-stream events.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let device = context.name()?;
    let drawn = stream.clone_htod(&noise(DRAWN, 1))?;
    for (shape, every_tile) in shapes(quick)? {
        let Shape { dims, streams, nodes, context, block } = shape;
        let name = format!("{},{streams},{nodes},{context}", dims.head_dim);
        if only.is_some_and(|only| *only != name || block.is_some()) {
            continue;
        }
        let mut case = Case::new(&stream, &drawn, shape)?;
        let want = case.output(&stream, None)?;
        if want.iter().any(|x| !x.is_finite()) {
            return Err("an output is not finite".into());
        }
        let mut tiles = vec![None];
        if every_tile {
            tiles.extend(Tile::families(&stream)?.into_iter().flatten().copied().map(Some));
        }
        for tile in tiles {
            if one.is_some_and(|one| *one != tile_name(tile)) {
                continue;
            }
            let got = case.output(&stream, tile)?;
            let off = |(a, b): (&bf16, &bf16)| (a.to_f32() - b.to_f32()).abs();
            let (off, most) = (got.iter().zip(&want).map(off).fold(0.0, f32::max), 1.0 / 64.0);
            if off.is_nan() || off > most {
                return Err(format!("{tile:?}: {off} off the default's output").into());
            }
            let line = row(&stream, &mut case, tile, &device)?;
            println!("{line}");
            if let Some(path) = json {
                writeln!(OpenOptions::new().create(true).append(true).open(path)?, "{line}")?;
            }
        }
    }
    Ok(())
}
