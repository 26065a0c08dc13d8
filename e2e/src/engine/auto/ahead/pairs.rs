//! What trees bring over chains of their depth, from rounds that say both.

/// Streams' rounds that what is thought of trees before any counts for.
const PRIOR: f64 = 4.0;
/// Variance of a round's difference before any.
const SPREAD: f64 = 4.0;
/// Tokens of chains that the guess that a tree brings as much as a chain counts for.
const TOKENS: f64 = 12.0;
/// What one stream's round keeps of those before it.
const KEEP: f64 = 0.995;

/// Sums over streams' rounds whose trees would have held a tree of one shape.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pairs {
    count: f64,
    /// Accepted nodes of the tree, and of the chain.
    tree: f64,
    chain: f64,
    squares: [f64; 3],
}

impl Pairs {
    /// Takes in what a tree and a chain of its depth brought, or would have, in one round.
    pub fn observe(&mut self, tree: f64, chain: f64) {
        let new = [tree * tree, tree * chain, chain * chain];
        self.count = self.count * KEEP + 1.0;
        self.tree = self.tree * KEEP + tree;
        self.chain = self.chain * KEEP + chain;
        for (sum, new) in self.squares.iter_mut().zip(new) {
            *sum = *sum * KEEP + new;
        }
    }

    /// Rounds that count.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// The tree's nodes for one of the chain.
    pub fn ratio(&self) -> f64 {
        (self.tree + TOKENS) / (self.chain + TOKENS)
    }

    /// Standard error of a round's mean difference from that ratio, in nodes, when what was seen is worth `share` of itself by now.
    pub fn error(&self, share: f64) -> f64 {
        let (ratio, [trees, both, chains]) = (self.ratio(), self.squares);
        let squares = (trees - 2.0 * ratio * both + ratio * ratio * chains).max(0.0);
        let variance = (PRIOR * SPREAD + squares) / (PRIOR + self.count);
        (variance / (PRIOR + share * self.count)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_the_same_rounds_are_known_soon() {
        let mut pairs = Pairs::default();
        assert!(pairs.ratio() == 1.0 && pairs.error(1.0) > 0.9);
        // Lengths scatter widely; a tenth of the rounds has one node more.
        (0..100).for_each(|round| {
            let chain = f64::from(round % 13);
            pairs.observe(chain + f64::from(u8::from(round % 10 == 0)), chain);
        });
        assert!((pairs.ratio() - 1.016).abs() < 0.01, "{}", pairs.ratio());
        assert!(pairs.error(1.0) < 0.1 && pairs.error(0.1) > pairs.error(1.0), "{}", pairs.error(1.0));
    }
}
