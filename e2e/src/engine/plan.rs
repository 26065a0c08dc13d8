//! The first half of a round: who reads how much of its prompt, who drafts, and which trees are verified.

use std::time::Instant;

use candle_core::Tensor;
use canopy_candle::{TreeDraft, top_tokens};
use canopy_kernels::top_tokens::MOST_K_ON_CUDA;
use canopy_kernels::{DraftTree, tree_build};

use super::auto::{Candidate, Choice, Fixed, Lookup, Spent, draft_load};
use super::choose::Rules;
use super::prefill::short_parts;
use super::stream::joined;
use super::{Engine, Mode, StageTimes, Stream};
use crate::Result;
use crate::constrain::Grammar;
use crate::draft::{DraftRequest, Drafter};
use crate::target::{LogitRows, VerifyStream};
use crate::tree::{BuildOptions, CandidateTree, Marginals, chain_from, ddtree_from};

/// Candidates per depth that `auto` looks at.
const AUTO_TOP_K: usize = 10;
/// Feature rows that a stream takes in after an ordinary round; more are a prompt or a plain phase catching up.
const ORDINARY_ROWS: usize = 32;

/// How many times the nodes that a stream may verify are drawn when a grammar is going to prune them.
const PRUNED_FROM: usize = 3;

/// What one stream verifies in a round.
pub(super) enum Rows {
    /// A chunk of its prompt.
    Prompt(usize),
    /// A draft tree, possibly the root alone.
    Tree { tree: CandidateTree, source: Source },
}

/// Where a tree's nodes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// There are none but the root.
    Plain,
    /// The stream's own text, after a match of so many tokens.
    Lookup { matched: usize },
    /// The drafter, in a block of so many rows of which so many depths were wanted.
    Drafter { block_rows: usize, horizon: usize },
}

/// One stream's part of a round.
pub(super) struct Work {
    /// Index in the running streams.
    pub index: usize,
    pub rows: Rows,
    /// The first row of [`Plan::unseen`] that its nodes' tokens, or the whole tree, come from.
    pub unseen: Option<usize>,
}

impl Work {
    /// Rows that it adds to the pass.
    pub(super) fn rows(&self) -> usize {
        match &self.rows {
            Rows::Prompt(count) => *count,
            Rows::Tree { tree, .. } => tree.tokens().len(),
        }
    }

    /// Its draft tree, if it is none of a prompt's chunks.
    pub fn tree(&self) -> Option<&CandidateTree> {
        match &self.rows {
            Rows::Prompt(_) => None,
            Rows::Tree { tree, .. } => Some(tree),
        }
    }

    /// What its tree is built from, if the draft's device builds it.
    pub fn built(&self) -> Option<TreeDraft> {
        let depths = self.tree().filter(|tree| !tree.tree().is_chain())?.tree().max_depth();
        self.unseen.map(|first| TreeDraft { first, depths })
    }

    /// True when the drafter has drawn its tree.
    pub fn drafted(&self) -> bool {
        matches!(self.rows, Rows::Tree { source: Source::Drafter { .. }, .. })
    }

    /// The stream's entry of the verify pass.
    pub fn verify(&self, stream: &Stream) -> Result<VerifyStream> {
        let slot = stream.slot;
        match &self.rows {
            Rows::Prompt(count) => {
                let tokens = stream.prompt[stream.prefilled..][..*count].to_vec();
                let logits = match &stream.prompt_logprobs {
                    Some(_) => LogitRows::All,
                    None if *count == stream.unread() => LogitRows::Last,
                    None => LogitRows::None,
                };
                Ok(VerifyStream { slot, tokens, tree: DraftTree::chain(*count)?, logits })
            }
            Rows::Tree { tree, .. } => {
                let (tokens, tree) = (tree.tokens().to_vec(), tree.tree().clone());
                Ok(VerifyStream { slot, tokens, tree, logits: LogitRows::All })
            }
        }
    }
}

/// A planned round.
#[derive(Default)]
pub(super) struct Plan {
    pub work: Vec<Work>,
    /// Load of the round's draft call, 0 without one.
    pub draft_load: usize,
    /// Its seconds, tree building included; `None` when a prompt's features were taken in with it.
    pub draft_seconds: Option<f64>,
    /// Drafts that the host does not wait for.
    pub unseen: Option<Unseen>,
}

