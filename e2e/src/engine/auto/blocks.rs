//! What drafts of every block length brought: a running mean each, all of them moved by every drafted round.

/// Block lengths that are chosen from, besides the drafter's own.
const LENGTHS: [usize; 6] = [3, 4, 5, 6, 8, 12];
/// The chance that a draft that was right to its end would have been right one token further.
const FURTHER: f64 = 0.85;
/// The chance of a draft's every token before anything was observed.
const GUESS: f64 = 0.75;
/// Nodes per depth that a shorter block's tree has at most.
const WIDTH: f64 = 2.0;

/// Block lengths that a drafter of `block_size` rows is asked for, shortest first, its own last.
pub(in super::super) fn block_lengths(block_size: usize) -> Vec<usize> {
    LENGTHS.into_iter().filter(|&rows| rows < block_size).chain([block_size]).collect()
}

/// Mean length of the right beginning of `depths` tokens that are right with probability `right` each.
fn run(right: f64, depths: usize) -> f64 {
    right * (1.0 - right.powi(depths as i32)) / (1.0 - right)
}

/// Mean length of the right beginning of `depths` tokens when that of `known` tokens is `gain`, all right with one probability each.
pub(super) fn run_of(gain: f64, known: f64, depths: f64) -> f64 {
    let run = |right: f64, depths: f64| right * (1.0 - right.powf(depths)) / (1.0 - right);
    let (mut low, mut high) = (0.0, 1.0 - 1e-9);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        *if run(middle, known) < gain { &mut low } else { &mut high } = middle;
    }
    run(low, depths)
}

/// What drafted rounds brought and took, on average.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    /// Accepted nodes, root not counted.
    pub gain: f64,
    /// Drafted nodes verified.
    pub budget: f64,
}

/// One drafted round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drafted {
    /// Depths that were drafted.
    pub horizon: usize,
    /// Accepted nodes, root not counted.
    pub gain: usize,
    /// Drafted nodes verified.
    pub budget: usize,
}

impl Drafted {
    /// What the same round would have brought with another number of depths.
    fn with(self, horizon: usize) -> Means {
        let (gain, budget) = (self.gain as f64, self.budget as f64);
        if horizon <= self.horizon {
            let most = horizon as f64;
            return Means { gain: gain.min(most), budget: budget.min(WIDTH * most) };
        }
        if self.gain < self.horizon {
            return Means { gain, budget };
        }
        let more = run(FURTHER, horizon - self.horizon);
        Means { gain: gain + more, budget: budget * horizon as f64 / self.horizon.max(1) as f64 }
    }
}

/// Means by block length, shortest first.
#[derive(Clone, Debug)]
pub(super) struct Blocks(Vec<(usize, Means)>);

impl Blocks {
    /// For a drafter of `block_size` rows. A new engine tries the drafter first: it is taken to be right with a
    /// probability of [`GUESS`] per depth.
    pub fn new(block_size: usize) -> Self {
        let guess = |rows: usize| {
            let gain = run(GUESS, rows.saturating_sub(1));
            (rows, Means { gain, budget: WIDTH * gain })
        };
        Self(block_lengths(block_size).into_iter().map(guess).collect())
    }

    /// Block lengths.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Rows of a block of the `index`th length.
    pub fn rows(&self, index: usize) -> usize {
        self.0[index].0
    }

    /// What blocks of the `index`th length brought.
    pub fn means(&self, index: usize) -> Means {
        self.0[index].1
    }

    /// Moves all means by `rate` towards what a round brought.
    pub fn follow(&mut self, rate: f64, drafted: Drafted) {
        for (rows, means) in &mut self.0 {
            let seen = drafted.with(*rows - 1);
            means.gain += rate * (seen.gain - means.gain);
            means.budget += rate * (seen.budget - means.budget);
        }
    }

    /// Sets every mean.
    #[cfg(test)]
    pub fn set(&mut self, gain: f64, budget: f64) {
        self.0.iter_mut().for_each(|(_, means)| *means = Means { gain, budget });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_drafts_say_what_long_ones_would_have_brought() {
        let drafted = Drafted { horizon: 5, gain: 2, budget: 7 };
        assert_eq!(drafted.with(15).gain, 2.0);
        assert_eq!(drafted.with(1).gain, 1.0);
        assert_eq!(drafted.with(1).budget, 2.0);
        let whole = Drafted { gain: 5, ..drafted };
        assert!(whole.with(15).gain > 8.0 && whole.with(15).gain < 11.0);
        assert_eq!(whole.with(15).budget, 21.0);
    }

    #[test]
    fn lengths_end_with_the_drafters_own() {
        assert_eq!(block_lengths(16), [3, 4, 5, 6, 8, 12, 16]);
        assert_eq!(block_lengths(8), [3, 4, 5, 6, 8]);
        assert_eq!(block_lengths(2), [2]);
    }
}
