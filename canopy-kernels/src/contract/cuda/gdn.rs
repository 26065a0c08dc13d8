//! tree_gdn and tree_gdn_serial: every design of verify, the commits, and both in one launch.

use std::sync::Arc;

use half::bf16;

use super::buffers::{Element, Gpu, Guarded, Scratch};
use super::rows::Faults;
use super::{Kernel, TIER_A, TIER_B};
use crate::Result;
use crate::contract::Gate::{Invariant, Nonfinite, Repeat, Shapes, Sums};
use crate::contract::bound::Bound;
use crate::contract::scene::{Scene, Shape};
use crate::contract::subjects::Subject;
use crate::contract::subjects::gdn::{dims, fill_sums, gates};
use crate::cuda::{PathsOnDevice, TreeOnDevice};
use crate::tree_gdn::{Solve, blocked, fused, launch, series};
use crate::tree_gdn_serial::launch as serial;

/// qkv is input 0.
const QKV: &[usize] = &[0];

const VERIFY_FAULTS: Faults = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "short_path"),
    (Shapes, "dropped_slice"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

/// Its sums are products of sixteen nodes, too few of which follow each other for a bfloat16 accumulator to show in tier B.
const BLOCKED_FAULTS: Faults = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "short_path"),
    (Shapes, "dropped_slice"),
    (Sums, "short_path"),
    (Invariant, "one_ulp"),
];

