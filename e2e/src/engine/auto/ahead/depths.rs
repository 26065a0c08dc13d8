//! How often the drafter's best token is right, by depth.

/// Depths with counts of their own; deeper ones share the last.
pub const DEPTHS: usize = 16;
/// How often it is right before anything was observed.
const GUESS: f64 = 0.75;
/// Trials that what is known already counts for.
const PRIOR: f64 = 8.0;

/// Probabilities by depth from 1.
pub type Rates = [f64; DEPTHS];

/// Running counts: of a depth whose parent was the target's own token, how often it was tried and how often right.
#[derive(Clone, Debug, Default)]
pub struct Depths {
    tried: Rates,
    right: Rates,
}

impl Depths {
    /// Takes in that the first `right` best tokens of a draft were right, and, if `ended`, that the next one was not. What was there before counts
    /// `keep` times as much.
    pub fn observe(&mut self, right: usize, ended: bool, keep: f64) {
        for count in self.tried.iter_mut().chain(&mut self.right) {
            *count *= keep;
        }
        for depth in 0..right {
            self.tried[depth.min(DEPTHS - 1)] += 1.0;
            self.right[depth.min(DEPTHS - 1)] += 1.0;
        }
        if ended {
            self.tried[right.min(DEPTHS - 1)] += 1.0;
        }
    }

    /// The rates of all streams: each depth leans on all of them.
    pub fn shared(&self) -> Rates {
        let sum = |counts: &Rates| counts.iter().sum::<f64>();
        let all = (sum(&self.right) + PRIOR * GUESS) / (sum(&self.tried) + PRIOR);
        self.leaning(&[all; DEPTHS])
    }

    /// A stream's rates, which lean on those of all.
    pub fn leaning(&self, on: &Rates) -> Rates {
        std::array::from_fn(|depth| (self.right[depth] + PRIOR * on[depth]) / (self.tried[depth] + PRIOR))
    }
}

/// Mean numbers of right tokens behind `from` right ones, of chains of `from + 1`, `from + 2`, ... nodes, up to `most`.
fn further(rates: &Rates, from: usize, most: usize) -> impl Iterator<Item = f64> {
    let (mut reached, mut sum) = (1.0, 0.0);
    (from..most).map(move |depth| {
        reached *= rates[depth.min(DEPTHS - 1)];
        sum += reached;
        sum
    })
}

/// Mean length of the right beginning of chains of 0, 1, 2, ... nodes, up to `most`.
pub(super) fn runs(rates: &Rates, most: usize) -> Vec<f64> {
    std::iter::once(0.0).chain(further(rates, 0, most)).collect()
}

/// How many more tokens are right behind `right` ones, of a chain of `most`.
pub(super) fn more(rates: &Rates, right: usize, most: usize) -> f64 {
    further(rates, right, most).last().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_what_was_seen_and_lean_on_what_was_known() {
        let mut depths = Depths::default();
        assert!(depths.shared().iter().all(|&rate| (rate - GUESS).abs() < 1e-12));
        (0..200).for_each(|round| depths.observe(2, round % 2 == 0, 1.0));
        let rates = depths.shared();
        assert!(rates[0] > 0.95 && rates[1] > 0.95 && rates[2] < 0.1, "{rates:?}");
        // Nothing was seen of the fourth depth: it is as all of them.
        assert!((rates[3] - 0.8).abs() < 0.01, "{rates:?}");
        assert!(Depths::default().leaning(&rates) == rates);
    }

    #[test]
    fn means_are_those_of_the_rates() {
        let rates = [0.5; DEPTHS];
        let runs = runs(&rates, 20);
        assert_eq!(runs[..4], [0.0, 0.5, 0.75, 0.875]);
        assert!(runs.len() == 21 && (more(&rates, 3, 5) - 0.75).abs() < 1e-12);
    }
}
