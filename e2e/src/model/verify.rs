//! One round: verify packed trees, then commit their accepted paths.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use canopy_candle::{
    AcceptedPaths, BuiltTrees, CacheRows, DevicePaths, List, NormKind, PassCounts, PassInputs, Placed,
    TreeBatch, WalkedTree, add_rms_norm_to, rms_norm_to,
};

use super::gated_delta_net::Tape;
use super::qwen35::lock;
use super::{Qwen35, Round, run_pass, run_recorded};
use crate::target::{
    DraftedTokens, DraftedTrees, LogitRows, Prefilled, PromptChunk, Snapshot, StatedRanks, Target, Verified,
    VerifyStream,
};
use crate::{Error, Result};

/// What a verify pass leaves for its commit.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) batch: TreeBatch,
    /// Every node's token.
    pub(super) tokens: Vec<u32>,
    /// Every node's rank and depth, where a draft's trees were built for the pass.
    pub(super) nodes: Option<Vec<u32>>,
    /// Most nodes of a path.
    pub(super) most: usize,
    /// Committed length of every sequence.
    pub(super) prefix_lens: Vec<i32>,
    /// Epoch of every sequence's slot.
    pub(super) epochs: Vec<u64>,
    pub(super) pass: Arc<Pass>,
    /// What the pass read.
    pub(super) placed: Placed,
}

/// What a pass through the layers gives.
#[derive(Debug)]
pub(super) struct Pass {
    /// Output of the last layer's residual stream, through the final norm.
    pub(super) normed: Tensor,
    /// Outputs of the tap layers.
    pub(super) tapped: Vec<Tensor>,
    /// One per layer, of the Gated DeltaNet ones; none at all of a prefill pass.
    pub(super) tapes: Vec<Option<Tape>>,
}

/// Most rows of a pass that is recorded: larger ones are prompts, whose lengths vary and whose launches hide behind their kernels.
const MOST_RECORDED_ROWS: usize = 128;

impl Qwen35 {
    fn check_streams(&self, streams: &[VerifyStream]) -> Result<()> {
        if streams.is_empty() {
            let expected = "at least one stream".into();
            return Err(Error::Request { field: "streams", expected, got: "none".into() });
        }
        for stream in streams {
            self.check_slot(stream.slot)?;
            if stream.tokens.len() != stream.tree.len() {
                let expected = format!("one token for each of the tree's {} nodes", stream.tree.len());
                return Err(Error::Request {
                    field: "tokens",
                    expected,
                    got: stream.tokens.len().to_string(),
                });
            }
            let deepest = self.committed[stream.slot] + stream.tree.max_depth() + 1;
            if deepest > self.options.context_len {
                let expected = format!("positions within the context of {}", self.options.context_len);
                return Err(Error::Request { field: "tokens", expected, got: deepest.to_string() });
            }
        }
        Ok(())
    }