/// Those of its last launch, and of what it shares with the split design.
const INVERSE_FAULTS: Faults = &[
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "short_path"),
    (Shapes, "dropped_slice"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const COMMIT_FAULTS: Faults = &[
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "missed_node"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const ROUND_FAULTS: Faults =
    &[(Shapes, "missed_node"), (Shapes, "short_path"), (Shapes, "half_sum"), (Invariant, "one_ulp")];

const SNAPSHOT_FAULTS: Faults = &[
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "row_order"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const CHAIN_FAULTS: Faults = &[
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "stale"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    const VERIFY: &str = "tree_gdn verify forward";
    const COMMIT: &str = "tree_gdn commit walk";
    let mut kernels = vec![
        fused_kernel::<f32>(gpu, "tree_gdn fused a", TIER_A),
        fused_kernel::<bf16>(gpu, "tree_gdn fused b", TIER_B),
        Kernel {
            planted_call: Some(Arc::new(wide_verify::<64>)),
            refuses: not_for_wide_blocks,
            ..Kernel::new(gpu, "tree_gdn fused wide", VERIFY, TIER_A, wide_verify::<32>)
                .variant("tree_gdn fused wide, 64 columns", wide_verify::<64>)
                .planted("tree_gdn/fused_wide", VERIFY_FAULTS)
        },
        Kernel {
            planted_call: Some(Arc::new(blocked_verify::<64>)),
            ..Kernel::new(gpu, "tree_gdn blocked b", VERIFY, TIER_B, blocked_verify::<32>)
                .rounded(QKV)
                .variant("tree_gdn blocked b, widest", blocked_verify::<0>)
                .planted("tree_gdn/blocked", BLOCKED_FAULTS)
        },
        Kernel::new(gpu, "tree_gdn split f32", VERIFY, TIER_A, split::<f32>)
            .planted("tree_gdn/verify", VERIFY_FAULTS),
        Kernel::new(gpu, "tree_gdn split bf16", VERIFY, TIER_A, split::<bf16>).rounded(QKV),
        Kernel::new(gpu, "tree_gdn split inverse", VERIFY, TIER_A, by_solve(Solve::Dense))
            .planted("tree_gdn/series", INVERSE_FAULTS),
        series_kernel(gpu, "tree_gdn split neumann", Solve::Neumann),
        series_kernel(gpu, "tree_gdn split squaring", Solve::Squaring),
        Kernel {
            refuses: long_chains::<false>,
            ..Kernel::new(gpu, "tree_gdn commit bf16", COMMIT, Bound::Element(5e-6), commit_fused)
                .rounded(QKV)
        },
        Kernel::new(gpu, "tree_gdn commit f32", COMMIT, Bound::Element(5e-6), commit_split)
            .planted("tree_gdn/commit", COMMIT_FAULTS),
        round_kernel::<f32>(gpu, "tree_gdn fused commit a", TIER_A)
            .planted("tree_gdn/fused_commit", ROUND_FAULTS),
        round_kernel::<bf16>(gpu, "tree_gdn fused commit b", TIER_B),
    ];
    const SNAPSHOTS: &str = "tree_gdn_serial verify";
    kernels.push(
        Kernel::new(gpu, "tree_gdn_serial snapshots", SNAPSHOTS, TIER_A, snapshots::<bf16, 32>)
            .rounded(QKV)
            .variant("tree_gdn_serial snapshots, 64 columns", snapshots::<bf16, 64>)
            .planted("tree_gdn_serial/serial", SNAPSHOT_FAULTS),
    );
    kernels.push(
        Kernel::new(gpu, "tree_gdn_serial commit", COMMIT, Bound::Element(5e-6), commit_snapshots)
            .rounded(QKV)
            .planted("tree_gdn_serial/serial", &[(Shapes, "missed_node")]),
    );
    kernels.push(
        Kernel::new(gpu, "tree_gdn_serial chain", "tree_gdn chain walk", TIER_A, chain::<bf16, 32>)
            .rounded(QKV)
            .variant("tree_gdn_serial chain, 64 columns", chain::<bf16, 64>)
            .variant("tree_gdn_serial chain, 128 columns", chain::<bf16, 128>)
            .planted("tree_gdn_serial/serial", CHAIN_FAULTS),
    );
    kernels.push(Kernel::new(
        gpu,
        "tree_gdn_serial chain f32",
        "tree_gdn chain walk",
        TIER_A,
        chain::<f32, 32>,
    ));
    // 64 nodes: what the controls' images take, and enough for a bfloat16 sum to lose an eighth
    let sums = (Shape::chain(64), fill_sums as fn(&mut Scene));
    let with_sums = |kernel: Kernel| Kernel { sums: kernel.sums().is_some().then(|| sums.clone()), ..kernel };
    kernels.into_iter().map(with_sums).collect()
}

/// A chain's paths have half the square of its nodes entries, which no CTA's shared memory holds beyond 128; tier B, whose state takes half
/// the place, holds one more.
fn long_chains<const TIER_B: bool>(shape: &Shape) -> bool {
    shape.chain && shape.nodes.iter().any(|&nodes| nodes > 128 + usize::from(TIER_B))
}

/// Blocks for f32 rows end at 128 nodes, and a chain's paths no longer fit beside them from 127 on.
fn not_for_wide_blocks(shape: &Shape) -> bool {
    shape.nodes.iter().any(|&nodes| nodes > 128 || shape.chain && nodes > 126)
}

fn fused_kernel<Out: fused::Tier + Element>(gpu: &Gpu, name: &str, bound: Bound) -> Kernel {
    let kernel = Kernel::new(gpu, name, "tree_gdn verify forward", bound, fused_verify::<Out, 32>)
        .rounded(QKV)
        .variant(format!("{name}, 64 columns"), fused_verify::<Out, 64>)
        .variant(format!("{name}, 128 columns"), fused_verify::<Out, 128>)
        .planted("tree_gdn/fused", VERIFY_FAULTS);
    let refuses = if Out::PARTS == 1 { long_chains::<true> } else { long_chains::<false> };
    Kernel { planted_call: Some(Arc::new(fused_verify::<Out, 64>)), refuses, ..kernel }
}

fn round_kernel<Out: fused::Tier + Element>(gpu: &Gpu, name: &str, bound: Bound) -> Kernel {
    let kernel = Kernel::new(gpu, name, "tree_gdn round walk", bound, round::<Out, 32, 32>)
        .rounded(QKV)
        .variant(format!("{name}, 128 columns"), round::<Out, 32, 128>)
        .variant(format!("{name}, commit and verify apart"), round_apart::<Out>);
    Kernel { planted_call: Some(Arc::new(round::<Out, 64, 32>)), refuses: long_chains::<false>, ..kernel }
}

/// A call's inputs.
struct Inputs<T> {
    qkv: Guarded<T>,
    gates: Guarded<f32>,
    state: Guarded<f32>,
    tree: TreeOnDevice,
}

impl<T: Element> Inputs<T> {
    fn new(gpu: &Gpu, scene: &Scene) -> Result<Self> {
        Ok(Self {
            qkv: Guarded::input(gpu, "qkv", scene.input(0))?,
            gates: Guarded::input(gpu, "gates", &gates(scene))?,
            state: Guarded::input(gpu, "state", scene.input(3))?,
            tree: TreeOnDevice::new(&gpu.0, &scene.batch)?,
        })
    }

    fn untouched(&self, gpu: &Gpu) -> Result<()> {
        self.qkv.untouched(gpu)?;
        self.gates.untouched(gpu)?;
        self.state.untouched(gpu)
    }
}

/// The planes of a verify.
struct Planes<Out> {
    o: Guarded<Out>,
    u: Guarded<f32>,
    g_cum: Guarded<f32>,
}

impl<Out: Element> Planes<Out> {
    fn new(gpu: &Gpu, scene: &Scene) -> Result<Self> {
        let (rows, dims) = (scene.batch.rows(), dims(scene));
        let values = rows * dims.v_heads * dims.dv;
        Ok(Self {
            o: Guarded::output(gpu, "o", values)?,
            u: Guarded::output(gpu, "u", values)?,
            g_cum: Guarded::output(gpu, "g_cum", rows * dims.v_heads)?,
        })
    }

    /// Into the start of `out`; what follows is left.
    fn read<'a>(&self, gpu: &Gpu, scene: &Scene, out: &'a mut [f32]) -> Result<&'a mut [f32]> {
        let (rows, dims) = (scene.batch.rows(), dims(scene));
        let (o, rest) = out.split_at_mut(rows * dims.v_heads * dims.dv);
        let (u, rest) = rest.split_at_mut(rows * dims.v_heads * dims.dv);
        let (g_cum, rest) = rest.split_at_mut(rows * dims.v_heads);
        self.o.read(gpu, o)?;
        self.u.read(gpu, u)?;
        self.g_cum.read(gpu, g_cum)?;
        Ok(rest)
    }
}

fn launch_fused<Out: fused::Tier + Element>(
    gpu: &Gpu,
    scene: &Scene,
    columns: usize,
    inputs: &Inputs<bf16>,
    planes: &mut Planes<Out>,
) -> Result<()> {
    let buffers = fused::FusedBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    fused::verify(&gpu.0, dims(scene), &scene.batch, &inputs.tree, columns, buffers)
}

fn fused_verify<Out: fused::Tier + Element, const COLUMNS: usize>(
    gpu: &Gpu,
    scene: &Scene,
    out: &mut [f32],
) -> Result<()> {
    let (inputs, mut planes) = (Inputs::new(gpu, scene)?, Planes::<Out>::new(gpu, scene)?);
    launch_fused(gpu, scene, COLUMNS, &inputs, &mut planes)?;
    inputs.untouched(gpu)?;
    planes.read(gpu, scene, out).map(drop)
}

fn wide_verify<const COLUMNS: usize>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (inputs, mut planes) = (Inputs::<f32>::new(gpu, scene)?, Planes::<f32>::new(gpu, scene)?);
    let buffers = fused::FusedBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    fused::verify_wide(&gpu.0, dims(scene), &scene.batch, &inputs.tree, COLUMNS, buffers)?;
    inputs.untouched(gpu)?;
    planes.read(gpu, scene, out).map(drop)
}

