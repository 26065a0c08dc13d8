//! tree_attention and block_attention: both families of tiles at both head widths, and the served form with bfloat16 outputs.

use std::sync::Arc;

use half::bf16;

use super::buffers::{Element, Gpu, Guarded, Scratch};
use super::{Kernel, SumScene};
use crate::Result;
use crate::attend::launch::{AttentionBuffers, Output, Tile};
use crate::block_attention::launch as block;
use crate::contract::Gate::{self, Invariant, Nonfinite, Repeat, Shapes, Sums};
use crate::contract::bound::Bound;
use crate::contract::scene::{Scene, Shape};
use crate::contract::subjects::attention::{blocks, dims, mask};
use crate::cuda::TreeOnDevice;
use crate::tree_attention::launch as tree;

/// q, keys and values.
const ALL: &[usize] = &[0, 1, 2];
/// `2^-7 sum p |v| / sum p`.
const SHARE: f64 = 1.0 / 128.0;

const TREE_FAULTS: &[(Gate, &str)] = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "short_path"),
    (Shapes, "score_scale"),
    (Shapes, "dropped_slice"),
    (Shapes, "early_fetch"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const BLOCK_FAULTS: &[(Gate, &str)] = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "window"),
    (Shapes, "causal"),
    (Shapes, "score_scale"),
    (Shapes, "dropped_slice"),
    (Shapes, "early_fetch"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) fn kernels(gpu: &Gpu) -> Result<Vec<Kernel>> {
    let mut kernels = Vec::new();
    for tiles in Tile::families(&gpu.0)? {
        let family = format!("{:?}", tiles[0]).to_lowercase();
        for narrow in [false, true] {
            let width = if narrow { 128 } else { 256 };
            let name = |room: &str| format!("{room} {family} d{width}");
            kernels.push(kernel(gpu, name("tree_attention"), "tree_attention", narrow, tiles, trees::<f32>));
            kernels.push(kernel(
                gpu,
                name("block_attention"),
                "block_attention",
                narrow,
                tiles,
                draft_blocks::<f32>,
            ));
        }
    }
    for (narrow, width) in [(false, 256), (true, 128)] {
        for (room, call) in
            [("tree_attention", trees::<bf16> as Attend), ("block_attention", draft_blocks::<bf16>)]
        {
            let kernel = Kernel::new(
                gpu,
                format!("{room} bf16 d{width}"),
                room,
                Bound::Terms(SHARE, true),
                move |gpu, scene, out| call(gpu, scene, None, out),
            );
            kernels.push(Kernel {
                narrow,
                sums: Some(sums()),
                sums_bound: Bound::Rounded(1e-5),
                ..kernel.rounded(ALL)
            });
        }
    }
    Ok(kernels)
}

type Attend = fn(&Gpu, &Scene, Option<Tile>, &mut [f32]) -> Result<()>;

fn kernel(gpu: &Gpu, name: String, room: &str, narrow: bool, tiles: &'static [Tile], call: Attend) -> Kernel {
    let with =
        |tile: Tile| move |gpu: &Gpu, scene: &Scene, out: &mut [f32]| call(gpu, scene, Some(tile), out);
    let mut kernel = Kernel::new(gpu, &*name, room, Bound::Terms(SHARE, false), with(tiles[0])).rounded(ALL);
    for &tile in &tiles[1..] {
        kernel = kernel.variant(format!("{name}, {tile:?}"), with(tile));
    }
    // the controls' images have one tile of each family at width 256
    if let Some(&tile) = tiles.iter().find(|tile| matches!(tile, Tile::Narrow | Tile::FedOne) && !narrow) {
        kernel = kernel.planted("attend/", if room == "tree_attention" { TREE_FAULTS } else { BLOCK_FAULTS });
        kernel.planted_call = Some(Arc::new(with(tile)));
    }
    Kernel {
        narrow,
        more_shapes: splits(),
        control_shapes: two_tiles(),
        sums: Some(sums()),
        sums_bound: Bound::Element(1e-5),
        ..kernel
    }
}

/// Contexts around the edges of splits and of their number.
fn splits() -> Vec<Shape> {
    let edges = [255, 256, 257, 383, 384, 385, 4095, 4096, 4097, 8193];
    edges.map(|context| Shape { context, ..Shape::tree(9) }).into()
}

