//! After the draft: the streams' trees and chains from corrected probabilities, and how many of their nodes are verified.

use super::chains::{Chains, Spent};
use super::curves::Curves;
use super::{StreamTuning, Tuner};
use crate::Result;
use crate::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_above};

/// Share of a row's cost that a node must be worth to be looked at: well below 1, because some rows cost less than others.
const LOOKED_AT: f64 = 0.25;
/// Rows over which that cost is a mean.
const MEAN_ROWS: usize = 32;
/// Rows of larger passes on a device: it runs passes that come again as recordings, and few sizes come again soon. Between the steps of its
/// products rows cost little.
const SIZES: [usize; 9] = [16, 24, 32, 48, 64, 96, 128, 192, 256];

impl Tuner {
    /// The best tree by what is accepted from this stream, labelled with the drafter's own probabilities, and each
    /// node's probability of being accepted, root first, never rising. Nodes that no budget would be spent on are left out
    /// unless `every` node is wanted.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn build(
        &self,
        tuning: &StreamTuning,
        marginals: &Marginals,
        (root, every): (u32, bool),
        options: BuildOptions,
    ) -> Result<(CandidateTree, Vec<f64>)> {
        let ratios = tuning.acceptance.corrected(&self.ratios);
        let row = (self.verify.predict(MEAN_ROWS) - self.verify.predict(1)) / (MEAN_ROWS - 1) as f64;
        let least = if every { 0.0 } else { LOOKED_AT * self.rate * row };
        let above = (least.ln(), ratios.behind());
        Ok(labelled(ddtree_above(above, &ratios.correct(marginals), root, options)?, marginals))
    }

    /// As [`Self::build`], the chain that may take the tree's place.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn chain(
        &self,
        tuning: &StreamTuning,
        marginals: &Marginals,
        root: u32,
        options: BuildOptions,
    ) -> Result<Option<(CandidateTree, Vec<f64>)>> {
        if self.chains.is_none() {
            return Ok(None);
        }
        let ratios = tuning.acceptance.corrected(&self.ratios);
        Ok(Some(labelled(chain_from(&ratios.correct(marginals), root, options)?, marginals)))
    }

    /// Whether trees are to be built beside [`Self::chain`]s; where not, [`Self::spend_on_chains`] is next.
    pub fn looks_at_trees(&self) -> bool {
        self.chains.as_ref().is_none_or(Chains::look_at_trees)
    }

    /// [`Self::spend`] where there are chains alone.
    pub fn spend_on_chains(&mut self, chains: &[Vec<f64>], others: usize) -> Vec<usize> {
        let budgets = self.best_budgets(self.passes(), chains, others).0;
        if let Some(chains) = &mut self.chains {
            chains.stay();
        }
        budgets
    }

    /// How many nodes of each stream's tree, or of each one's chain, to verify, given what they are worth, in a pass of `others` further rows,
    /// these streams' roots included. Without `chains` these are nodes of trees.
    pub fn spend(&mut self, trees: &[Vec<f64>], chains: &[Vec<f64>], others: usize) -> Spent {
        let (budgets, of_trees) = self.best_budgets(&self.verify, trees, others);
        let Some(costs) = self.chains.as_ref().filter(|_| !chains.is_empty() && chains.len() == trees.len())
        else {
            return Spent { chains: false, budgets };
        };
        let (of_chains, value) = self.best_budgets(&costs.verify, chains, others);
        match self.chains.as_mut().is_some_and(|chains| chains.choose(value, of_trees)) {
            true => Spent { chains: true, budgets: of_chains },
            false => Spent { chains: false, budgets },
        }
    }

    /// Whether a pass may have so many rows.
    fn is_size(&self, rows: usize) -> bool {
        self.steps.is_empty() || rows < SIZES[0] || SIZES.contains(&rows)
    }

    /// Nodes of each stream when passes cost `costs`, and the tokens that they bring beyond what their time is worth.
    fn best_budgets(&self, costs: &Curves, worth: &[Vec<f64>], others: usize) -> (Vec<usize>, f64) {
        let mut taken = vec![0usize; worth.len()];
        let mut best = taken.clone();
        let (mut value, mut best_value) = (0.0, -self.rate * costs.predict(others));
        let total: usize = worth.iter().map(|w| w.len() - 1).sum();
        let total = self.steps.last().map_or(total, |most| total.min(most.saturating_sub(others)));
        for rows in 1..=total {
            let next = |s: &usize| worth[*s].get(taken[*s] + 1).copied();
            let open = (0..worth.len()).filter_map(|s| Some((s, next(&s)?)));
            // The first of equals, so that equal streams do not swap places from run to run.
            let first_best = |a: (usize, f64), b: (usize, f64)| if b.1 > a.1 { b } else { a };
            let Some((stream, _)) = open.reduce(first_best) else { break };
            taken[stream] += 1;
            value += worth[stream][taken[stream]];
            let net = value - self.rate * costs.predict(others + rows);
            if net > best_value && self.is_size(others + rows) {
                best_value = net;
                best.clone_from(&taken);
            }
        }
        (best, best_value)
    }
}

/// A tree built from corrected probabilities, labelled with the drafter's own, and what its nodes are worth.
fn labelled(mut tree: CandidateTree, marginals: &Marginals) -> (CandidateTree, Vec<f64>) {
    let worth = tree.joint_log_probs().iter().map(|joint| joint.exp()).collect();
    tree.relabel(marginals);
    (tree, worth)
}