/// In blocks of so many value columns; 0 takes the widest that there is for the largest tree.
fn blocked_verify<const COLUMNS: usize>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (inputs, mut planes) = (Inputs::new(gpu, scene)?, Planes::<bf16>::new(gpu, scene)?);
    let fits = |&columns: &usize| blocked::fits(inputs.tree.most_nodes, columns, usize::MAX);
    let widest = blocked::COLUMNS.into_iter().rfind(fits).unwrap_or(32);
    let buffers = fused::FusedBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    let columns = if COLUMNS == 0 { widest } else { COLUMNS };
    blocked::verify(&gpu.0, dims(scene), &scene.batch, &inputs.tree, columns, buffers)?;
    inputs.untouched(gpu)?;
    planes.read(gpu, scene, out).map(drop)
}

fn launch_split<T: launch::Element + Element>(
    gpu: &Gpu,
    scene: &Scene,
    inputs: &Inputs<T>,
    planes: &mut Planes<f32>,
) -> Result<()> {
    let mut scratch = Scratch::new(gpu, launch::scratch_len(dims(scene), &scene.batch))?;
    let buffers = launch::VerifyBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        scratch: &mut scratch.slice,
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    launch::verify(&gpu.0, dims(scene), &scene.batch, &inputs.tree, buffers)?;
    scratch.check(gpu)
}

