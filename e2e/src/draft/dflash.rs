//! DFlash (arXiv 2602.06036): a block of masks after the root, denoised in one pass over target features.
//!
//! ```text
//! context   ctx = hidden_norm(fc(tap outputs side by side))          once per committed token
//! block     h = [embed(root), embed(mask) x (B - 1)]                 positions start .. start + B - 1
//! layer     q = q_norm(Wq n), k = k_norm(Wk [ctx; n]), v = Wv [ctx; n]    n = input_norm(h), RoPE on q and k
//!           h += Wo attention(q, k, v);  h += mlp(post_norm(h))
//! logits    target's head(norm(h)) of rows 1 .. B - 1: depths 1 .. B - 1
//! ```
//!
//! start = committed tokens = context rows. Context keys and values are computed when their features come and kept;
//! the block's own are written behind them and overwritten by the next rows. Every step works row by row or within
//! one stream, so a stream's logits do not depend on the other streams of a call.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use canopy_candle::{List, NormKind, PackedLinear, PassCounts, PassInputs, Passes, rms_norm};
use canopy_kernels::Error as KernelError;

use super::dflash_cache::{CacheSize, ContextCache};
use super::dflash_layer::{Block, DFlashLayer, Kept, keep};
use super::{DraftRequest, Drafter};
use crate::config::DraftConfig;
use crate::model::{SharedHead, run_pass, run_recorded};
use crate::target::Snapshot;
use crate::weights::Weights;
use crate::{Error, Result};

/// Sees the block rows after every layer.
type Observer<'a> = &'a mut dyn FnMut(usize, &Tensor);

/// Names before the drafter's tensors.
const PREFIXES: [&str; 2] = ["", "model."];

/// How a drafter is set up besides its checkpoint.
#[derive(Clone, Debug)]
pub struct DraftOptions {
    /// Pool slots, the target's.
    pub slots: usize,
    /// Most context rows of one slot, the target's context length.
    pub context_len: usize,
    /// Where the drafter runs.
    pub device: Device,
    /// Records blocks of one shape as CUDA graphs. The bits are the same without.
    pub graphs: bool,
}

/// Recordings of blocks that are kept.
const RECORDINGS: usize = 64;

/// Everything that a block runs through but its last norm.
#[derive(Debug)]
struct Products {
    layers: Vec<DFlashLayer>,
    head: SharedHead,
}

impl Products {
    fn rounded(&self) -> Result<Self> {
        let layers = self.layers.iter().map(DFlashLayer::rounded).collect::<Result<_>>()?;
        Ok(Self { layers, head: self.head.rounded()? })
    }
}

/// The block drafter with the context of its slots.
#[derive(Debug)]
pub struct DFlash {
    config: DraftConfig,
    exact: Products,
    /// What quick drafts run through.
    rounded: Products,
    fc: PackedLinear,
    hidden_norm: Tensor,
    norm: Tensor,
    cache: ContextCache,
    /// Blocks through the layers and the final norm.
    blocks: Mutex<Passes<Tensor>>,
}

