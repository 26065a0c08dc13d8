//! CUDA kernels as subjects of the gates. Scenes and float64 results are those of the CPU subject of the same room, at the widths that the
//! kernels are built for; what a kernel takes as bfloat16 is rounded in the scene, so that the oracle sees the same.

mod attention;
mod buffers;
mod build;
mod conv;
mod gdn;
mod prefill;
mod rows;
mod walk;

use std::sync::Arc;

use buffers::Gpu;

use super::bound::Bound;
use super::scene::{Scene, Shape};
use super::subjects::{self, Plane, Subject, half};
use super::{Device, Gate};
use crate::Result;
use crate::cuda::Partition;

/// Kernels in the order of the report.
pub(super) fn all(device: usize) -> std::result::Result<Vec<Box<dyn Subject>>, String> {
    let gpu = Gpu::new(device)?;
    crate::cuda::Kernels::on(gpu.0.context()).map_err(|error| error.to_string())?;
    let mut kernels = attention::kernels(&gpu).map_err(|error| error.to_string())?;
    kernels.extend(gdn::kernels(&gpu));
    kernels.extend(prefill::kernels(&gpu));
    kernels.extend(conv::kernels(&gpu));
    kernels.extend(rows::kernels(&gpu));
    kernels.extend(walk::kernels(&gpu));
    kernels.extend(build::kernels(&gpu));
    let smaller = smaller(&gpu).map_err(|error| error.to_string())?;
    kernels.iter_mut().for_each(|kernel| kernel.smaller = smaller.clone());
    Ok(kernels.into_iter().map(|kernel| Box::new(kernel) as Box<dyn Subject>).collect())
}

/// The device with few of its multiprocessors: what a launch's CTAs find elsewhere, or at other times, must not change a bit.
fn smaller(gpu: &Gpu) -> Result<Vec<(String, Gpu)>> {
    let part = |least| {
        let part = Partition::new(gpu.0.context(), least)?;
        Ok((format!("on {} multiprocessors", part.multiprocessors()), Gpu(part.stream().clone())))
    };
    [8, 48].map(part).into_iter().collect()
}

/// One call: inputs up, the kernel, outputs down, guards checked.
type Call = Arc<dyn Fn(&Gpu, &Scene, &mut [f32]) -> Result<()> + Send + Sync>;

/// Inputs on which a bfloat16 accumulator is far off: a shape, and what is put into its scene.
type SumScene = (Shape, fn(&mut Scene));

/// Bounds of DESIGN.md 5 for float32 kernels, and for those whose products take bfloat16.
const TIER_A: Bound = Bound::Norm(1e-4, 1e-5);
const TIER_B: Bound = Bound::Norm(1e-1, 1e-2);

/// A kernel, or one variant of it.
#[derive(Clone)]
struct Kernel {
    gpu: Gpu,
    name: String,
    /// The CPU subject whose scenes, planes and oracle it has.
    like: Arc<dyn Subject>,
    bound: Bound,
    call: Call,
    /// Inputs that the kernel takes as bfloat16.
    rounded: &'static [usize],
    /// The drafter's widths.
    narrow: bool,
    refuses: fn(&Shape) -> bool,
    loses: fn(&Shape) -> bool,
    more_shapes: Vec<Shape>,
    control_shapes: Vec<Shape>,
    sums: Option<SumScene>,
    sums_bound: Bound,
    exact_classes: bool,
    variants: Vec<(String, Call)>,
    /// Streams of fewer multiprocessors.
    smaller: Vec<(String, Gpu)>,
    #[cfg_attr(not(feature = "controls"), expect(dead_code, reason = "read where faults are planted"))]
    planted: &'static [(Gate, &'static str)],
    /// The images in which a fault is planted: those whose names start so.
    #[cfg_attr(not(feature = "controls"), expect(dead_code, reason = "read where faults are planted"))]
    images: &'static str,
    /// The call whose kernel the controls' images have, where it is not `call`.
    planted_call: Option<Call>,
}

