//! The target as the engine sees it: one trait, so that a toy target can drive the engine in tests.

mod overlapped;

use std::any::Any;

use candle_core::Tensor;
use canopy_candle::{PassCounts, TreeDraft, WalkedTree, drafted_tokens, stated_node};
use canopy_kernels::top_tokens::row_words;
use canopy_kernels::{DraftTree, TreeBatch, tree_build};

use crate::Result;
pub use overlapped::Overlapped;

/// Which rows of a stream need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// No row (a prefill chunk that is not the last).
    None,
    /// The last node only (the prompt's last chunk).
    Last,
    /// Every node.
    All,
}

/// One stream's tree in a verify pass. A prefill chunk is a chain.
#[derive(Clone, Debug)]
pub struct VerifyStream {
    /// The stream's slot in the target's pools.
    pub slot: usize,
    /// One token per node.
    pub tokens: Vec<u32>,
    /// The tree; node 0 follows the slot's last committed token.
    pub tree: DraftTree,
    /// Which nodes need logits.
    pub logits: LogitRows,
}

/// What a verify pass returns; what its commit needs stays inside the target.
#[derive(Clone, Debug)]
pub struct Verified {
    /// The packed rows.
    pub batch: TreeBatch,
    /// `[wanted rows, vocab]` f32, streams in order, nodes in order. Empty first dimension is replaced by `None`.
    pub logits: Option<Tensor>,
    /// First row of every stream in `logits`, then the number of rows: `[streams + 1]`.
    pub logit_rows: Vec<usize>,
    /// `[N, taps * hidden]`: outputs of the tap layers side by side, in tap order. `None` without taps.
    pub features: Option<Tensor>,
}

/// A part of one stream's prompt, of any length, in a prefill pass.
#[derive(Clone, Debug)]
pub struct PromptChunk {
    /// The stream's slot in the target's pools.
    pub slot: usize,
    /// Its next tokens; at least one.
    pub tokens: Vec<u32>,
    /// Which rows need logits.
    pub logits: LogitRows,
    /// Whether the drafter wants its rows' features.
    pub features: bool,
}

/// What a prefill pass returns.
#[derive(Clone, Debug)]
pub struct Prefilled {
    /// First packed row of every chunk, then the number of rows: `[chunks + 1]`.
    pub cu_rows: Vec<i32>,
    /// `[wanted rows, vocab]` f32, chunks in order. `None` when no row is wanted.
    pub logits: Option<Tensor>,
    /// First row of every chunk in `logits`, then the number of rows: `[chunks + 1]`.
    pub logit_rows: Vec<usize>,
    /// `[N, taps * hidden]` as of [`Verified`]. `None` without taps, or when no chunk wants any.
    pub features: Option<Tensor>,
}

/// Tokens of drafted nodes, and whole trees, where the draft is.
#[derive(Clone, Debug)]
pub struct DraftedTokens {
    /// What [`canopy_candle::top_tokens`] gave for the drafts' logits.
    pub best: Tensor,
    /// [`canopy_candle::drafted_source`] of every packed node, -1 for those whose tokens are known.
    pub sources: Vec<i32>,
    /// Trees of which only nodes and depths are known.
    pub trees: Option<DraftedTrees>,
}

/// Trees that are built where the draft is; what stands for one until then is [`DraftTree::broom`] of its nodes and depths.
#[derive(Clone, Debug)]
pub struct DraftedTrees {
    /// What each stream's tree is built from, if it is.
    pub drafts: Vec<Option<TreeDraft>>,
    /// [`canopy_candle::stated_node`] of every packed node, as far as known.
    pub nodes: Vec<u32>,
    /// `[depths, k]`: log-probabilities of the `k` best tokens by depth, in place of the drafter's own.
    pub stated: Option<Vec<f64>>,
}