/// What drafts hold that stay with their device.
pub(super) struct Unseen {
    /// The best tokens of their rows.
    pub best: Tensor,
    /// How many a row.
    pub k: usize,
}

/// One stream's draft before it is drawn.
pub(super) struct Draft {
    pub index: usize,
    pub root: u32,
    pub horizon: usize,
    pub budget: usize,
    pub mode: Mode,
    /// Rows of its block.
    block_rows: usize,
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

/// A stream that drafts nothing, or a chain that is looked up.
struct Undrafted {
    index: usize,
    root: u32,
    lookup: Option<Lookup>,
}

impl Undrafted {
    fn rows(self) -> Result<Rows> {
        let Some(Lookup { matched, tokens, .. }) = self.lookup else {
            return Ok(Rows::Tree { tree: CandidateTree::root_only(self.root)?, source: Source::Plain });
        };
        let options = BuildOptions { budget: tokens.len(), top_k: 1 };
        let tree = chain_from(&Marginals::chain(tokens), self.root, options)?;
        Ok(Rows::Tree { tree, source: Source::Lookup { matched } })
    }
}

impl Engine {
    /// Plans a round: prompt chunks, drafts and trees.
    pub(super) fn plan(&mut self, times: &mut StageTimes) -> Result<Plan> {
        let mut plan = Plan { work: self.prompt_chunks(), ..Plan::default() };
        let (drafts, undrafted) = self.wanted_drafts();
        for stream in undrafted {
            plan.work.push(Work { index: stream.index, rows: stream.rows()?, unseen: None });
        }
        if !drafts.is_empty() {
            self.draft(drafts, &mut plan, times)?;
        }
        plan.work.sort_by_key(|work| work.index);
        Ok(plan)
    }

    /// Prompt rows of this round, at most a chunk over all streams and shared out fairly among those that read.
    fn prompt_chunks(&self) -> Vec<Work> {
        let short = |stream: &Stream| if stream.long_rows() > 0 { 0 } else { stream.readable() };
        let readable: Vec<usize> = self.running.iter().map(short).collect();
        let shares = match self.config.reads_long() {
            true => short_parts(&readable),
            false => fair_shares(&readable, self.config.prefill_chunk),
        };
        let chunk = |(index, count): (usize, usize)| Work { index, rows: Rows::Prompt(count), unseen: None };
        shares.into_iter().enumerate().filter(|&(_, count)| count > 0).map(chunk).collect()
    }

    /// The drafts of this round, and the streams without one.
    fn wanted_drafts(&mut self) -> (Vec<Draft>, Vec<Undrafted>) {
        let (mut drafts, mut auto, mut undrafted) = (Vec::new(), Vec::new(), Vec::new());
        let block_rows = self.drafter.as_ref().map_or(1, |drafter| drafter.block_size());
        for (index, stream) in self.running.iter().enumerate() {
            let Some(root) = stream.root else { continue };
            let Speculated { mode, horizon, budget } = self.speculated(stream, block_rows);
            let draft = Draft { index, root, horizon, budget, mode, block_rows };
            match horizon.min(budget) {
                _ if mode == Mode::Auto => auto.push(draft),
                0 => undrafted.push(Undrafted { index, root, lookup: None }),
                _ => drafts.push(draft),
            }
        }
        if !auto.is_empty() {
            self.choose(auto, &mut drafts, &mut undrafted);
        }
        (drafts, undrafted)
    }