impl DFlash {
    /// Loads a drafter; `head` is the target's.
    ///
    /// # Errors
    /// [`Error::Weights`] naming file, tensor, expected and got; [`Error::Config`] when `head` has other sizes or
    /// the options are impossible.
    pub fn load(
        weights: &Weights,
        config: DraftConfig,
        head: SharedHead,
        options: DraftOptions,
    ) -> Result<Self> {
        let sizes = [("slots", options.slots), ("context_len", options.context_len)];
        if let Some((key, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            let message = "expected at least 1, got 0".into();
            return Err(Error::Config { what: "drafter options".into(), key: key.into(), message });
        }
        let (expected, got) =
            ((config.vocab_size, config.hidden_size), (head.vocab_size(), head.hidden_size()));
        if expected != got {
            let message = format!("expected [vocab, hidden] {expected:?}, got {got:?}");
            return Err(Error::Config { what: "drafter".into(), key: "target's head".into(), message });
        }
        let (device, hidden) = (&options.device, config.hidden_size);
        let prefix = weights.find_prefix(&PREFIXES, "fc.weight")?;
        let norm = |name: &str| weights.f32(&format!("{prefix}{name}.weight"), &[hidden], device);
        let layers = (0..config.layers.len())
            .map(|index| DFlashLayer::load(weights, prefix, &config, index, device))
            .collect::<Result<_>>()?;
        let exact = Products { layers, head };
        let size = CacheSize {
            slots: options.slots,
            context_len: options.context_len,
            layers: config.layers.len(),
            block_size: config.block_size,
        };
        Ok(Self {
            fc: weights.linear(&format!("{prefix}fc.weight"), hidden, config.taps.len() * hidden, device)?,
            hidden_norm: norm("hidden_norm")?,
            norm: norm("norm")?,
            rounded: exact.rounded()?,
            exact,
            cache: ContextCache::new(size, config.attn, device)?,
            blocks: Mutex::new(recorded(device, options.graphs)?),
            config,
        })
    }

    /// Records blocks from now on, or never again; counts start anew.
    ///
    /// # Errors
    /// From the driver.
    pub fn set_graphs(&mut self, graphs: bool) -> Result<()> {
        self.blocks = Mutex::new(recorded(self.norm.device(), graphs)?);
        Ok(())
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// Context features `[n, hidden]` of tap outputs `[n, taps * hidden]`: what every layer's context keys and
    /// values are projected from.
    pub fn context_features(&self, features: &Tensor) -> Result<Tensor> {
        self.check_features(features)?;
        let fused = self.fc.forward_one(features)?;
        Ok(rms_norm(&fused, &self.hidden_norm, self.eps(), NormKind::Plain)?)
    }

    /// Copies of a slot's context keys (normed, RoPE applied) and values `[rows, Hkv, D]`, layer by layer.
    pub fn context_tensors(&self, slot: usize) -> Result<Vec<(Tensor, Tensor)>> {
        self.cache.copy(slot)
    }

    /// [`Drafter::draft`] that shows the block rows `[requests * block_size, hidden]` after every layer, before the
    /// final norm.
    pub fn draft_observed(
        &mut self,
        requests: &[DraftRequest],
        observe: Observer<'_>,
    ) -> Result<Vec<Tensor>> {
        split(requests, &self.run(false, requests, self.config.block_size, Some(observe))?)
    }

    /// Blocks of `rows` rows. With an observer, and on a device, where a recording serves any horizons, the last layer computes every row,
    /// otherwise the wanted ones alone.
    fn run(
        &self,
        quick: bool,
        requests: &[DraftRequest],
        rows: usize,
        observe: Option<Observer<'_>>,
    ) -> Result<Tensor> {
        self.check_requests(requests, rows)?;
        let wanted = wanted(requests, rows);
        if wanted.is_empty() {
            return Ok(Tensor::zeros((0, self.config.vocab_size), DType::F32, self.norm.device())?);
        }
        // Other devices have no weights to round: their quick drafts are the others, and share recordings with them.
        let quick = quick && self.norm.device().is_cpu();
        let products = if quick { &self.rounded } else { &self.exact };
        let kept = Some(wanted.as_slice());
        let slots: Vec<usize> = requests.iter().map(|request| request.slot).collect();
        let (places, blocks) = self.cache.place_blocks(&slots, rows)?;
        let positions = places.positions();
        let block = Block { rows: &places, blocks: &blocks, positions: &positions };
        let masks = std::iter::repeat_n(self.config.mask_token, rows - 1);
        let tokens: Vec<u32> =
            requests.iter().flat_map(|request| std::iter::once(request.root).chain(masks.clone())).collect();
        products.head.check_ids(&tokens)?;
        let normed = match observe {
            Some(observe) => keep(self.block(products, &block, &tokens, (None, observe))?, kept)?,
            None if self.norm.device().is_cpu() => {
                self.block(products, &block, &tokens, (kept, &mut |_, _| {}))?
            }
            None => {
                let inputs = PassInputs::new(self.norm.device())
                    .with_ids(&tokens)
                    .with_list(List::Positions, &positions)
                    .with_list(List::Lens, &blocks.context_lens)
                    .with_list(List::Slots, &blocks.slots)
                    .with_destinations(places.cache_rows(), self.cache.capacity())
                    .tagged([rows as u64]);
                let (normed, _) = run_recorded(Some(&self.blocks), &inputs, |_| {
                    self.block(products, &block, &tokens, (None, &mut |_, _| {}))
                })?;
                keep(normed.as_ref().clone(), kept)?
            }
        };
        Ok(products.head.logits(&normed)?.to_dtype(DType::F32)?)
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// Checks `[n, taps * hidden]`; returns n.
    fn check_features(&self, features: &Tensor) -> Result<usize> {
        let width = self.config.taps.len() * self.config.hidden_size;
        match features.dims() {
            &[rows, got] if got == width => Ok(rows),
            got => {
                let (expected, got) = (Box::new([got.first().copied().unwrap_or(0), width]), got.into());
                Err(KernelError::Shape { op: "drafter", arg: "features", expected, got }.into())
            }
        }
    }

    fn check_requests(&self, requests: &[DraftRequest], rows: usize) -> Result<()> {
        if !(1..=self.config.block_size).contains(&rows) {
            let expected = format!("1 to block_size = {}", self.config.block_size);
            return Err(Error::Request { field: "rows", expected, got: rows.to_string() });
        }
        for request in requests {
            if request.horizon >= rows {
                let name = if rows == self.config.block_size { "block_size" } else { "rows" };
                let expected = format!("at most {name} - 1 = {}", rows - 1);
                return Err(Error::Request { field: "horizon", expected, got: request.horizon.to_string() });
            }
        }
        Ok(())
    }

    /// The block rows of all requests, their roots and masks, through all layers and the final norm, `[requests * block_rows, hidden]`; the
    /// last layer's of the `kept` rows alone.
    fn block(
        &self,
        products: &Products,
        block: &Block<'_>,
        tokens: &[u32],
        (kept, observe): (Kept<'_>, Observer<'_>),
    ) -> Result<Tensor> {
        let Products { layers, head } = products;
        let mut stream = head.embed(tokens)?;
        let mut normed = rms_norm(&stream, &layers[0].input_norm, self.eps(), NormKind::Plain)?;
        for (index, layer) in layers.iter().enumerate() {
            let (next_norm, kept) = match layers.get(index + 1) {
                Some(next) => (&next.input_norm, None),
                None => (&self.norm, kept),
            };
            let pool = self.cache.pool(index);
            (stream, normed) = layer.forward(pool, block, (&stream, &normed), kept, next_norm)?;
            observe(index, &stream);
        }
        Ok(normed)
    }
}

/// The parts of packed logits, one tensor `[horizon, vocab]` per request.
fn split(requests: &[DraftRequest], logits: &Tensor) -> Result<Vec<Tensor>> {
    let mut first = 0;
    let mut take = |request: &DraftRequest| {
        let rows = logits.narrow(0, first, request.horizon)?;
        first += request.horizon;
        Ok(rows)
    };
    requests.iter().map(&mut take).collect()
}

fn recorded(device: &Device, graphs: bool) -> Result<Passes<Tensor>> {
    if graphs { Ok(Passes::recorded(device, RECORDINGS)?) } else { Ok(Passes::plain()) }
}

/// The rows of every block of `rows` whose logits are asked for, (first, count), blocks without any left out.
fn wanted(requests: &[DraftRequest], rows: usize) -> Vec<(usize, usize)> {
    let asked = requests.iter().enumerate().filter(|(_, request)| request.horizon > 0);
    asked.map(|(index, request)| (index * rows + 1, request.horizon)).collect()
}

impl Drafter for DFlash {
    fn block_size(&self) -> usize {
        self.config.block_size
    }

    fn taps(&self) -> &[usize] {
        &self.config.taps
    }

    fn context_len(&self, slot: usize) -> usize {
        self.cache.len(slot)
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        self.cache.reset(slot)
    }

    fn extend(&mut self, slot: usize, features: &Tensor) -> Result<()> {
        let rows = self.check_features(features)?;
        self.extend_packed(&[(slot, rows)], features)
    }

    fn extend_packed(&mut self, rows: &[(usize, usize)], features: &Tensor) -> Result<()> {
        let got = self.check_features(features)?;
        let expected: usize = rows.iter().map(|&(_, count)| count).sum();
        if got != expected {
            let (expected, got) = (Box::new([expected]), Box::new([got]));
            return Err(KernelError::Shape { op: "drafter", arg: "rows of features", expected, got }.into());
        }
        let rows = self.cache.place_context(rows)?;
        if got == 0 {
            return Ok(());
        }
        let positions = rows.positions();
        let inputs = PassInputs::new(self.norm.device())
            .with_list(List::Positions, &positions)
            .with_destinations(rows.cache_rows(), self.cache.capacity());
        run_pass(self.norm.device(), || {
            run_recorded(None, &inputs, |_| {
                let context = self.context_features(features)?;
                let mut layers = self.exact.layers.iter().enumerate();
                layers.try_for_each(|(index, layer)| {
                    layer.extend(self.cache.pool(index), &rows, &positions, &context)
                })
            })
        })?;
        self.cache.advance(&rows);
        Ok(())
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Tensor>> {
        self.draft_rows(requests, self.config.block_size)
    }

    fn draft_rows(&mut self, requests: &[DraftRequest], rows: usize) -> Result<Vec<Tensor>> {
        split(requests, &self.draft_packed(requests, rows, false)?)
    }

    fn draft_quickly(&mut self, requests: &[DraftRequest], rows: usize) -> Result<Vec<Tensor>> {
        split(requests, &self.draft_packed(requests, rows, true)?)
    }

    fn draft_packed(&mut self, requests: &[DraftRequest], rows: usize, quick: bool) -> Result<Tensor> {
        run_pass(self.norm.device(), || self.run(quick, requests, rows, None))
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        self.cache.snapshot(slot)
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.cache.restore(slot, snapshot)
    }

    fn forget_recordings(&mut self) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn pass_counts(&self) -> PassCounts {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).counts()
    }
}
