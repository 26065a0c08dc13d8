//! How far from float64 an output may be.

/// A kernel's bound on the error of its outputs, plane by plane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bound {
    /// Of every element: absolute up to 1, relative above.
    Element(f64),
    /// The same on outputs that are rounded to bfloat16, which adds half a unit in the last place.
    Rounded(f64),
    /// Largest error, relative to the largest value above 1, and relative Frobenius error.
    Norm(f64, f64),
    /// Of every element a share of the sum of its terms' sizes; `true` adds half a unit in bfloat16's last place.
    Terms(f64, bool),
}

/// Half a unit in the last place of bfloat16, relative.
const HALF_ULP: f64 = 1.0 / 256.0;

/// Whether float32 can hold a float64 result; one that it cannot counts as the infinity that it becomes.
pub(super) fn finite(truth: f64) -> bool {
    truth.abs() <= f64::from(f32::MAX)
}

impl Bound {
    /// Whether it needs the sizes of terms.
    pub fn needs_sizes(self) -> bool {
        matches!(self, Self::Terms(..))
    }

    /// The worst error as a share of the bound; an error where it is above, naming the output. Outputs that float64 leaves not finite
    /// are passed over. `sizes` is empty unless [`Self::needs_sizes`].
    pub fn worst(self, got: &[f32], truth: &[f64], sizes: &[f64]) -> Result<f64, String> {
        if got.len() != truth.len() || self.needs_sizes() && sizes.len() != truth.len() {
            return Err(format!("{} outputs, expected {}", got.len(), truth.len()));
        }
        let largest = truth.iter().filter(|truth| finite(**truth)).fold(1f64, |most, x| most.max(x.abs()));
        let (mut worst, mut error, mut norm) = (0f64, 0f64, 0f64);
        for (at, (&got, &truth)) in got.iter().zip(truth).enumerate().filter(|(_, (_, x))| finite(**x)) {
            let off = (f64::from(got) - truth).abs();
            let allowed = match self {
                Self::Element(bound) => bound * truth.abs().max(1.0),
                Self::Rounded(bound) => bound * truth.abs().max(1.0) + HALF_ULP * truth.abs(),
                Self::Norm(bound, _) => bound * largest,
                Self::Terms(share, rounded) => {
                    let ulp = if rounded { HALF_ULP * truth.abs() } else { 0.0 };
                    share * sizes[at].min(f64::MAX) + ulp
                }
            };
            if off.is_nan() || off > allowed {
                return Err(format!("output {at} is {got:e}, float64 {truth:e}"));
            }
            worst = worst.max(if off > 0.0 { off / allowed } else { 0.0 });
            error += off * off;
            norm += truth * truth;
        }
        let Self::Norm(_, bound) = self else { return Ok(worst) };
        let relative = if error > 0.0 { (error / norm).sqrt() } else { 0.0 };
        match relative > bound {
            true => Err(format!("relative Frobenius error {relative:.1e}, bound {bound:.0e}")),
            false => Ok(worst.max(relative / bound)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bound;

    #[test]
    fn a_bound_is_met_up_to_itself() {
        for (bound, got, truth, sizes, share) in [
            (Bound::Element(1e-3), 0.5005, 0.5, 0.0, Some(0.5)),
            (Bound::Element(1e-3), 0.5015, 0.5, 0.0, None),
            (Bound::Element(1e-3), 100.05, 100.0, 0.0, Some(0.5)),
            (Bound::Element(0.0), 2.0, 2.0, 0.0, Some(0.0)),
            (Bound::Element(0.0), 2.0, 2.0000001, 0.0, None),
            (Bound::Rounded(0.0), 257.0, 256.0, 0.0, Some(1.0)),
            (Bound::Rounded(0.0), 258.0, 256.0, 0.0, None),
            (Bound::Terms(0.01, false), 1.01, 1.0, 2.0, Some(0.5)),
            (Bound::Terms(0.01, false), 1.03, 1.0, 2.0, None),
            (Bound::Terms(0.0, true), 257.0, 256.0, 2.0, Some(1.0)),
            (Bound::Norm(1e-2, 1e-2), 100.5, 100.0, 0.0, Some(0.5)),
            (Bound::Norm(1.0, 1e-3), 100.5, 100.0, 0.0, None),
            (Bound::Element(1e-3), f32::NAN, f64::NAN, 0.0, Some(0.0)),
            (Bound::Element(1e-3), f32::NAN, 1.0, 0.0, None),
        ] {
            let worst = bound.worst(&[got], &[truth], &[sizes]);
            match share {
                Some(share) => assert!((worst.unwrap() - share).abs() < 1e-3, "{bound:?} {got} {truth}"),
                None => assert!(worst.is_err(), "{bound:?} {got} {truth}"),
            }
        }
    }
}
