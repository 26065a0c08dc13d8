//! The accept walk: from the root down along the tokens that the target itself picks.

mod synthetic;

pub use synthetic::SyntheticAcceptance;

use super::choose::{Fault, Rules};
use super::target_rows::{TargetRow, TargetRows};
use super::{EmittedToken, TokenOrigin};
use crate::sampling::{Sampling, log_probs};
use crate::tree::CandidateTree;

/// What one stream gains in a round.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Accepted {
    /// Accepted nodes, root first.
    pub path: Vec<usize>,
    /// One token per path node: the target's pick after it. All but the last (the bonus) are the next node's.
    pub tokens: Vec<EmittedToken>,
}

/// How a stream's tokens are picked and reported.
pub(super) struct Picker {
    pub sampling: Sampling,
    pub logprobs: Option<usize>,
    /// What changes the target's rows, after the tokens picked so far.
    pub rules: Option<Rules>,
}

/// The position at which no token can be picked, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub position: usize,
    pub fault: Fault,
}

impl Picker {
    /// True when nothing but the best token of a row is looked at.
    pub fn only_best(&self) -> bool {
        self.sampling.temperature == 0.0 && self.logprobs.is_none() && self.rules.is_none()
    }

    /// The token at `position` from the target's row; the rules move on to it.
    pub fn pick(&mut self, row: TargetRow<'_>, position: usize) -> Result<EmittedToken, Failure> {
        let failure = |fault| Failure { position: position - 1, fault };
        let logits = match &row {
            TargetRow::Logits(logits) => logits.as_ref(),
            TargetRow::Best(best) => {
                let id = best.ok_or_else(|| failure(Fault::NonFinite))?;
                return Ok(EmittedToken { id, origin: TokenOrigin::Bonus, logprob: None, top: Vec::new() });
            }
        };
        let row = match &mut self.rules {
            Some(rules) => rules.row(logits).map_err(failure)?,
            None => logits,
        };
        let id = self.sampling.pick(row, position).ok_or_else(|| failure(Fault::NonFinite))?;
        if let Some(rules) = &mut self.rules {
            rules.advance(id).map_err(failure)?;
        }
        let (logprob, top) = match self.logprobs {
            Some(count) => {
                let (logprob, top) = log_probs(logits, id, count);
                (Some(logprob), top)
            }
            None => (None, Vec::new()),
        };
        Ok(EmittedToken { id, origin: TokenOrigin::Bonus, logprob, top })
    }
}

/// Who says which child of a node carries the target's token.
#[derive(Clone, Copy, Debug)]
pub(super) enum Judge<'a> {
    /// The target.
    Target,
    /// A stated model, for the stream of this number.
    Synthetic(&'a SyntheticAcceptance, u64),
}

impl<'a> Judge<'a> {
    /// The judge of an engine's configuration, for the stream of this number.
    pub fn new(synthetic: Option<&'a SyntheticAcceptance>, stream: u64) -> Self {
        synthetic.map_or(Self::Target, |model| Self::Synthetic(model, stream))
    }

    /// The child of the end of `path` to which the walk goes on, at `position`, when the target picks `token` there.
    fn next(self, tree: &CandidateTree, path: &[usize], position: usize, token: u32) -> Option<usize> {
        match self {
            Self::Target => tree.child(*path.last()?, token),
            Self::Synthetic(model, stream) => model.next(stream, tree, path, position),
        }
    }
}

