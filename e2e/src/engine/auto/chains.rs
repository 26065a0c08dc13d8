//! Chains in place of trees where their passes cost less: a device walks a chain's rows and solves a tree's.
//!
//! Either every drafting stream of a round has a chain of its drafter's best tokens, or every one has a tree. What the nodes of both are
//! worth comes from the same statistics: on a chain and on a tree's spine alike the best token's, behind siblings a factor of its own
//! ([`super::acceptance`]).

use super::Curves;

/// Rounds with chains before one has trees, whose statistics chains do not move.
const TRIAL: usize = 64;
/// Of rounds with chains one of so many looks whether trees were better: building them takes the host's time.
const LOOK: usize = 8;

/// What chains cost, and whether they are in use.
#[derive(Clone, Debug)]
pub(super) struct Chains {
    /// Seconds of a pass of chains by rows and streams.
    pub verify: Curves,
    /// Rounds with chains since the last one with trees; 0 when that was the last.
    rounds: usize,
}

/// How one round's nodes are spent.
#[derive(Debug, PartialEq)]
pub(in super::super) struct Spent {
    /// Whether every stream's nodes are its chain's, instead of its tree's.
    pub chains: bool,
    /// Nodes of every stream.
    pub budgets: Vec<usize>,
}

impl Chains {
    /// Of these costs.
    pub fn new(verify: Curves) -> Self {
        Self { verify, rounds: 0 }
    }

    /// True when the last drafted round had chains.
    pub fn are_used(&self) -> bool {
        self.rounds > 0
    }

    /// Whether the next round is to compare trees with chains.
    pub fn look_at_trees(&self) -> bool {
        self.rounds.is_multiple_of(LOOK)
    }

    /// Notes a round with chains that was not compared.
    pub fn stay(&mut self) {
        self.rounds += 1;
    }

    /// Chooses between what chains and trees bring at their best, and notes the choice.
    pub fn choose(&mut self, chains: f64, trees: f64) -> bool {
        let chosen = chains > trees && self.rounds < TRIAL;
        self.rounds = if chosen { self.rounds + 1 } else { 0 };
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::CostCurve;

    #[test]
    fn the_better_shape_is_taken_and_trees_are_tried_now_and_then() {
        let mut chains = Chains::new(CostCurve::through(&[(1, 1.0)], 0.0).unwrap().into());
        assert!(!chains.are_used());
        let taken: Vec<bool> = (0..3 * TRIAL).map(|_| chains.choose(2.0, 1.0)).collect();
        assert_eq!(taken.iter().filter(|taken| !**taken).count(), 2);
        let mut looks = 0;
        for _ in 0..2 * TRIAL {
            match chains.look_at_trees() {
                true => {
                    looks += 1;
                    chains.choose(2.0, 1.0);
                }
                false => chains.stay(),
            }
        }
        assert!((2 * TRIAL / LOOK..2 * TRIAL / LOOK + 4).contains(&looks), "{looks}");
        assert!(taken[0] && chains.are_used());
        assert!(!chains.choose(1.0, 1.0) && !chains.are_used());
    }
}