impl DraftedTokens {
    /// The streams with all their trees and tokens, read from where they are, and [`canopy_candle::stated_node`] of every node where trees were
    /// built. A tree whose candidates run out has fewer nodes than what stood for it.
    ///
    /// # Errors
    /// When the sources are not those of the streams' nodes, or the drafts not those of the streams; from the device.
    pub fn known(&self, streams: &[VerifyStream]) -> Result<(Vec<VerifyStream>, Option<Vec<u32>>)> {
        let mut tokens: Vec<u32> = streams.iter().flat_map(|stream| &stream.tokens).copied().collect();
        drafted_tokens(&self.best, &self.sources, &mut tokens)?;
        let mut rest = tokens.as_slice();
        let with_tokens = |stream: &VerifyStream| {
            let (own, others) = rest.split_at(stream.tokens.len());
            rest = others;
            VerifyStream { tokens: own.to_vec(), ..stream.clone() }
        };
        let streams: Vec<_> = streams.iter().map(with_tokens).collect();
        let Some(trees) = &self.trees else { return Ok((streams, None)) };
        let best: Vec<u32> = self.best.flatten_all()?.to_vec1()?;
        let k = (self.best.dim(1)? - row_words(0)) / 2;
        let (mut known, mut nodes, mut first) = (Vec::with_capacity(streams.len()), Vec::new(), 0);
        for (stream, draft) in streams.into_iter().zip(&trees.drafts) {
            let given = first..first + stream.tokens.len();
            first = given.end;
            let Some(draft) = *draft else {
                nodes.extend_from_slice(&trees.nodes[given]);
                known.push(stream);
                continue;
            };
            let built = tree_build::cpu::tree((k, &best), draft, trees.stated.as_deref(), given.len() - 1)?;
            let depths = built.ranks.iter().zip(&built.depths);
            nodes.extend(depths.map(|(&rank, &depth)| stated_node(rank, depth as u32)));
            let tokens = [&stream.tokens[..1], &built.tokens].concat();
            known.push(VerifyStream { tokens, tree: DraftTree::new(built.parents)?, ..stream });
        }
        Ok((known, Some(nodes)))
    }
}

/// The ranks that a stated model of acceptance wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedRanks {
    /// Every node's rank and depth, [`canopy_candle::stated_node`]. Of a pass with [`DraftedTrees`] the target has them, and takes its own.
    pub nodes: Vec<u32>,
    /// `[streams, 2, most]`: the rank wanted at depths 1 to `most` behind nodes of rank 0 alone, and behind others; -1 for none. `most` is one more than
    /// the deepest node's depth.
    pub wanted: Vec<i32>,
}

/// A saved sequence: recurrent states, conv states, keys and values, and the committed length.
#[derive(Debug)]
pub struct Snapshot {
    data: Box<dyn Any + Send + Sync>,
    bytes: usize,
}

impl Snapshot {
    /// A snapshot of `bytes` bytes whose form only its maker knows.
    pub fn new(data: impl Any + Send + Sync, bytes: usize) -> Self {
        Self { data: Box::new(data), bytes }
    }

