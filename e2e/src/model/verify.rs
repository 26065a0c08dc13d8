//! One round: verify packed trees, then commit their accepted paths.

use candle_core::Tensor;
use canopy_candle::{AcceptedPaths, DevicePaths, DeviceTree, NormKind, TreeBatch, add_rms_norm, rms_norm};

use super::gated_delta_net::Tape;
use super::{Qwen35, Round};
use crate::target::{LogitRows, Snapshot, Target, Verified, VerifyStream};
use crate::{Error, Result, pool};

/// What a verify pass leaves for its commit; one tape per Gated DeltaNet layer.
#[derive(Debug)]
pub(super) struct Pending {
    round: Round,
    /// Epoch of every sequence's slot.
    epochs: Vec<u64>,
    tapes: Vec<Option<Tape>>,
}

/// What runs through the layers.
struct Pass {
    /// Output of the last layer's residual stream, through the final norm.
    normed: Tensor,
    features: Option<Tensor>,
    tapes: Vec<Option<Tape>>,
}

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

    fn round(&self, streams: &[VerifyStream]) -> Result<Round> {
        let slots = streams.iter().map(|stream| stream.slot as i32).collect();
        let batch = TreeBatch::new(streams.iter().map(|stream| stream.tree.clone()).collect(), slots)?;
        let prefix = |stream: &VerifyStream| self.committed[stream.slot] as i32;
        let positions = streams.iter().flat_map(|stream| {
            let start = prefix(stream);
            stream.tree.depths().iter().map(move |&depth| start + depth as i32)
        });
        Ok(Round {
            positions: positions.collect(),
            prefix_lens: streams.iter().map(prefix).collect(),
            tree: DeviceTree::new(batch, &self.options.device)?,
        })
    }

    fn pass(&self, round: &Round, tokens: &[u32]) -> Result<Pass> {
        let (eps, kind) = (self.config.rms_norm_eps as f32, NormKind::UnitOffset);
        let mut tapped = vec![None; self.taps.len()];
        let mut tap = |layer: usize, stream: &Tensor| {
            for (slot, _) in tapped.iter_mut().zip(&self.taps).filter(|(_, id)| **id == layer) {
                *slot = Some(stream.clone());
            }
        };
        let mut tapes = Vec::with_capacity(self.layers.len());
        let mut stream = self.head.embed(tokens)?;
        let mut normed = rms_norm(&stream, &self.layers[0].input_norm, eps, kind)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (mixed, tape) = layer.verify_mixer(round, self.options.variant, &normed)?;
            tapes.push(tape);
            (stream, normed) = add_rms_norm(&mixed, &stream, &layer.post_norm, eps, kind)?;
            let next_norm = self.layers.get(index + 1).map_or(&self.norm, |next| &next.input_norm);
            (stream, normed) = add_rms_norm(&layer.mlp.forward(&normed)?, &stream, next_norm, eps, kind)?;
            tap(index, &stream);
        }
        let tapped: Vec<Tensor> = tapped.into_iter().flatten().collect();
        let features = match tapped.len() {
            0 => None,
            _ => Some(Tensor::cat(&tapped, 1)?),
        };
        Ok(Pass { normed, features, tapes })
    }

    /// Logits of the wanted rows, and the first row of every stream in them.
    fn logits(
        &self,
        streams: &[VerifyStream],
        round: &Round,
        normed: &Tensor,
    ) -> Result<(Option<Tensor>, Vec<usize>)> {
        let (mut rows, mut logit_rows) = (Vec::<u32>::new(), vec![0]);
        for (stream, &first) in streams.iter().zip(round.tree.host().cu_nodes()) {
            let (first, end) = (first as u32, first as u32 + stream.tree.len() as u32);
            match stream.logits {
                LogitRows::None => {}
                LogitRows::Last => rows.push(end - 1),
                LogitRows::All => rows.extend(first..end),
            }
            logit_rows.push(rows.len());
        }
        let (Some(&first), Some(&last)) = (rows.first(), rows.last()) else { return Ok((None, logit_rows)) };
        let wanted = match (last - first) as usize + 1 == rows.len() {
            true if rows.len() == normed.dim(0)? => normed.clone(),
            true => normed.narrow(0, first as usize, rows.len())?,
            false => normed.index_select(&Tensor::new(rows.as_slice(), normed.device())?, 0)?,
        };
        Ok((Some(self.head.logits(&wanted)?), logit_rows))
    }

    /// A commit belongs to the states that its verify saw.
    fn check_paths(&self, pending: &Pending, paths: &[Vec<usize>]) -> Result<AcceptedPaths> {
        let accepted = AcceptedPaths::new(pending.round.tree.host(), paths)?;
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
        let Pending { round, tapes, .. } = pending;
        let moves = accepted.iter().any(|(sequence, _, rows)| {
            let first = accepted.cu_nodes()[sequence];
            rows.iter().zip(first..).any(|(&row, in_place)| row != in_place)
        });
        let paths = DevicePaths::new(accepted, &self.options.device)?;
        let (gdn, raws): (Vec<_>, Vec<_>) = tapes.iter().flatten().map(Tape::parts).unzip();
        self.recurrent.commit(&paths, self.options.variant, &gdn, &raws)?;
        if moves {
            self.kv.compact(&paths, &round.prefix_lens)?;
        }
        for (_, slot, rows) in paths.host().iter() {
            self.set_committed(slot, self.committed[slot] + rows.len());
        }
        Ok(())
    }
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
        Ok(())
    }

    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
        self.check_streams(streams)?;
        let round = self.round(streams)?;
        let tokens: Vec<u32> = streams.iter().flat_map(|stream| &stream.tokens).copied().collect();
        let (Pass { features, tapes, .. }, (logits, logit_rows)) = pool::run(|| {
            let pass = self.pass(&round, &tokens)?;
            let logits = self.logits(streams, &round, &pass.normed)?;
            Ok::<_, Error>((pass, logits))
        })?;
        let batch = round.tree.host().clone();
        let epochs = streams.iter().map(|stream| self.epochs[stream.slot]).collect();
        self.pending = Some(Pending { round, epochs, tapes });
        Ok(Verified { batch, logits, logit_rows, features })
    }

    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        let Some(pending) = self.pending.take() else {
            let expected = "a verify before its commit".into();
            return Err(Error::Request { field: "paths", expected, got: "none".into() });
        };
        match self.check_paths(&pending, paths) {
            Ok(accepted) => pool::run(|| self.advance(&pending, accepted)),
            Err(error) => {
                self.pending = Some(pending);
                Err(error)
            }
        }
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.save_slot(slot)
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.load_slot(slot, snapshot)
    }
}
