//! tree_conv, with and without the gates in its launch, and the gates alone.

use half::bf16;

use super::buffers::{Element, Gpu, Guarded};
use super::rows::{Faults, Run};
use super::{Kernel, TIER_A};
use crate::contract::Gate::{Invariant, Nonfinite, Repeat, Shapes, Sums};
use crate::contract::bound::Bound;
use crate::contract::scene::Scene;
use crate::contract::subjects::conv::dims;
use crate::cuda::{PathsOnDevice, TreeOnDevice};
use crate::gates::launch::GateBuffers;
use crate::tree_conv::launch::{ConvBuffers, OutputOf};
use crate::{Result, gates, tree_conv};

const CONV: Faults = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "row_order"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const CONV_GATES: Faults = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "row_order"),
    (Shapes, "early_branch"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const GATES: Faults = &[
    (Nonfinite, "leak"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "early_branch"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    let kernel = |name: &str, like: &str, bound, call: Run| Kernel::new(gpu, name, like, bound, call);
    vec![
        kernel("tree_conv verify f32", "tree_conv verify", TIER_A, conv::<f32, f32>)
            .planted("tree_conv/", CONV),
        kernel("tree_conv verify bf16", "tree_conv verify", Bound::Rounded(1e-5), conv::<bf16, bf16>)
            .rounded(&[0, 1, 2]),
        kernel("tree_conv verify f32 to bf16", "tree_conv verify", Bound::Rounded(1e-5), conv::<f32, bf16>),
        kernel(
            "tree_conv verify f32 with gates",
            "tree_conv verify with gates",
            TIER_A,
            conv_gates::<f32, f32>,
        )
        .planted("tree_conv/", CONV_GATES),
        kernel(
            "tree_conv verify bf16 with gates",
            "tree_conv verify with gates",
            Bound::Rounded(1e-5),
            conv_gates::<bf16, bf16>,
        )
        .rounded(&[0, 1, 2, 3]),
        kernel(
            "tree_conv verify f32 to bf16 with gates",
            "tree_conv verify with gates",
            Bound::Rounded(1e-5),
            conv_gates::<f32, bf16>,
        ),
        kernel("tree_conv commit f32", "tree_conv commit", Bound::Element(0.0), conv_commit::<f32>)
            .planted("tree_conv/", &[(Repeat, "touched"), (Shapes, "missed_node")]),
        kernel("tree_conv commit bf16", "tree_conv commit", Bound::Element(0.0), conv_commit::<bf16>)
            .rounded(&[0, 1, 2]),
        kernel("gates f32", "gates", Bound::Element(1e-5), gate_values::<f32>).planted("gates/", GATES),
        kernel("gates bf16", "gates", Bound::Element(1e-5), gate_values::<bf16>).rounded(&[0]),
    ]
}

/// What the convolution reads.
struct Convolved<T> {
    tree: TreeOnDevice,
    x: Guarded<T>,
    weight: Guarded<T>,
    conv_state: Guarded<T>,
}

impl<T: tree_conv::launch::Element + Element> Convolved<T> {
    fn new(gpu: &Gpu, scene: &Scene) -> Result<Self> {
        Ok(Self {
            tree: TreeOnDevice::new(&gpu.0, &scene.batch)?,
            x: Guarded::input(gpu, "x", scene.input(0))?,
            weight: Guarded::input(gpu, "weight", scene.input(1))?,
            conv_state: Guarded::input(gpu, "conv_state", scene.input(2))?,
        })
    }

    fn run<Out: OutputOf<T> + Element>(
        &self,
        gpu: &Gpu,
        scene: &Scene,
        gates: Option<GateBuffers<'_, T>>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut y = Guarded::<Out>::output(gpu, "out", out.len())?;
        let (x, weight, conv_state) = (self.x.view(), self.weight.view(), self.conv_state.view());
        let buffers = ConvBuffers { x, weight, conv_state, out: y.view_mut(), gates };
        tree_conv::launch::verify(&gpu.0, dims(scene), &scene.batch, &self.tree, buffers)?;
        for input in [&self.x, &self.weight, &self.conv_state] {
            input.untouched(gpu)?;
        }
        y.read(gpu, out)
    }
}

fn conv<T, Out>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()>
where
    T: tree_conv::launch::Element + Element,
    Out: OutputOf<T> + Element,
{
    Convolved::<T>::new(gpu, scene)?.run::<Out>(gpu, scene, None, out)
}

/// Inputs of the gates, from input `first` of the scene on.
struct Gated<T> {
    ab: Guarded<T>,
    heads: [Guarded<f32>; 2],
    out: Guarded<f32>,
}

impl<T: Element> Gated<T> {
    fn new(gpu: &Gpu, scene: &Scene, first: usize) -> Result<Self> {
        Ok(Self {
            ab: Guarded::input(gpu, "ab", scene.input(first))?,
            heads: [
                Guarded::input(gpu, "a_log", scene.input(first + 1))?,
                Guarded::input(gpu, "dt_bias", scene.input(first + 2))?,
            ],
            out: Guarded::output(gpu, "gates", scene.input(first).len())?,
        })
    }

    fn buffers(&mut self) -> GateBuffers<'_, T> {
        let [a_log, dt_bias] = self.heads.each_ref().map(Guarded::view);
        GateBuffers { ab: self.ab.view(), a_log, dt_bias, out: self.out.view_mut() }
    }

    fn read(&self, gpu: &Gpu, out: &mut [f32]) -> Result<()> {
        self.ab.untouched(gpu)?;
        self.heads.iter().try_for_each(|input| input.untouched(gpu))?;
        self.out.read(gpu, out)
    }
}

fn conv_gates<T, Out>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()>
where
    T: tree_conv::launch::Element + Element,
    Out: OutputOf<T> + Element,
{
    let mut gated = Gated::<T>::new(gpu, scene, 3)?;
    let (out, gates) = out.split_at_mut(scene.input(0).len());
    Convolved::<T>::new(gpu, scene)?.run::<Out>(gpu, scene, Some(gated.buffers()), out)?;
    gated.read(gpu, gates)
}

fn conv_commit<T: tree_conv::launch::Element + Element>(
    gpu: &Gpu,
    scene: &Scene,
    out: &mut [f32],
) -> Result<()> {
    let on_device = PathsOnDevice::new(&gpu.0, &scene.paths)?;
    let x = Guarded::<T>::input(gpu, "x", scene.input(0))?;
    let mut state = Guarded::<T>::input(gpu, "conv_state", scene.input(2))?;
    let (xs, mut pool) = ([x.view()], state.view_mut());
    tree_conv::launch::commit::<T>(&gpu.0, dims(scene), &scene.paths, &on_device, &xs, &mut pool)?;
    x.untouched(gpu)?;
    state.read(gpu, out)
}

fn gate_values<T: gates::launch::Element + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let mut gated = Gated::<T>::new(gpu, scene, 0)?;
    gates::launch::forward(&gpu.0, gated.buffers())?;
    gated.read(gpu, out)
}
