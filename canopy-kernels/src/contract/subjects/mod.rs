//! Every CPU kernel as a subject of the gates: its inputs, its run, its oracle.

pub(super) mod attention;
pub(super) mod build;
pub(super) mod conv;
pub(super) mod gdn;
pub(super) mod gdn_serial;
pub(super) mod glue;
pub(super) mod prefill;
pub(super) mod rows;
pub(super) mod walk;

use half::bf16;

use super::bound::Bound;
use super::scene::{Axis, Scene, Shape};
use super::{Device, Gate};
use crate::Result;

/// Outputs that lie one after another: `[N, width]`, `[slots, width]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plane {
    pub name: &'static str,
    pub axis: Axis,
    pub width: usize,
    pub len: usize,
}

impl Plane {
    /// `[N, width]`.
    pub fn rows(name: &'static str, scene: &Scene, width: usize) -> Self {
        Self { name, axis: Axis::Rows, width, len: scene.batch.rows() * width }
    }

    /// `[slots, width]`.
    pub fn slots(name: &'static str, scene: &Scene, width: usize) -> Self {
        Self { name, axis: Axis::Slots, width, len: scene.batch.sequences() * width }
    }
}

/// One kernel.
pub(super) trait Subject: Send + Sync {
    /// `room` or `room stage`, with what distinguishes a variant.
    fn name(&self) -> String;
    /// Where it runs.
    fn device(&self) -> Device {
        Device::Cpu
    }
    /// Subjects of one family have the same scenes and float64 results.
    fn family(&self) -> String {
        self.name()
    }
    /// The bound on its errors.
    fn bound(&self) -> Bound;
    /// Random inputs of a shape.
    fn scene(&self, shape: &Shape) -> Result<Scene>;
    /// The outputs of a scene.
    fn planes(&self, scene: &Scene) -> Vec<Plane>;
    /// Elements of all planes.
    fn out_len(&self, scene: &Scene) -> usize {
        self.planes(scene).iter().map(|plane| plane.len).sum()
    }
    /// One call; in-place kernels copy their pool into `out` first.
    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()>;
    /// One call of the kernel compiled for the controls with the named fault inside.
    fn run_planted(&self, fault: &str, _: &Scene, _: &mut [f32]) -> Result<()> {
        let expected = "no fault inside this kernel".into();
        Err(crate::Error::Value { op: "contract", arg: "fault", expected, got: fault.into() })
    }
    /// Faults inside the kernel, each with the gate that must see it.
    fn planted(&self) -> &[(Gate, &'static str)] {
        &[]
    }
    /// What `run` should give.
    fn oracle(&self, scene: &Scene) -> Vec<f64>;
    /// The oracle's sums over the sizes of their terms, for a bound that asks for them.
    fn sizes(&self, scene: &Scene) -> Vec<f64> {
        let _ = scene;
        Vec::new()
    }
    /// Whether a shape is too large for the kernel, which must then say so.
    fn refuses(&self, shape: &Shape) -> bool {
        let _ = shape;
        false
    }
    /// Whether the kernel's form is known to lose a shape's inputs, so that no bound holds: what series do to nearly equal keys.
    fn loses(&self, shape: &Shape) -> bool {
        let _ = shape;
        false
    }
    /// Edges of this kernel beside those of all.
    fn more_shapes(&self) -> Vec<Shape> {
        Vec::new()
    }
    /// Shapes that faults inside this kernel need beside those of all.
    fn control_shapes(&self) -> Vec<Shape> {
        Vec::new()
    }
    /// Variants that may be picked instead, whose bits must be the same.
    fn variants(&self) -> Vec<Box<dyn Subject>> {
        Vec::new()
    }
    /// Whether trees or lengths decide what a row sees.
    fn has_mask(&self) -> bool {
        true
    }
    /// Whether the formula fixes NaN against infinity; a reordered sum of products does not.
    fn exact_classes(&self) -> bool {
        true
    }
    /// Outputs that lie together and may change together when a plant reaches one of them.
    fn group(&self, scene: &Scene) -> usize {
        let _ = scene;
        1
    }
    /// The bound on [`Self::sums`].
    fn sums_bound(&self) -> Bound {
        self.bound()
    }
    /// The shape of the inputs on which a bfloat16 accumulator is wrong by orders of magnitude, where there is a sum.
    fn sums(&self) -> Option<Shape> {
        None
    }
    /// Puts those inputs into a scene of that shape.
    fn fill_sums(&self, scene: &mut Scene) {
        let _ = scene;
    }
    /// What a bfloat16 accumulator makes of them.
    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let _ = (scene, out);
    }
}

/// The kernels in the order of the report.
pub(super) fn all() -> Vec<Box<dyn Subject>> {
    let mut subjects = gdn::subjects();
    subjects.extend(gdn_serial::subjects());
    subjects.extend(prefill::subjects());
    subjects.extend(conv::subjects());
    subjects.extend(attention::subjects());
    subjects.extend(rows::subjects());
    subjects.extend(glue::subjects());
    subjects.extend(walk::subjects());
    subjects.extend(build::subjects());
    subjects
}

/// Rounds to the nearest bfloat16.
pub(super) fn half(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// A sum kept in bfloat16.
fn half_sum(terms: impl IntoIterator<Item = f32>) -> f32 {
    terms.into_iter().fold(0.0, |sum, term| half(sum + term))
}

pub(super) fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