/// Walks `tree`, whose root is at position `start`: every visited node's token is picked from the target's row
/// after it, and the walk goes on to the child that carries it. Each emitted token is thereby the
/// target's own pick in its exact context, whatever the tree: the text is that of decoding without one. With
/// [`Judge::Synthetic`] the rows are read all the same, the model says where the walk goes on, and the child's token counts.
///
/// The inner error is the first visited node from whose row nothing can be picked. Rows off the path are not looked at.
///
/// # Errors
/// When a row cannot be read from its device.
pub(super) fn walk(
    tree: &CandidateTree,
    rows: TargetRows<'_>,
    start: usize,
    picker: &mut Picker,
    judge: Judge<'_>,
) -> crate::Result<Result<Accepted, Failure>> {
    let mut accepted = Accepted { path: Vec::new(), tokens: Vec::new() };
    let mut next = Some(0);
    while let Some(node) = next {
        accepted.path.push(node);
        let position = start + accepted.path.len();
        let mut token = match picker.pick(rows.row(node)?, position) {
            Ok(token) => token,
            Err(failure) => return Ok(Err(failure)),
        };
        next = judge.next(tree, &accepted.path, position, token.id);
        if let Some(child) = next {
            (token.id, token.origin) = (tree.tokens()[child], TokenOrigin::Drafted);
        }
        accepted.tokens.push(token);
    }
    Ok(Ok(accepted))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::target_rows::best_tokens;
    use super::*;
    use crate::tree::{BuildOptions, build_ddtree};

    fn greedy() -> Picker {
        Picker { sampling: Sampling::default(), logprobs: Some(1), rules: None }
    }

    /// Depth 1: tokens 1 and 2, depth 2: token 0 under both.
    fn tree() -> CandidateTree {
        let logits = [-50.0f32, 1.0, 0.9, 3.0, -50.0, -50.0];
        build_ddtree(&logits, 3, 2, BuildOptions { budget: 4, ..BuildOptions::default() }).unwrap()
    }

    /// Logits in which node i prefers `picks[i]`.
    fn logits(picks: &[usize]) -> Vec<f32> {
        picks.iter().flat_map(|&pick| (0..3).map(move |id| if id == pick { 2.0 } else { 0.0 })).collect()
    }

    #[test]
    fn the_walk_follows_the_targets_picks_and_ends_with_its_bonus() {
        let tree = tree();
        let second = tree.child(0, 2).unwrap();
        let below = tree.child(second, 0).unwrap();
        let mut picks = vec![1usize; tree.tokens().len()];
        (picks[0], picks[second], picks[below]) = (2, 0, 2);
        let accepted = walk(&tree, TargetRows::Logits(&logits(&picks), 3), 10, &mut greedy(), Judge::Target)
            .unwrap()
            .unwrap();
        assert_eq!(accepted.path, [0, second, below]);
        let tokens: Vec<_> = accepted.tokens.iter().map(|t| (t.id, t.origin)).collect();
        let (drafted, bonus) = (TokenOrigin::Drafted, TokenOrigin::Bonus);
        assert_eq!(tokens, [(2, drafted), (0, drafted), (2, bonus)]);
        assert!(accepted.tokens.iter().all(|t| t.logprob == Some(t.top[0].1) && t.top.len() == 1));
    }

    #[test]
    fn only_visited_rows_can_fail_the_stream() {
        let tree = tree();
        let second = tree.child(0, 2).unwrap();
        let mut rows = logits(&vec![1; tree.tokens().len()]);
        rows[second * 3] = f32::NAN;
        let accepted =
            walk(&tree, TargetRows::Logits(&rows, 3), 10, &mut greedy(), Judge::Target).unwrap().unwrap();
        assert!(!accepted.path.contains(&second));
        let first = tree.child(0, 1).unwrap();
        rows[first * 3 + 2] = f32::INFINITY;
        let failure = Failure { position: 11, fault: Fault::NonFinite };
        assert_eq!(
            walk(&tree, TargetRows::Logits(&rows, 3), 10, &mut greedy(), Judge::Target).unwrap(),
            Err(failure)
        );
    }

    #[test]
    fn rows_read_one_by_one_and_best_tokens_alone_give_the_same_walk() {
        let tree = tree();
        let second = tree.child(0, 2).unwrap();
        let mut picks = vec![1usize; tree.tokens().len()];
        (picks[0], picks[second]) = (2, 0);
        let mut rows = logits(&picks);
        for bad in [None, Some(f32::NAN), Some(f32::NEG_INFINITY)] {
            if let Some(bad) = bad {
                rows[second * 3 + 1] = bad;
            }
            let all = Tensor::from_slice(&rows, (picks.len(), 3), &Device::Cpu).unwrap();
            let best = best_tokens(&all).unwrap();
            let apart = TargetRows::apart(&all, &best);
            let mut picker = Picker { logprobs: None, ..greedy() };
            assert!(picker.only_best() && !greedy().only_best());
            let want = walk(&tree, TargetRows::Logits(&rows, 3), 10, &mut picker, Judge::Target).unwrap();
            assert_eq!(want.is_err(), bad.is_some());
            assert_eq!(walk(&tree, apart.best(), 10, &mut picker, Judge::Target).unwrap(), want);
            assert_eq!(walk(&tree, apart, 10, &mut picker, Judge::Target).unwrap(), want);
            let with_logprobs =
                walk(&tree, TargetRows::Logits(&rows, 3), 10, &mut greedy(), Judge::Target).unwrap();
            assert_eq!(walk(&tree, apart, 10, &mut greedy(), Judge::Target).unwrap(), with_logprobs);
        }
    }

    /// Over random trees, logits and bad rows, by the target's choice and by a stated model's.
    #[test]
    fn the_walk_as_an_op_is_the_walk_on_the_host() {
        use canopy_candle::{DeviceTree, StatedWalk, TreeBatch, accept_walk, stated_node, top_tokens};

        let (vocab, start) = (4, 30);
        let model = SyntheticAcceptance::from_length(3.0, 6).unwrap();
        let (mut deepest, mut failed) = (0, 0);
        for seed in 0..1500u64 {
            let random = |at: usize| crate::sampling::uniform(seed, at) as f32;
            let drafted: Vec<f32> = (0..6 * vocab).map(|at| 3.0 * random(at)).collect();
            let options = BuildOptions { budget: 1 + seed as usize % 30, ..BuildOptions::default() };
            let tree = build_ddtree(&drafted, vocab, 2, options).unwrap();
            let nodes = tree.tokens().len();
            let mut rows: Vec<f32> = (0..nodes * vocab).map(|at| random(1000 + at)).collect();
            if seed % 3 == 0 {
                rows[seed as usize % nodes * vocab + 1] = f32::NAN;
            }
            let on_device = TreeBatch::single(tree.tree().clone(), 0);
            let on_device = DeviceTree::new(on_device, &Device::Cpu).unwrap();
            let best = Tensor::from_slice(&rows, (nodes, vocab), &Device::Cpu).unwrap();
            let best = top_tokens(&best, 1).unwrap();
            let most = tree.tree().max_depth() + 1;
            let words = tree.ranks().iter().zip(tree.tree().depths());
            let words: Vec<u32> = words.map(|(&rank, &depth)| stated_node(rank, depth)).collect();
            let wanted = model.wanted(seed, start, most);
            for stated in [None, Some(StatedWalk { nodes: &words, wanted: &wanted })] {
                let judge = Judge::new(stated.map(|_| &model), seed);
                let mut picker = Picker { logprobs: None, ..greedy() };
                let want = walk(&tree, TargetRows::Logits(&rows, vocab), start, &mut picker, judge).unwrap();
                let found = accept_walk(&on_device, tree.tokens(), &best, most, stated).unwrap();
                let found = found.wait().unwrap().remove(0);
                match want {
                    Ok(want) => {
                        let tokens: Vec<u32> = want.tokens.iter().map(|token| token.id).collect();
                        assert_eq!(
                            (found.path, found.tokens, found.failed),
                            (want.path.clone(), tokens, false)
                        );
                        deepest = deepest.max(want.path.len());
                    }
                    Err(failure) => {
                        assert!(found.failed);
                        assert_eq!(failure.position, start + found.path.len() - 1);
                        failed += 1;
                    }
                }
            }
        }
        assert!(deepest > 4 && failed > 200, "{deepest} deep, {failed} failed: the cases show little");
    }
}