    /// What was saved, when it is a `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.data.downcast_ref()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Bytes of pairs of tensors.
pub(crate) fn tensor_bytes(pairs: &[(Tensor, Tensor)]) -> usize {
    let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    pairs.iter().map(|(a, b)| bytes(a) + bytes(b)).sum()
}

/// A model that verifies packed draft trees. Slots are independent; only `commit` advances a slot.
pub trait Target: Send {
    /// Rows of the logits.
    fn vocab_size(&self) -> usize;
    /// Most committed tokens plus drafted depth of one slot.
    fn context_len(&self) -> usize;
    /// Pool slots.
    fn slots(&self) -> usize;
    /// Tokens committed in a slot.
    fn committed(&self, slot: usize) -> usize;
    /// Empties a slot and zeroes its states.
    fn reset(&mut self, slot: usize) -> Result<()>;
    /// Sets which layers' outputs `verify` returns as features.
    fn set_taps(&mut self, taps: &[usize]) -> Result<()>;
    /// Runs the trees of several streams in one pass. Changes no committed state.
    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified>;
    /// Commits one path per stream of the last verify, root first; an empty path leaves the slot as it was.
    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()>;
    /// [`Self::commit`], which may go on after the call: what needs the target next waits for it, and the next verify or
    /// commit says what went wrong in it. A target that knows no such thing commits.
    fn commit_beside(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        self.commit(paths)
    }
    /// Reads and commits parts of prompts, of one slot each. On an error the slots of all chunks hold nothing that can be used: reset them.
    fn prefill(&mut self, chunks: &[PromptChunk]) -> Result<Prefilled> {
        prefill_by_slices(self, chunks)
    }
    /// [`Self::verify`] of trees some of whose tokens, or all but the numbers of their nodes and depths, only a drafter's device knows; what
    /// `streams` have in their places are tokens and trees too.
    fn verify_drafted(&mut self, streams: &[VerifyStream], drafted: &DraftedTokens) -> Result<Verified> {
        self.verify(&drafted.known(streams)?.0)
    }
    /// Whether [`Self::walk_and_commit`] is to be used for rounds that it can serve.
    fn walks(&self) -> bool {
        false
    }
    /// Walks the trees of the last verify, of which every row has logits, where its logits are, and commits the paths without waiting to
    /// hear of them: [`Self::commit`] of the paths of the trees that have not failed. `stated` says which children are accepted in place of
    /// the rows' best tokens.
    fn walk_and_commit(
        &mut self,
        verified: &Verified,
        stated: Option<&StatedRanks>,
    ) -> Result<Vec<WalkedTree>> {
        let _ = (verified, stated);
        let expected = "a target that walks trees itself".into();
        Err(crate::Error::Request { field: "target", expected, got: "another".into() })
    }
    /// [`canopy_candle::stated_node`] of every packed node of the pass that was walked last, when some of its trees were built for it; until the next
    /// pass. Waits for the device.
    fn walked_nodes(&self) -> Result<Option<Vec<u32>>> {
        Ok(None)
    }
    /// Makes room for recordings of other passes than those so far, which were run to be timed.
    fn forget_recordings(&mut self) {}
    /// Saves a slot.
    fn snapshot(&self, slot: usize) -> Result<Snapshot>;
    /// Puts a saved sequence into a slot.
    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()>;
    /// How its passes ran: replayed from recordings or launched kernel by kernel.
    fn pass_counts(&self) -> PassCounts {
        PassCounts::default()
    }
}

/// [`Target::prefill`] by verify passes over chains, and their commits.
pub(crate) fn prefill_by_slices<T: Target + ?Sized>(
    target: &mut T,
    chunks: &[PromptChunk],
) -> Result<Prefilled> {
    let (mut cu_rows, mut logit_rows) = (vec![0i32], vec![0]);
    let (mut logits, mut features, mut wanted) = (Vec::new(), Vec::new(), 0);
    for chunk in chunks {
        let mut left = chunk.tokens.len();
        for tokens in chunk.tokens.chunks(DraftTree::MAX_NODES) {
            left -= tokens.len();
            let rows =
                if left > 0 && chunk.logits == LogitRows::Last { LogitRows::None } else { chunk.logits };
            let tree = DraftTree::chain(tokens.len())?;
            let stream = VerifyStream { slot: chunk.slot, tokens: tokens.to_vec(), tree, logits: rows };
            let verified = target.verify(&[stream])?;
            target.commit(&[(0..tokens.len()).collect()])?;
            wanted += verified.logit_rows.last().copied().unwrap_or(0);
            logits.extend(verified.logits);
            features.extend(verified.features);
        }
        cu_rows.push(cu_rows[cu_rows.len() - 1] + chunk.tokens.len() as i32);
        logit_rows.push(wanted);
    }
    let joined = |rows: Vec<Tensor>| (!rows.is_empty()).then(|| Tensor::cat(&rows, 0)).transpose();
    if !chunks.iter().any(|chunk| chunk.features) {
        features.clear();
    }
    Ok(Prefilled { cu_rows, logits: joined(logits)?, logit_rows, features: joined(features)? })
}