fn split<T: launch::Element + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (inputs, mut planes) = (Inputs::<T>::new(gpu, scene)?, Planes::new(gpu, scene)?);
    launch_split(gpu, scene, &inputs, &mut planes)?;
    inputs.untouched(gpu)?;
    planes.read(gpu, scene, out).map(drop)
}

/// The split design under a series, whose launches share the inverse's last entry point and with it the faults inside.
fn series_kernel(gpu: &Gpu, name: &str, solve: Solve) -> Kernel {
    Kernel {
        loses: |shape| shape.hard,
        ..Kernel::new(gpu, name, "tree_gdn verify forward", TIER_A, by_solve(solve))
    }
}

/// The split design under a solve that makes matrices first.
fn by_solve(solve: Solve) -> impl Fn(&Gpu, &Scene, &mut [f32]) -> Result<()> + Send + Sync + 'static {
    move |gpu, scene, out| split_by(solve, gpu, scene, out)
}

fn split_by(solve: Solve, gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (inputs, mut planes) = (Inputs::<f32>::new(gpu, scene)?, Planes::new(gpu, scene)?);
    let dims = dims(scene);
    let mut scratch = Scratch::new(gpu, series::scratch_len(dims, &scene.batch, solve)?)?;
    let buffers = launch::VerifyBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        scratch: &mut scratch.slice,
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    series::verify(&gpu.0, dims, &scene.batch, &inputs.tree, solve, buffers)?;
    scratch.check(gpu)?;
    inputs.untouched(gpu)?;
    planes.read(gpu, scene, out).map(drop)
}

/// The committed pool from the tape of a verify.
fn launch_commit<T: launch::Element + Element>(
    gpu: &Gpu,
    scene: &Scene,
    inputs: &mut Inputs<T>,
    u: &Guarded<f32>,
) -> Result<()> {
    let on_device = PathsOnDevice::new(&gpu.0, &scene.paths)?;
    let tape = launch::LayerTape { qkv: inputs.qkv.view(), gates: inputs.gates.view(), u: u.view() };
    let mut state = inputs.state.view_mut();
    launch::commit(&gpu.0, dims(scene), &scene.paths, &on_device, &[tape], &mut state)
}

fn commit_fused(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (mut inputs, mut planes) = (Inputs::new(gpu, scene)?, Planes::<f32>::new(gpu, scene)?);
    launch_fused(gpu, scene, 32, &inputs, &mut planes)?;
    launch_commit(gpu, scene, &mut inputs, &planes.u)?;
    inputs.qkv.untouched(gpu)?;
    inputs.gates.untouched(gpu)?;
    inputs.state.read(gpu, out)
}

fn commit_split(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (mut inputs, mut planes) = (Inputs::<f32>::new(gpu, scene)?, Planes::new(gpu, scene)?);
    launch_split(gpu, scene, &inputs, &mut planes)?;
    launch_commit(gpu, scene, &mut inputs, &planes.u)?;
    inputs.qkv.untouched(gpu)?;
    inputs.gates.untouched(gpu)?;
    inputs.state.read(gpu, out)
}

/// A verify (of `FIRST` columns) whose paths the second launch commits before it verifies the same trees from there.
fn round<Out: fused::Tier + Element, const FIRST: usize, const COLUMNS: usize>(
    gpu: &Gpu,
    scene: &Scene,
    out: &mut [f32],
) -> Result<()> {
    let (mut inputs, mut last) = (Inputs::new(gpu, scene)?, Planes::<f32>::new(gpu, scene)?);
    launch_fused(gpu, scene, FIRST, &inputs, &mut last)?;
    let tape = Guarded::exactly(gpu, "pending u", &last.u.values(gpu)?)?;
    let on_device = PathsOnDevice::new(&gpu.0, &scene.paths)?;
    let mut planes = Planes::<Out>::new(gpu, scene)?;
    let pending = fused::Pending {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        u: tape.view(),
        paths: &scene.paths,
        on_device: &on_device,
    };
    let buffers = fused::FusedBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view_mut(),
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    fused::commit_and_verify(&gpu.0, dims(scene), &scene.batch, &inputs.tree, COLUMNS, pending, buffers)?;
    inputs.qkv.untouched(gpu)?;
    inputs.gates.untouched(gpu)?;
    tape.untouched(gpu)?;
    let pool = planes.read(gpu, scene, out)?;
    inputs.state.read(gpu, pool)
}

