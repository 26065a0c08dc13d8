//! What a pass costs by its rows, for several numbers of streams: a stream has a state to read and write besides its rows.

use super::CostCurve;

/// A curve for each of some numbers of streams, one of them in use.
#[derive(Clone, Debug)]
pub(super) struct Curves {
    /// Streams, rising, and the curve of their passes; at least one.
    curves: Vec<(usize, CostCurve)>,
    selected: usize,
}

impl From<CostCurve> for Curves {
    /// One curve for any number of streams.
    fn from(curve: CostCurve) -> Self {
        Self { curves: vec![(1, curve)], selected: 0 }
    }
}

impl Curves {
    /// Curves by streams, rising; `None` without any.
    pub fn new(curves: Vec<(usize, CostCurve)>) -> Option<Self> {
        (!curves.is_empty()).then_some(Self { curves, selected: 0 })
    }

    /// Uses the curve of the smallest number that is not below `streams`, else the last.
    pub fn select(&mut self, streams: usize) {
        let least = self.curves.partition_point(|curve| curve.0 < streams);
        self.selected = least.min(self.curves.len() - 1);
    }

    /// Seconds of a pass of `rows` rows.
    pub fn predict(&self, rows: usize) -> f64 {
        self.curves[self.selected].1.predict(rows)
    }

    /// Takes in that a pass of `rows` rows took `seconds`.
    pub fn observe(&mut self, rows: usize, seconds: f64) {
        self.curves[self.selected].1.observe(rows, seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_of_as_many_streams_or_the_next_more_is_used() {
        let curve = |seconds| CostCurve::through(&[(1, seconds)], 0.0).unwrap();
        let mut curves = Curves::new(vec![(1, curve(1.0)), (4, curve(4.0)), (16, curve(16.0))]).unwrap();
        for (streams, seconds) in [(1, 1.0), (2, 4.0), (4, 4.0), (5, 16.0), (40, 16.0)] {
            curves.select(streams);
            assert!((curves.predict(8) - seconds).abs() < 1e-9, "{streams} streams");
        }
        curves.select(4);
        (0..40).for_each(|_| curves.observe(8, 8.0));
        assert!(curves.predict(8) > 7.0);
        curves.select(1);
        assert!((curves.predict(8) - 1.0).abs() < 1e-9);
        assert!(Curves::new(Vec::new()).is_none());
    }
}
