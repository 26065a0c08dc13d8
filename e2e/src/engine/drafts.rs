//! The drafts of a round: one call of the drafter per block length, and the trees built of what it gave, here or where that is.

use std::time::Instant;

use candle_core::Tensor;
use canopy_candle::top_tokens;
use canopy_kernels::top_tokens::MOST_K_ON_CUDA;
use canopy_kernels::{DraftTree, tree_build};

use super::auto::{Spent, draft_load};
use super::choose::Rules;
use super::plan::{Plan, Rows, Source, Unseen, Work};
use super::stream::joined;
use super::{Engine, Mode, Reason, StageTimes, Stream};
use crate::Result;
use crate::constrain::Grammar;
use crate::draft::{DraftRequest, Drafter};
use crate::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_from};

/// Candidates per depth that `auto` looks at.
const AUTO_TOP_K: usize = 10;
/// Feature rows that a stream takes in after an ordinary round; more are a prompt or a plain phase catching up.
const ORDINARY_ROWS: usize = 32;
/// How many times the nodes that a stream may verify are drawn when a grammar is going to prune them.
const PRUNED_FROM: usize = 3;

/// One stream's draft before it is drawn.
pub(super) struct Draft {
    pub index: usize,
    pub root: u32,
    pub horizon: usize,
    pub budget: usize,
    pub mode: Mode,
    /// Rows of its block.
    pub block_rows: usize,
    /// Why it is drawn so.
    pub reason: Reason,
}

impl Draft {
    /// The grammar that it has to obey.
    fn grammar<'a>(&self, stream: &'a Stream) -> Option<&'a Grammar> {
        stream.picker.rules.as_ref().and_then(Rules::drafted_grammar)
    }

    fn options(&self, stream: &Stream) -> BuildOptions {
        let top_k = match self.mode {
            Mode::Chain => 1,
            Mode::Auto => AUTO_TOP_K,
            Mode::Ar | Mode::Tree => usize::MAX,
        };
        // A grammar prunes the tree: a larger one is drawn, so that something is left.
        let budget = match self.grammar(stream) {
            Some(_) if self.mode != Mode::Chain => (self.budget * PRUNED_FROM).min(DraftTree::MAX_NODES - 1),
            _ => self.budget,
        };
        BuildOptions { budget, top_k }
    }

    /// Whether the host can do without seeing it: a chain, of which all but the tokens is known before it is drawn, or a tree that its device can
    /// build and that is surely no chain, which would be verified with other bits.
    pub fn can_stay(&self, host_build: bool) -> bool {
        let is_built = self.horizon < self.budget
            && self.horizon <= tree_build::MOST_DEPTH
            && self.budget <= MOST_K_ON_CUDA;
        match self.mode {
            Mode::Chain => true,
            Mode::Tree => is_built && !host_build,
            Mode::Ar | Mode::Auto => false,
        }
    }

    /// Best tokens of a row that it can use.
    fn candidates(&self) -> usize {
        if self.mode == Mode::Tree { self.budget } else { 1 }
    }

    /// What stands for a tree of which the tokens, or more, stay with the drafter; the root's token is in their places.
    fn unseen(&self) -> Result<CandidateTree> {
        let shape = match self.mode {
            Mode::Tree => DraftTree::broom(self.budget + 1, self.horizon),
            _ => DraftTree::chain(self.budget.min(self.horizon) + 1),
        };
        Ok(CandidateTree::unseen(shape?, self.root))
    }
}

impl Engine {
    /// Draws all drafts, in one call per block length, and builds their trees.
    pub(super) fn draft(
        &mut self,
        drafts: Vec<Draft>,
        plan: &mut Plan,
        times: &mut StageTimes,
    ) -> Result<()> {
        let Some(drafter) = self.drafter.as_deref_mut() else { return Ok(()) };
        let started = Instant::now();
        let span = tracing::debug_span!("draft", streams = drafts.len()).entered();
        let ordinary = take_features(&drafts, &mut self.running, drafter)?;
        let request = |draft: &Draft| DraftRequest {
            slot: self.running[draft.index].slot,
            root: draft.root,
            horizon: draft.horizon,
        };
        // `auto` has one block length a round, the other modes the drafter's own; the drafts of one call are neighbours.
        let call = |draft: &Draft| (draft.block_rows, draft.mode == Mode::Auto);
        let mut logits = Vec::new();
        for same in drafts.chunk_by(|a, b| call(a) == call(b)) {
            let requests: Vec<_> = same.iter().map(request).collect();
            let (rows, quick) = call(&same[0]);
            logits.push((same.len(), drafter.draft_packed(&requests, rows, quick)?));
        }
        self.settle(logits.first().map(|(_, logits)| logits))?;
        drop(span);
        times.draft += started.elapsed().as_secs_f64();
        let building = Instant::now();
        if let ([(_, logits)], true) = (logits.as_slice(), self.drafts_stay(&drafts, &plan.work)) {
            leave(&drafts, logits, plan)?;
            times.build += building.elapsed().as_secs_f64();
            return Ok(());
        }
        let span = tracing::debug_span!("build").entered();
        let trees = self.build(&drafts, &logits, &plan.work)?;
        drop(span);
        plan.draft_load = drafts.iter().map(|d| draft_load(d.block_rows, d.horizon)).sum();
        for (&Draft { index, block_rows, horizon, reason, .. }, tree) in drafts.iter().zip(trees) {
            let source = Source::Drafter { block_rows, horizon };
            plan.work.push(Work { index, rows: Rows::Tree { tree, source }, unseen: None, reason });
        }
        times.build += building.elapsed().as_secs_f64();
        plan.draft_seconds = ordinary.then(|| started.elapsed().as_secs_f64());
        Ok(())
    }