/// So many keys that some of the most splits that there may be have two tiles: what a tile does to the next.
fn two_tiles() -> Vec<Shape> {
    vec![Shape { context: 4200, ..Shape::tree(12) }]
}

/// About 2,100 keys, every second one of weight 1 and the others of about 2^-10, values 1: a bfloat16 sum of weights drops the small ones.
fn sums() -> SumScene {
    let fill = |scene: &mut Scene| {
        let dims = dims(scene);
        let width = dims.head_dim;
        scene.inputs.iter_mut().for_each(|input| input.values.fill(0.0));
        for query in scene.inputs[0].values.chunks_mut(width) {
            // the scale is 1/16 at width 256, and a little more than 1/11.5 at 128
            query[0] = if width == 256 { 16.0 } else { 11.0 };
        }
        for key in scene.inputs[1].values.chunks_mut(dims.kv_width()).skip(1).step_by(2) {
            key.chunks_mut(width).for_each(|key| key[0] = -6.9375);
        }
        scene.inputs[2].values.fill(1.0);
    };
    // an odd mode: blocks without a window
    (Shape { context: 2098, ..Shape::tree(3) }, fill)
}

struct Pools {
    q: Guarded<bf16>,
    keys: Guarded<bf16>,
    values: Guarded<bf16>,
    lens: Guarded<i32>,
}

impl Pools {
    fn new(gpu: &Gpu, scene: &Scene) -> Result<Self> {
        Ok(Self {
            q: Guarded::input(gpu, "q", scene.input(0))?,
            keys: Guarded::input(gpu, "k_cache", scene.input(1))?,
            values: Guarded::input(gpu, "v_cache", scene.input(2))?,
            lens: Guarded::exactly(gpu, "lens", &scene.lens)?,
        })
    }

    /// Runs `launch` on the buffers of a call and reads its outputs.
    fn run<Out: Output + Element>(
        &self,
        gpu: &Gpu,
        scene: &Scene,
        scratch: usize,
        out: &mut [f32],
        launch: impl FnOnce(AttentionBuffers<'_, Out>) -> Result<()>,
    ) -> Result<()> {
        let mut scratch = Scratch::new(gpu, scratch)?;
        let mut outputs = Guarded::<Out>::output(gpu, "out", out.len())?;
        launch(AttentionBuffers {
            q: self.q.view(),
            k_cache: self.keys.view(),
            v_cache: self.values.view(),
            capacity: scene.capacity,
            lens: self.lens.view(),
            scratch: &mut scratch.slice,
            out: outputs.view_mut(),
        })?;
        scratch.check(gpu)?;
        self.q.untouched(gpu)?;
        self.keys.untouched(gpu)?;
        self.values.untouched(gpu)?;
        self.lens.untouched(gpu)?;
        outputs.read(gpu, out)
    }
}

fn trees<Out: Output + Element>(gpu: &Gpu, scene: &Scene, tile: Option<Tile>, out: &mut [f32]) -> Result<()> {
    let on_device = TreeOnDevice::new(&gpu.0, &scene.batch)?;
    let scratch = tree::scratch_len(dims(scene), &scene.batch);
    Pools::new(gpu, scene)?.run::<Out>(gpu, scene, scratch, out, |buffers| {
        tree::verify_with(&gpu.0, dims(scene), &scene.batch, &on_device, tile, buffers)
    })
}

fn draft_blocks<Out: Output + Element>(
    gpu: &Gpu,
    scene: &Scene,
    tile: Option<Tile>,
    out: &mut [f32],
) -> Result<()> {
    let draft = blocks(scene);
    let on_device = gpu.up(&draft.slots)?;
    let scratch = block::scratch_len(dims(scene), draft.block_size, draft.slots.len());
    let of =
        block::Blocks { block_size: draft.block_size, slots: &draft.slots, on_device: on_device.as_view() };
    Pools::new(gpu, scene)?.run::<Out>(gpu, scene, scratch, out, |buffers| {
        block::forward(&gpu.0, dims(scene), of, mask(scene), tile, buffers)
    })
}
