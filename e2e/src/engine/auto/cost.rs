//! What a pass costs by its number of rows: a curve measured at start, then followed by running averages.

/// Row counts at which the curve has a value of its own; between them it is linear.
///
/// A device's products take a step behind 8, 16, 32, 64, 128 and 256 rows: there two values stand side by side.
pub(super) const KNOTS: [usize; 28] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 512,
    1024,
];

/// How far one observation moves the knot that it hits.
const RATE: f64 = 0.15;
/// The least share of [`RATE`] by which it moves every other knot: a slower machine is slower everywhere, and a size that
/// looks dear by chance is not chosen and hence never measured again.
const FAR: f64 = 0.5;

/// The most that one pass is taken to be slower, or faster, than expected.
const MOST: f64 = 1.25;

/// Seconds of one pass by its number of rows.
#[derive(Clone, Debug)]
pub struct CostCurve {
    seconds: [f64; KNOTS.len()],
    measured: bool,
    rigid: bool,
}

impl CostCurve {
    /// A curve of unknown scale, `1 + per_row * (rows - 1)`; its first observation sets the scale.
    pub fn shape(per_row: f64) -> Self {
        Self { seconds: KNOTS.map(|rows| 1.0 + per_row * (rows - 1) as f64), measured: false, rigid: false }
    }

    /// The curve through measured `(rows, seconds)`, rows rising; beyond the last pair it follows the last slope
    /// (one pair alone: [`Self::shape`] scaled). `None` without a pair.
    pub fn through(points: &[(usize, f64)], per_row: f64) -> Option<Self> {
        let &(first, seconds) = points.first()?;
        let mut curve = Self::shape(per_row);
        let scale = seconds / curve.predict(first);
        curve.seconds = curve.seconds.map(|s| s * scale);
        curve.measured = true;
        if points.len() > 1 {
            for (knot, rows) in KNOTS.into_iter().enumerate() {
                let after = points.partition_point(|p| p.0 <= rows).clamp(1, points.len() - 1);
                let (left, right) = (points[after - 1], points[after]);
                let slope = ((right.1 - left.1) / (right.0 - left.0) as f64).max(0.0);
                let seconds = left.1 + slope * (rows as f64 - left.0 as f64);
                curve.seconds[knot] = seconds.max(points[0].1 * 0.5);
            }
            curve.level();
        }
        Some(curve)
    }

    /// The same curve, all of whose values follow an observation alike: for devices, whose measured shape is right and whose
    /// sizes in use would otherwise look cheaper and cheaper beside the others.
    #[must_use]
    pub fn rigid(self) -> Self {
        Self { rigid: true, ..self }
    }

    /// Seconds of a pass of `rows` rows; 0 rows are no pass.
    pub fn predict(&self, rows: usize) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let right = KNOTS.partition_point(|&knot| knot < rows).clamp(1, KNOTS.len() - 1);
        let (from, to) = (KNOTS[right - 1] as f64, KNOTS[right] as f64);
        let (low, high) = (self.seconds[right - 1], self.seconds[right]);
        low + (high - low) * (rows as f64 - from) / (to - from)
    }

    /// Takes in that a pass of `rows` rows took `seconds`.
    pub fn observe(&mut self, rows: usize, seconds: f64) {
        let expected = self.predict(rows);
        if !(seconds > 0.0 && expected > 0.0) {
            return;
        }
        let ratio = seconds / expected;
        if !self.measured {
            self.measured = true;
            self.seconds = self.seconds.map(|s| s * ratio);
            return;
        }
        // Clipped, so that one pass during which the machine did something else says little.
        let change = ratio.clamp(1.0 / MOST, MOST) - 1.0;
        for (knot, seconds) in KNOTS.into_iter().zip(&mut self.seconds) {
            let distance = (rows as f64 / knot as f64).ln().abs();
            let share = if self.rigid { 1.0 } else { (1.0 - 2.0 * distance).max(FAR) };
            *seconds *= 1.0 + RATE * share * change;
        }
        self.level();
    }

    /// No pass is dearer than one with more rows. What breaks this is noise, which makes passes slower, never faster: the
    /// dearer one's value falls to the other's.
    fn level(&mut self) {
        let mut most = f64::INFINITY;
        for seconds in self.seconds.iter_mut().rev() {
            most = most.min(*seconds);
            *seconds = most;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_curve_passes_through_its_points() {
        let curve = CostCurve::through(&[(1, 1.0), (8, 2.0), (16, 6.0)], 0.1).unwrap();
        for (rows, seconds) in [(1, 1.0), (8, 2.0), (16, 6.0), (12, 4.0), (32, 14.0), (0, 0.0)] {
            assert!((curve.predict(rows) - seconds).abs() < 1e-9, "{rows} rows: {}", curve.predict(rows));
        }
        assert!(CostCurve::through(&[], 0.1).is_none());
        let single = CostCurve::through(&[(1, 3.0)], 0.5).unwrap();
        assert!((single.predict(3) - 6.0).abs() < 1e-9);
    }

    #[test]
    fn observations_win_over_the_calibration() {
        let mut curve = CostCurve::through(&[(1, 1.0), (16, 2.0)], 0.1).unwrap();
        for _ in 0..100 {
            curve.observe(16, 8.0);
            curve.observe(1, 1.0);
        }
        assert!((curve.predict(16) - 8.0).abs() < 1.5, "{}", curve.predict(16));
        assert!((curve.predict(1) - 1.0).abs() < 0.5, "{}", curve.predict(1));
    }

    #[test]
    fn one_slow_pass_makes_no_size_dearer_than_a_larger_one() {
        let mut curve = CostCurve::through(&[(1, 1.0), (2, 9.0), (3, 1.2), (8, 2.0)], 0.1).unwrap();
        assert!((curve.predict(2) - 1.2).abs() < 1e-9, "{}", curve.predict(2));
        for _ in 0..10 {
            curve.observe(4, 50.0);
        }
        let seconds: Vec<f64> = (1..=8).map(|rows| curve.predict(rows)).collect();
        assert!(seconds.is_sorted(), "{seconds:?}");
    }

    #[test]
    fn the_first_observation_sets_the_scale_of_an_unmeasured_curve() {
        let mut curve = CostCurve::shape(0.1);
        curve.observe(1, 5.0);
        assert!((curve.predict(11) - 10.0).abs() < 1e-9);
        curve.observe(1, f64::NAN);
        assert!(curve.predict(11).is_finite());
    }
}
