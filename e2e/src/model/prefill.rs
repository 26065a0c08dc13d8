//! Long parts of prompts: chains of any length in one pass, committed as they are read.
//!
//! Products, norms and the convolution take all rows of all chunks at once, the delta rule its chunked form over the states in place, and
//! attention runs over slices of the chunks whose keys, and those of every row before them, are in the pool by then. Nothing is left to
//! commit. Cut at multiples of a slice ([`DraftTree::MAX_NODES`](canopy_kernels::DraftTree)), a prompt's bits do not depend on where.

use candle_core::{DType, Device, Tensor};
use canopy_candle::{
    CacheRows, DeviceSequences, DeviceTree, DraftTree, List, NormKind, PassInputs, Sequences,
    add_rms_norm_to, rms_norm_to,
};

use super::verify::{Pass, wanted_rows};
use super::{Qwen35, run_pass, run_recorded};
use crate::target::{Prefilled, PromptChunk, prefill_by_slices};
use crate::{Error, Result};

/// What every layer of a prefill pass reads.
pub(super) struct Chunks {
    pub(super) sequences: DeviceSequences,
    /// The slices of all sequences, in order.
    pub(super) attended: Vec<Attended>,
    /// Absolute position of every row.
    pub(super) positions: Vec<i32>,
    /// Committed length of every sequence.
    starts: Vec<i32>,
}

/// Slices whose attention is one launch.
pub(super) struct Attended {
    pub(super) slices: DeviceTree,
    /// Keys before every slice.
    pub(super) lens: Vec<i32>,
    /// Their first packed row.
    pub(super) first: usize,
}

/// Slices of one launch: those of a 9B fill a device, and more at once take longer than one launch after another.
const TOGETHER: usize = 2;

/// The slices of `sequences` behind `starts` committed rows.
fn attended(sequences: &Sequences, starts: &[i32], device: &Device) -> Result<Vec<Attended>> {
    let slices = sequences.iter().zip(sequences.slots()).zip(starts).flat_map(
        |(((first, rows, _), &slot), &start)| {
            (0..rows)
                .step_by(DraftTree::MAX_NODES)
                .map(move |at| (first + at, (rows - at).min(DraftTree::MAX_NODES), slot, start + at as i32))
        },
    );
    let slices: Vec<_> = slices.collect();
    let launch = |some: &[(usize, usize, i32, i32)]| {
        let lens: Vec<usize> = some.iter().map(|&(_, rows, ..)| rows).collect();
        let slots: Vec<i32> = some.iter().map(|&(_, _, slot, _)| slot).collect();
        Ok(Attended {
            slices: DeviceTree::slices(&lens, &slots, device)?,
            lens: some.iter().map(|&(.., start)| start).collect(),
            first: some[0].0,
        })
    };
    slices.chunks(TOGETHER).map(launch).collect()
}

impl Chunks {
    /// Where the rows go in the pools of keys and values.
    pub(super) fn cache_rows(&self) -> CacheRows<'_> {
        let sequences = self.sequences.host();
        CacheRows { cu_rows: sequences.cu_rows(), slots: sequences.slots(), starts: &self.starts }
    }
}

impl Qwen35 {
    /// Whether this model's device and sizes have the chunked form.
    fn reads_chunks(&self) -> bool {
        let gdn = self.config.gdn;
        self.options.device.is_cpu() || self.options.rows == DType::BF16 && (gdn.dk, gdn.dv) == (128, 128)
    }

    fn chunks(&self, chunks: &[PromptChunk]) -> Result<Chunks> {
        let field = |field, expected: String, got: usize| {
            Err(Error::Request { field, expected, got: got.to_string() })
        };
        let (mut lens, mut slots, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        let mut positions = Vec::new();
        for chunk in chunks {
            self.check_slot(chunk.slot)?;
            let (start, len) = (self.committed[chunk.slot], chunk.tokens.len());
            if start + len > self.options.context_len {
                let expected = format!("positions within the context of {}", self.options.context_len);
                return field("tokens", expected, start + len);
            }
            lens.push(len);
            slots.push(chunk.slot as i32);
            starts.push(start as i32);
            positions.extend((start..start + len).map(|position| position as i32));
        }
        let (sequences, device) = (Sequences::new(&lens, slots)?, &self.options.device);
        Ok(Chunks {
            attended: attended(&sequences, &starts, device)?,
            sequences: DeviceSequences::new(sequences, device)?,
            positions,
            starts,
        })
    }

    /// All layers over the chunks' rows; the states and pools are those after them.
    fn chunk_pass(&self, chunks: &Chunks, tokens: &[u32], features: bool) -> Result<Pass> {
        let (eps, kind) = (self.config.rms_norm_eps as f32, NormKind::UnitOffset);
        let taps = if features { self.taps.as_slice() } else { &[] };
        let mut tapped = vec![None; taps.len()];
        let mut stream = self.head.embed(tokens)?;
        let rows = self.layers[0].mlp.rows_dtype()?;
        let mut normed = rms_norm_to(&stream, &self.layers[0].input_norm, eps, kind, rows)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let mixed = layer.read_mixer(chunks, &normed)?;
            (stream, normed) = add_rms_norm_to(&mixed, &stream, &layer.post_norm, eps, kind, rows)?;
            let (next_norm, next_rows) = self.next_norm(index, rows);
            let mixed = layer.mlp.read(&normed)?;
            (stream, normed) = add_rms_norm_to(&mixed, &stream, next_norm, eps, kind, next_rows)?;
            for (tap, _) in tapped.iter_mut().zip(taps).filter(|(_, id)| **id == index) {
                *tap = Some(stream.clone());
            }
        }
        Ok(Pass { normed, tapped: tapped.into_iter().flatten().collect(), tapes: Vec::new() })
    }

    /// [`Target::prefill`](crate::target::Target::prefill).
    pub(super) fn read_prompts(&mut self, chunks: &[PromptChunk]) -> Result<Prefilled> {
        if !self.reads_chunks() {
            return prefill_by_slices(self, chunks);
        }
        let tokens: Vec<u32> = chunks.iter().flat_map(|chunk| &chunk.tokens).copied().collect();
        self.head.check_ids(&tokens)?;
        let features = chunks.iter().any(|chunk| chunk.features);
        let read = self.chunks(chunks)?;
        let cu_rows = read.sequences.host().cu_rows();
        let inputs = PassInputs::new(&self.options.device)
            .with_ids(&tokens)
            .with_list(List::Positions, &read.positions)
            .with_destinations(read.cache_rows(), self.options.capacity());
        let with_lens = |inputs: PassInputs, of: &Attended| inputs.with_list(List::Lens, &of.lens);
        let inputs = read.attended.iter().fold(inputs, with_lens);
        let (logits, logit_rows, features) = run_pass(&self.options.device, || {
            let (pass, _) = run_recorded(None, &inputs, |_| self.chunk_pass(&read, &tokens, features))?;
            let wanted = chunks.iter().map(|chunk| chunk.logits);
            let (rows, logit_rows) = wanted_rows(wanted, cu_rows);
            let logits = self.logits_of(&rows, &pass.normed)?;
            let features = (!pass.tapped.is_empty()).then(|| Tensor::cat(&pass.tapped, 1)).transpose()?;
            Ok::<_, Error>((logits, logit_rows, features))
        })?;
        for chunk in chunks {
            self.set_committed(chunk.slot, self.committed[chunk.slot] + chunk.tokens.len());
        }
        Ok(Prefilled { cu_rows: cu_rows.to_vec(), logits, logit_rows, features })
    }
}
