//! gdn_prefill: both tiers, every block of the second launch and splits of a sequence over several pairs of launches.

use std::sync::Arc;

use half::bf16;

use super::buffers::{Element, Gpu, Guarded, Scratch};
use super::{Kernel, TIER_A, TIER_B};
use crate::Result;
use crate::contract::Gate::{self, Invariant, Nonfinite, Repeat, Shapes, Sums};
use crate::contract::bound::Bound;
use crate::contract::scene::Scene;
use crate::contract::subjects::gdn::{dims, gates};
use crate::contract::subjects::prefill::sequences;
use crate::gdn_prefill::launch::{self, Block, Plan, PrefillBuffers, SequencesOnDevice, Tier};

const FAULTS: &[(Gate, &str)] = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "dropped_slice"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    vec![
        kernel::<f32>(gpu, "gdn_prefill a", TIER_A).planted("gdn_prefill/", FAULTS),
        kernel::<bf16>(gpu, "gdn_prefill b", TIER_B),
    ]
}

fn kernel<Out: Tier + Element>(gpu: &Gpu, name: &str, bound: Bound) -> Kernel {
    let with = |block: Option<Block>, chunks: Option<usize>| {
        move |gpu: &Gpu, scene: &Scene, out: &mut [f32]| prefill::<Out>(gpu, scene, (block, chunks), out)
    };
    let mut kernel = Kernel::new(gpu, name, "gdn_prefill", bound, with(None, None)).rounded(&[0]);
    for block in Block::ALL {
        kernel = kernel.variant(format!("{name}, {block:?}"), with(Some(block), None));
    }
    let kernel = kernel.variant(format!("{name}, a chunk a launch"), with(None, Some(1)));
    Kernel { planted_call: Some(Arc::new(with(Some(Block::Small64), None))), ..kernel }
}

/// f32 of a chunk's record for one value head, at least.
const RECORD: usize = 5_380;

fn prefill<Out: Tier + Element>(
    gpu: &Gpu,
    scene: &Scene,
    (block, chunks): (Option<Block>, Option<usize>),
    out: &mut [f32],
) -> Result<()> {
    let (dims, sequences) = (dims(scene), sequences(&scene.batch)?);
    let on_device = SequencesOnDevice::new(&gpu.0, &sequences)?;
    let usual = Plan::new(dims, &sequences);
    let plan = Plan { block, chunks: chunks.unwrap_or(usual.chunks) };
    let needed = match chunks {
        None => launch::scratch_len(dims, &sequences),
        Some(chunks) => 2 * sequences.len() * chunks * dims.v_heads * RECORD,
    };
    let qkv = Guarded::<bf16>::input(gpu, "qkv", scene.input(0))?;
    let gates = Guarded::<f32>::input(gpu, "gates", &gates(scene))?;
    let mut state = Guarded::<f32>::input(gpu, "state", scene.input(3))?;
    let (o_out, pool) = out.split_at_mut(scene.batch.rows() * dims.v_heads * dims.dv);
    let mut o = Guarded::<Out>::output(gpu, "o", o_out.len())?;
    let mut scratch = Scratch::new(gpu, needed)?;
    let buffers = PrefillBuffers {
        qkv: qkv.view(),
        gates: gates.view(),
        state: state.view_mut(),
        scratch: &mut scratch.slice,
        o: o.view_mut(),
    };
    launch::forward_with(&gpu.0, dims, &sequences, &on_device, plan, buffers)?;
    scratch.check(gpu)?;
    qkv.untouched(gpu)?;
    gates.untouched(gpu)?;
    o.read(gpu, o_out)?;
    state.read(gpu, pool)
}