    /// The drafts' distributions, of the logits of so many neighbours each.
    fn marginals(&self, drafts: &[Draft], logits: &[(usize, Tensor)]) -> Result<Vec<Marginals>> {
        let (mut marginals, mut rest) = (Vec::with_capacity(drafts.len()), drafts);
        for (count, logits) in logits {
            let (same, others) = rest.split_at(*count);
            let drawn: Vec<_> =
                same.iter().map(|draft| (draft.horizon, draft.options(&self.running[draft.index]))).collect();
            marginals.extend(Marginals::from_packed(logits, &drawn)?);
            rest = others;
        }
        Ok(marginals)
    }

    /// The drafts' trees. Logits that are no distribution end a tree before them; the stream loses speed, not its text.
    fn build(
        &mut self,
        drafts: &[Draft],
        logits: &[(usize, Tensor)],
        others: &[Work],
    ) -> Result<Vec<CandidateTree>> {
        let mut trees = Vec::with_capacity(drafts.len());
        let (mut auto, mut worth, mut chains) = (Vec::new(), Vec::new(), Vec::new());
        let looks = self.tuner.looks_at_trees();
        for (draft, mut marginals) in drafts.iter().zip(self.marginals(drafts, logits)?) {
            let stream = &self.running[draft.index];
            let (grammar, options) = (draft.grammar(stream), draft.options(stream));
            if let Some(model) = &self.config.synthetic {
                marginals = model.marginals(&marginals);
            }
            let (mut tree, mut nodes) = match draft.mode {
                Mode::Chain => (chain_from(&marginals, draft.root, options)?, Vec::new()),
                Mode::Ar | Mode::Tree => (ddtree_from(&marginals, draft.root, options)?, Vec::new()),
                Mode::Auto => {
                    let tuning = &self.running[draft.index].tuning;
                    let root = (draft.root, grammar.is_some());
                    match self.tuner.chain(tuning, &marginals, draft.root, options)? {
                        Some(chain) if !looks => chain,
                        chain => {
                            if let Some(mut chain) = chain {
                                prune(grammar, draft.budget, &mut chain.0, &mut chain.1)?;
                                chains.push(chain);
                            }
                            self.tuner.build(tuning, &marginals, root, options)?
                        }
                    }
                }
            };
            prune(grammar, draft.budget, &mut tree, &mut nodes)?;
            if draft.mode == Mode::Auto {
                auto.push(trees.len());
                worth.push(nodes);
            }
            trees.push(tree);
        }
        if !auto.is_empty() {
            let fixed = (0..trees.len()).filter(|tree| !auto.contains(tree));
            let rows = others.iter().map(Work::rows).chain(fixed.map(|tree| trees[tree].tokens().len()));
            let (chains, of_chains): (Vec<_>, Vec<_>) = chains.into_iter().unzip();
            let others = rows.sum::<usize>() + auto.len();
            let spent = match looks {
                true => self.tuner.spend(&worth, &of_chains, others),
                false => Spent { chains: false, budgets: self.tuner.spend_on_chains(&worth, others) },
            };
            if spent.chains {
                auto.iter().zip(chains).for_each(|(&tree, chain)| trees[tree] = chain);
            }
            for (tree, budget) in auto.into_iter().zip(spent.budgets) {
                trees[tree].truncate(budget)?;
            }
        }
        Ok(trees)
    }
}

/// Has drafts verified with what they hold where it is.
fn leave(drafts: &[Draft], logits: &Tensor, plan: &mut Plan) -> Result<()> {
    let mut first = 0;
    for draft in drafts {
        let source = Source::Drafter { block_rows: draft.block_rows, horizon: draft.horizon };
        let rows = Rows::Tree { tree: draft.unseen()?, source };
        plan.work.push(Work { index: draft.index, rows, unseen: Some(first), reason: draft.reason });
        first += draft.horizon;
    }
    let most = drafts.iter().map(Draft::candidates).max().unwrap_or(1);
    let k = most.min(logits.dim(1)?);
    plan.unseen = Some(Unseen { best: top_tokens(logits, k)?, k });
    Ok(())
}

/// Leaves out what a grammar does not allow, of a tree and of what its nodes are worth.
fn prune(
    grammar: Option<&Grammar>,
    budget: usize,
    tree: &mut CandidateTree,
    worth: &mut Vec<f64>,
) -> Result<()> {
    let Some(grammar) = grammar else { return Ok(()) };
    let allowed = grammar.allowed(tree);
    tree.retain(&allowed)?;
    tree.truncate(budget)?;
    let mut kept = allowed.iter();
    worth.retain(|_| kept.next() == Some(&true));
    worth.truncate(tree.tokens().len());
    Ok(())
}

/// Gives the drafter what these streams have committed since it last saw them, in one call. True when no stream had
/// more than an ordinary round's rows.
fn take_features(drafts: &[Draft], running: &mut [Stream], drafter: &mut dyn Drafter) -> Result<bool> {
    let (mut counts, mut rows) = (Vec::new(), Vec::new());
    for draft in drafts {
        let stream = &mut running[draft.index];
        let count = stream.features.as_mut().map_or(0, |features| features.take(&mut rows));
        if count > 0 {
            counts.push((stream.slot, count));
        }
    }
    if !rows.is_empty() {
        drafter.extend_packed(&counts, &joined(rows)?)?;
    }
    Ok(counts.iter().all(|&(_, count)| count <= ORDINARY_ROWS))
}