    /// Spreads the auto streams over `drafts` and `undrafted`.
    fn choose(&mut self, auto: Vec<Draft>, drafts: &mut Vec<Draft>, undrafted: &mut Vec<Undrafted>) {
        let fixed = Fixed {
            rows: undrafted.len() + auto.len() + drafts.iter().map(|d| d.budget + 1).sum::<usize>(),
            tokens: (undrafted.len() + auto.len() + drafts.len()) as f64,
            draft_load: drafts.iter().map(|d| draft_load(d.block_rows, d.horizon)).sum(),
        };
        let mut streams: Vec<_> = self.running.iter_mut().collect();
        // Both lists are in the order of the streams.
        let mut wanted = auto.iter().peekable();
        let mut candidates = Vec::with_capacity(auto.len());
        for (index, stream) in streams.iter_mut().enumerate() {
            let Some(draft) = wanted.next_if(|draft| draft.index == index) else { continue };
            // What a stated model accepts says nothing about a stream's own text.
            let depth = if self.config.synthetic.is_some() { 0 } else { stream.left().saturating_sub(1) };
            candidates.push(Candidate {
                tuning: &stream.tuning,
                history: &mut stream.history,
                horizon: draft.horizon.min(draft.budget),
                depth,
                budget: draft.budget,
            });
        }
        self.tuner.set_streams(fixed.tokens as usize);
        let choices = self.tuner.choose(&mut candidates, fixed);
        for (draft, choice) in auto.into_iter().zip(choices.streams) {
            let Draft { index, root, .. } = draft;
            match choice {
                Choice::Plain => undrafted.push(Undrafted { index, root, lookup: None }),
                Choice::Lookup(lookup) => undrafted.push(Undrafted { index, root, lookup: Some(lookup) }),
                Choice::Draft => {
                    let block_rows = choices.block_rows;
                    drafts.push(Draft { horizon: draft.horizon.min(block_rows - 1), block_rows, ..draft });
                }
            }
        }
    }

    /// A stream's mode, depths to draft and most nodes in its next round.
    fn speculated(&self, stream: &Stream, block_size: usize) -> Speculated {
        let (mode, budget) = (stream.speculation.mode, stream.speculation.budget);
        let depth = if stream.features.is_some() { stream.useful_depth(block_size) } else { 0 };
        let (horizon, budget) = match mode {
            Mode::Ar => (0, 0),
            Mode::Chain => (depth, budget.unwrap_or(depth)),
            Mode::Tree => (depth, budget.unwrap_or(self.config.default_budget)),
            Mode::Auto => (depth, budget.unwrap_or(self.config.auto_budget)),
        };
        Speculated { mode, horizon: horizon.min(budget), budget }
    }

    /// Draws all drafts, in one call per block length, and builds their trees.
    fn draft(&mut self, drafts: Vec<Draft>, plan: &mut Plan, times: &mut StageTimes) -> Result<()> {
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
        for (&Draft { index, block_rows, horizon, .. }, tree) in drafts.iter().zip(trees) {
            let source = Source::Drafter { block_rows, horizon };
            plan.work.push(Work { index, rows: Rows::Tree { tree, source }, unseen: None });
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
        plan.work.push(Work { index: draft.index, rows, unseen: Some(first) });
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

/// `total` shared out among `wanted`, the smallest first: nobody gets more than it wants, and whoever gets less than that
/// gets no less than anybody else, but for the rounding. What is left over goes to the ones that came first. A short
/// prompt is thereby read in a number of rounds that depends on the number of streams and not on their prompts.
pub(super) fn fair_shares(wanted: &[usize], total: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index] > 0).collect();
    // With less than one for everybody the first ones go first, so that nobody waits for ever.
    order.truncate(total);
    order.sort_by_key(|&index| wanted[index]);
    let (mut shares, mut left, mut takers) = (vec![0; wanted.len()], total, order.len());
    for &index in &order {
        shares[index] = wanted[index].min(left / takers);
        left -= shares[index];
        takers -= 1;
    }
    for (share, &wanted) in shares.iter_mut().zip(wanted) {
        let more = left.min(wanted - *share);
        *share += more;
        left -= more;
    }
    shares
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

struct Speculated {
    mode: Mode,
    horizon: usize,
    budget: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::fair_shares;

    #[test]
    fn a_short_prompt_is_not_held_up_by_a_long_one() {
        assert_eq!(fair_shares(&[1900, 5], 128), [123, 5]);
        assert_eq!(fair_shares(&[1900, 0, 1000, 30], 128), [49, 0, 49, 30]);
        assert_eq!(fair_shares(&[9, 9, 9], 2), [1, 1, 0]);
        assert_eq!(fair_shares(&[], 4), [] as [usize; 0]);
    }

    proptest! {
        /// All of the total is used while anybody wants more, and nobody waits behind one who gets more.
        #[test]
        fn shares_are_fair(wanted in prop::collection::vec(0usize..300, 0..9), total in 1usize..200) {
            let shares = fair_shares(&wanted, total);
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(wanted.iter().sum()));
            let least = total / wanted.iter().filter(|&&w| w > 0).count().max(1);
            for (share, wanted) in shares.iter().zip(&wanted) {
                prop_assert!(share <= wanted && *share >= least.min(*wanted));
            }
        }
    }
}
