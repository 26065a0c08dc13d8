//! Every CPU kernel as a subject of the gates: its inputs, its run, its oracle.

mod attention;
mod conv;
mod gdn;
mod gdn_serial;
mod rows;

use half::bf16;

use super::scene::{Scene, Shape};
use crate::Result;

/// One kernel.
pub(super) trait Subject {
    /// `room` or `room stage`.
    fn name(&self) -> String;
    /// Largest error against float64, absolute up to 1 and relative above.
    fn bound(&self) -> f64;
    /// Random inputs of a shape.
    fn scene(&self, shape: &Shape) -> Result<Scene>;
    /// Outputs of a scene, all planes one after another.
    fn out_len(&self, scene: &Scene) -> usize;
    /// Elements of the last row of the last plane.
    fn row_len(&self, scene: &Scene) -> usize;
    /// One call; in-place kernels copy their pool into `out` first.
    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()>;
    /// What `run` should give.
    fn oracle(&self, scene: &Scene) -> Vec<f64>;
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
    fn sums_bound(&self) -> f64 {
        self.bound()
    }
    /// Inputs on which a bfloat16 accumulator is wrong by orders of magnitude.
    fn sums(&self) -> Option<Result<Scene>> {
        None
    }
    /// What a bfloat16 accumulator makes of [`Self::sums`].
    fn half_sum(&self, scene: &Scene, out: &mut [f32]) {
        let _ = (scene, out);
    }
}

/// The kernels in the order of the report.
pub(super) fn all() -> Vec<Box<dyn Subject>> {
    let mut subjects = gdn::subjects();
    subjects.extend(gdn_serial::subjects());
    subjects.extend(conv::subjects());
    subjects.extend(attention::subjects());
    subjects.extend(rows::subjects());
    subjects
}

/// Rounds to the nearest bfloat16.
fn half(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// A sum kept in bfloat16.
fn half_sum(terms: impl IntoIterator<Item = f32>) -> f32 {
    terms.into_iter().fold(0.0, |sum, term| half(sum + term))
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