    fn pass(&self, round: &Round<'_>, tokens: &[u32]) -> Result<Pass> {
        let (eps, kind) = (self.config.rms_norm_eps as f32, NormKind::UnitOffset);
        let mut tapped = vec![None; self.taps.len()];
        let mut tap = |layer: usize, stream: &Tensor| {
            for (slot, _) in tapped.iter_mut().zip(&self.taps).filter(|(_, id)| **id == layer) {
                *slot = Some(stream.clone());
            }
        };
        let mut tapes = Vec::with_capacity(self.layers.len());
        let mut stream = self.head.embed(tokens)?;
        // Norms come in the dtype of the products that take them, the last one as the head does.
        let rows = self.layers[0].mlp.rows_dtype()?;
        let mut normed = rms_norm_to(&stream, &self.layers[0].input_norm, eps, kind, rows)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (mixed, tape) = layer.verify_mixer(round, self.options.variant, &normed)?;
            tapes.push(tape);
            (stream, normed) = add_rms_norm_to(&mixed, &stream, &layer.post_norm, eps, kind, rows)?;
            let (next_norm, next_rows) = self.next_norm(index, rows);
            let mixed = layer.mlp.forward(&normed)?;
            (stream, normed) = add_rms_norm_to(&mixed, &stream, next_norm, eps, kind, next_rows)?;
            tap(index, &stream);
        }
        Ok(Pass { normed, tapped: tapped.into_iter().flatten().collect(), tapes })
    }

    /// The norm behind a layer, and the dtype that its rows should come in when those of products are `rows`.
    pub(super) fn next_norm(&self, layer: usize, rows: DType) -> (&Tensor, DType) {
        self.layers.get(layer + 1).map_or((&self.norm, DType::F32), |next| (&next.input_norm, rows))
    }

    /// Logits of the wanted rows, and the first row of every stream in them.
    fn logits(
        &self,
        streams: &[VerifyStream],
        batch: &TreeBatch,
        normed: &Tensor,
    ) -> Result<(Option<Tensor>, Vec<usize>)> {
        let (rows, logit_rows) = wanted_rows(streams.iter().map(|stream| stream.logits), batch.cu_nodes());
        Ok((self.logits_of(&rows, normed)?, logit_rows))
    }

    /// Logits of some rows, `None` of none.
    pub(super) fn logits_of(&self, rows: &[u32], normed: &Tensor) -> Result<Option<Tensor>> {
        let (Some(&first), Some(&last)) = (rows.first(), rows.last()) else { return Ok(None) };
        let wanted = match (last - first) as usize + 1 == rows.len() {
            true if rows.len() == normed.dim(0)? => normed.clone(),
            true => normed.narrow(0, first as usize, rows.len())?,
            false => normed.index_select(&Tensor::new(rows, normed.device())?, 0)?,
        };
        Ok(Some(self.head.logits(&wanted)?))
    }

    /// A commit belongs to the states that its verify saw.
    pub(super) fn check_paths(&self, pending: &Pending, paths: &[Vec<usize>]) -> Result<AcceptedPaths> {
        let accepted = AcceptedPaths::new(&pending.batch, paths)?;
        for (sequence, slot, _) in accepted.iter() {
            if self.epochs[slot] != pending.epochs[sequence] {
                let expected = "an empty path for a slot that was reset or restored since its verify".into();
                return Err(Error::Request {
                    field: "paths",
                    expected,
                    got: format!("nodes for slot {slot}"),
                });
            }
        }
        Ok(accepted)
    }

    fn advance(&mut self, pending: &Pending, accepted: AcceptedPaths) -> Result<()> {
        let Pending { prefix_lens, pass, .. } = pending;
        let moves = accepted.iter().any(|(sequence, _, rows)| {
            let first = accepted.cu_nodes()[sequence];
            rows.iter().zip(first..).any(|(&row, in_place)| row != in_place)
        });
        let advanced: Vec<_> = accepted.iter().map(|(_, slot, rows)| (slot, rows.len())).collect();
        if advanced.is_empty() {
            return Ok(());
        }
        let inputs =
            PassInputs::new(&self.options.device).with_paths(accepted).with_list(List::Lens, prefix_lens);
        // Few launches, which hide behind the ones ahead of them: not worth a recording.
        run_recorded(None, &inputs, |placed| {
            self.commit_paths(pass, placed.paths()?, moves.then_some(prefix_lens))
        })?;
        for (slot, rows) in advanced {
            self.set_committed(slot, self.committed[slot] + rows);
        }
        Ok(())
    }

    /// Advances the states of all layers along the paths; moves the paths' keys and values behind the given committed lengths, unless they
    /// lie there already.
    pub(super) fn commit_paths(
        &self,
        pass: &Pass,
        paths: &DevicePaths,
        prefix_lens: Option<&[i32]>,
    ) -> Result<()> {
        let (gdn, raws): (Vec<_>, Vec<_>) = pass.tapes.iter().flatten().map(Tape::parts).unzip();
        self.recurrent.commit(paths, self.options.variant, &gdn, &raws)?;
        prefix_lens.map_or(Ok(()), |lens| self.kv.compact(paths, lens))
    }

    /// [`Target::verify`], with tokens from a draft on the device.
    fn verify_trees(
        &mut self,
        streams: &[VerifyStream],
        drafted: Option<&DraftedTokens>,
    ) -> Result<Verified> {
        self.check_streams(streams)?;
        self.walked = None;
        let tokens: Vec<u32> = streams.iter().flat_map(|stream| &stream.tokens).copied().collect();
        self.head.check_ids(&tokens)?;
        let slots: Vec<i32> = streams.iter().map(|stream| stream.slot as i32).collect();
        let trees = streams.iter().map(|stream| stream.tree.clone()).collect();
        let batch = TreeBatch::new(trees, slots)?;
        let starts = streams.iter().map(|stream| self.committed[stream.slot] as i32);
        let prefix_lens: Vec<i32> = starts.collect();
        let depths = streams.iter().zip(&prefix_lens);
        let position = |(stream, &start): (&VerifyStream, &i32)| {
            stream.tree.depths().iter().map(move |&depth| start + depth as i32).collect::<Vec<_>>()
        };
        let positions: Vec<i32> = depths.flat_map(position).collect();
        let rows = CacheRows { cu_rows: batch.cu_nodes(), slots: batch.slots(), starts: &prefix_lens };
        let mut inputs = PassInputs::new(&self.options.device)
            .with_ids(&tokens)
            .with_list(List::Positions, &positions)
            .with_list(List::Lens, &prefix_lens)
            .with_destinations(rows, self.options.capacity())
            .with_trees(batch.clone(), self.config.gdn);
        if let Some(DraftedTokens { best, sources, trees }) = drafted {
            inputs = inputs.with_drafted_ids(best, sources);
            if let Some(DraftedTrees { drafts, nodes, stated }) = trees {
                let trees = BuiltTrees { drafts, nodes, stated: stated.as_deref() };
                inputs = inputs.with_built_trees(best, trees);
            }
        }
        let ((pass, placed), (logits, logit_rows), features) = run_pass(&self.options.device, || {
            let (pass, placed) = self.run_layers(&inputs, &tokens, [&positions, &prefix_lens])?;
            let logits = self.logits(streams, &batch, &pass.normed)?;
            let features = match pass.tapped.as_slice() {
                [] => None,
                // A recorded pass's tensors are the next pass's too.
                [only] if !only.device().is_cpu() => Some(only.force_contiguous()?),
                tapped => Some(Tensor::cat(tapped, 1)?),
            };
            Ok::<_, Error>(((pass, placed), logits, features))
        })?;
        let epochs = streams.iter().map(|stream| self.epochs[stream.slot]).collect();
        let nodes = drafted.and_then(|drafted| Some(drafted.trees.as_ref()?.nodes.clone()));
        let most = most_visited(streams);
        self.pending =
            Some(Pending { batch: batch.clone(), tokens, nodes, most, prefix_lens, epochs, pass, placed });
        Ok(Verified { batch, logits, logit_rows, features })
    }

    /// One pass of the trees through the layers.
    fn run_layers(
        &self,
        inputs: &PassInputs,
        tokens: &[u32],
        lists: [&[i32]; 2],
    ) -> Result<(Arc<Pass>, Placed)> {
        let [positions, prefix_lens] = lists;
        let recorded = tokens.len() <= MOST_RECORDED_ROWS;
        run_recorded(recorded.then_some(&self.passes), inputs, |placed| {
            self.pass(&Round { tree: placed.tree()?, positions, prefix_lens }, tokens)
        })
    }
}