/// The same in three launches, one after another without a wait: verify, commit, verify.
fn round_apart<Out: fused::Tier + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (mut inputs, mut last) = (Inputs::new(gpu, scene)?, Planes::<f32>::new(gpu, scene)?);
    launch_fused(gpu, scene, 32, &inputs, &mut last)?;
    launch_commit(gpu, scene, &mut inputs, &last.u)?;
    let mut planes = Planes::<Out>::new(gpu, scene)?;
    launch_fused(gpu, scene, 32, &inputs, &mut planes)?;
    inputs.qkv.untouched(gpu)?;
    inputs.gates.untouched(gpu)?;
    let pool = planes.read(gpu, scene, out)?;
    inputs.state.read(gpu, pool)
}

/// Runs the baseline; the snapshots, and o into `out` if there is one.
fn walk<T: serial::Element + Element>(
    gpu: &Gpu,
    scene: &Scene,
    columns: usize,
    inputs: &Inputs<T>,
    out: Option<&mut [f32]>,
) -> Result<Guarded<f32>> {
    let (rows, dims) = (scene.batch.rows(), dims(scene));
    let mut snapshots = Guarded::output(gpu, "snapshots", rows * dims.state_len())?;
    let mut o = Guarded::<f32>::output(gpu, "o", rows * dims.v_heads * dims.dv)?;
    let buffers = serial::SnapshotBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: inputs.state.view(),
        snapshots: snapshots.view_mut(),
        o: o.view_mut(),
    };
    serial::verify(&gpu.0, dims, &scene.batch, &inputs.tree, columns, buffers)?;
    if let Some(out) = out {
        o.read(gpu, out)?;
    }
    inputs.untouched(gpu)?;
    Ok(snapshots)
}

fn snapshots<T: serial::Element + Element, const COLUMNS: usize>(
    gpu: &Gpu,
    scene: &Scene,
    out: &mut [f32],
) -> Result<()> {
    let inputs = Inputs::<T>::new(gpu, scene)?;
    let snapshots = walk(gpu, scene, COLUMNS, &inputs, Some(out))?;
    // the guards, and that no snapshot was left out
    match snapshots.values(gpu)?.iter().position(|x| x.to_bits() == f32::POISON.to_bits()) {
        None => Ok(()),
        Some(at) => {
            let (expected, got) = ("every snapshot written".into(), format!("element {at} is not"));
            Err(crate::Error::Value { op: "contract", arg: "snapshots", expected, got })
        }
    }
}

fn commit_snapshots(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let mut inputs = Inputs::<bf16>::new(gpu, scene)?;
    let snapshots = walk(gpu, scene, 32, &inputs, None)?;
    let snapshots = Guarded::exactly(gpu, "snapshots", &snapshots.values(gpu)?)?;
    let on_device = PathsOnDevice::new(&gpu.0, &scene.paths)?;
    let state = inputs.state.view_mut();
    serial::commit(&gpu.0, dims(scene), &scene.paths, &on_device, snapshots.view(), state)?;
    snapshots.untouched(gpu)?;
    inputs.state.read(gpu, out)
}

fn chain<T: serial::Element + Element, const COLUMNS: usize>(
    gpu: &Gpu,
    scene: &Scene,
    out: &mut [f32],
) -> Result<()> {
    let (mut inputs, mut planes) = (Inputs::<T>::new(gpu, scene)?, Planes::<f32>::new(gpu, scene)?);
    let buffers = serial::ChainBuffers {
        qkv: inputs.qkv.view(),
        gates: inputs.gates.view(),
        state: serial::Pool::Advance(inputs.state.view_mut()),
        o: planes.o.view_mut(),
        u: planes.u.view_mut(),
        g_cum: planes.g_cum.view_mut(),
    };
    serial::chain(&gpu.0, dims(scene), &scene.batch, &inputs.tree, COLUMNS, buffers)?;
    inputs.qkv.untouched(gpu)?;
    inputs.gates.untouched(gpu)?;
    let pool = planes.read(gpu, scene, out)?;
    inputs.state.read(gpu, pool)
}