impl Kernel {
    /// A kernel with the scenes of the CPU subject `like`.
    fn new(
        gpu: &Gpu,
        name: impl Into<String>,
        like: &str,
        bound: Bound,
        call: impl Fn(&Gpu, &Scene, &mut [f32]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let like = subjects::all().into_iter().find(|subject| subject.name() == like);
        let like: Arc<dyn Subject> = like.expect("the CPU subject of the room").into();
        Self {
            gpu: gpu.clone(),
            name: name.into(),
            exact_classes: like.exact_classes(),
            like,
            bound,
            call: Arc::new(call),
            rounded: &[],
            narrow: false,
            refuses: |_| false,
            loses: |_| false,
            more_shapes: Vec::new(),
            control_shapes: Vec::new(),
            sums: None,
            sums_bound: bound,
            variants: Vec::new(),
            smaller: Vec::new(),
            planted: &[],
            images: "",
            planted_call: None,
        }
    }

    fn rounded(self, inputs: &'static [usize]) -> Self {
        Self { rounded: inputs, ..self }
    }

    fn variant(
        mut self,
        name: impl Into<String>,
        call: impl Fn(&Gpu, &Scene, &mut [f32]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.variants.push((name.into(), Arc::new(call)));
        self
    }

    fn planted(self, images: &'static str, planted: &'static [(Gate, &'static str)]) -> Self {
        Self { images, planted, ..self }
    }

    fn round(&self, scene: &mut Scene) {
        for &input in self.rounded {
            scene.inputs[input].values.iter_mut().for_each(|x| *x = half(*x));
        }
    }
}

impl Subject for Kernel {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn device(&self) -> Device {
        Device::Cuda
    }

    fn family(&self) -> String {
        format!("{} on CUDA, {:?} in bfloat16, narrow: {}", self.like.family(), self.rounded, self.narrow)
    }

    fn bound(&self) -> Bound {
        self.bound
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        let mut scene = self.like.scene(&Shape { cuda: true, narrow: self.narrow, ..shape.clone() })?;
        self.round(&mut scene);
        Ok(scene)
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        self.like.planes(scene)
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        (self.call)(&self.gpu, scene, out)
    }

    #[cfg(feature = "controls")]
    fn run_planted(&self, fault: &str, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let _planted = crate::cuda::controls::plant(&self.gpu.0, self.images, fault)?;
        (self.planted_call.as_ref().unwrap_or(&self.call))(&self.gpu, scene, out)
    }

    #[cfg(feature = "controls")]
    fn planted(&self) -> &[(Gate, &'static str)] {
        self.planted
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        self.like.oracle(scene)
    }

    fn sizes(&self, scene: &Scene) -> Vec<f64> {
        self.like.sizes(scene)
    }

    fn refuses(&self, shape: &Shape) -> bool {
        (self.refuses)(shape)
    }

    fn loses(&self, shape: &Shape) -> bool {
        (self.loses)(shape)
    }

    fn more_shapes(&self) -> Vec<Shape> {
        self.more_shapes.clone()
    }

    fn control_shapes(&self) -> Vec<Shape> {
        self.control_shapes.clone()
    }

    fn variants(&self) -> Vec<Box<dyn Subject>> {
        let alone = || Self { variants: Vec::new(), smaller: Vec::new(), ..self.clone() };
        let variant = |(name, call): &(String, Call)| {
            Box::new(Self { name: name.clone(), call: call.clone(), ..alone() }) as Box<dyn Subject>
        };
        let on_fewer = |(name, gpu): &(String, Gpu)| {
            Box::new(Self { name: name.clone(), gpu: gpu.clone(), ..alone() }) as Box<dyn Subject>
        };
        self.variants.iter().map(variant).chain(self.smaller.iter().map(on_fewer)).collect()
    }

    fn has_mask(&self) -> bool {
        self.like.has_mask()
    }

    fn exact_classes(&self) -> bool {
        self.exact_classes
    }

    fn sums_bound(&self) -> Bound {
        self.sums_bound
    }

    fn sums(&self) -> Option<Shape> {
        self.sums.as_ref().map(|(shape, _)| shape.clone()).or_else(|| self.like.sums())
    }

    fn fill_sums(&self, scene: &mut Scene) {
        match &self.sums {
            Some((_, fill)) => fill(scene),
            None => self.like.fill_sums(scene),
        }
        self.round(scene);
    }
}