/// Most nodes of a path.
fn most_visited(streams: &[VerifyStream]) -> usize {
    streams.iter().map(|stream| stream.tree.max_depth()).max().unwrap_or(0) + 1
}

/// The wanted rows of sequences that begin at `cu_rows`, and the first of every sequence among them.
pub(super) fn wanted_rows(
    wanted: impl Iterator<Item = LogitRows>,
    cu_rows: &[i32],
) -> (Vec<u32>, Vec<usize>) {
    let (mut rows, mut firsts) = (Vec::new(), vec![0]);
    for (wanted, ends) in wanted.zip(cu_rows.windows(2)) {
        let (first, end) = (ends[0] as u32, ends[1] as u32);
        match wanted {
            LogitRows::None => {}
            LogitRows::Last => rows.push(end - 1),
            LogitRows::All => rows.extend(first..end),
        }
        firsts.push(rows.len());
    }
    (rows, firsts)
}

impl Target for Qwen35 {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_len(&self) -> usize {
        self.options.context_len
    }

    fn slots(&self) -> usize {
        self.options.slots
    }

    fn committed(&self, slot: usize) -> usize {
        self.committed.get(slot).copied().unwrap_or(0)
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        self.reset_slot(slot)
    }

    fn set_taps(&mut self, taps: &[usize]) -> Result<()> {
        if let Some(tap) = taps.iter().find(|&&tap| tap >= self.layers.len()) {
            let expected = format!("layer ids below {}", self.layers.len());
            return Err(Error::Request { field: "taps", expected, got: tap.to_string() });
        }
        self.taps = taps.to_vec();
        lock(&self.passes).clear();
        Ok(())
    }

    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
        self.verify_trees(streams, None)
    }

    fn verify_drafted(&mut self, streams: &[VerifyStream], drafted: &DraftedTokens) -> Result<Verified> {
        if !self.options.device.is_cpu() {
            return self.verify_trees(streams, Some(drafted));
        }
        let most = most_visited(streams);
        let (streams, nodes) = drafted.known(streams)?;
        let verified = self.verify_trees(&streams, None)?;
        if let Some(pending) = &mut self.pending {
            (pending.nodes, pending.most) = (nodes, most);
        }
        Ok(verified)
    }

    fn walks(&self) -> bool {
        true
    }

    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        let Some(pending) = self.pending.take() else {
            let expected = "a verify before its commit".into();
            return Err(Error::Request { field: "paths", expected, got: "none".into() });
        };
        match self.check_paths(&pending, paths) {
            Ok(accepted) => run_pass(&self.options.device.clone(), || self.advance(&pending, accepted)),
            Err(error) => {
                self.pending = Some(pending);
                Err(error)
            }
        }
    }

    fn prefill(&mut self, chunks: &[PromptChunk]) -> Result<Prefilled> {
        self.read_prompts(chunks)
    }

    fn walk_and_commit(
        &mut self,
        verified: &Verified,
        stated: Option<&StatedRanks>,
    ) -> Result<Vec<WalkedTree>> {
        self.walk(verified, stated)
    }

    fn walked_nodes(&self) -> Result<Option<Vec<u32>>> {
        let Some((placed, known)) = &self.walked else { return Ok(None) };
        let built =
            placed.read(List::Nodes)?.map(|nodes| nodes.into_iter().map(i32::cast_unsigned).collect());
        Ok(Some(built.unwrap_or_else(|| known.clone())))
    }

    fn forget_recordings(&mut self) {
        (self.pending, self.walked) = (None, None);
        lock(&self.passes).clear();
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.save_slot(slot)
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.load_slot(slot, snapshot)
    }

    fn pass_counts(&self) -> PassCounts {
        lock(&self.passes).counts()
    }
}
