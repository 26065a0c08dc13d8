//! The model: loading, and what belongs to a slot.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use canopy_candle::{ConvDims, DraftTree, NormKind, Passes, Placed, Variant, rms_norm};

use super::attention::GatedAttention;
use super::gated_delta_net::GatedDeltaNet;
use super::mlp::Mlp;
use super::prefill::Chunks;
use super::verify::{Pass, Pending};
use super::{Round, SharedHead};
use crate::cache::{KvPools, RecurrentPools};
use crate::config::{LayerKind, TargetConfig};
use crate::weights::Weights;
use crate::{Error, Result};

/// Names before the text model's tensors, most specific first.
const PREFIXES: [&str; 3] = ["model.language_model.", "model.", ""];

/// How a model is set up besides its checkpoint.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Pool slots: streams that run at once.
    pub slots: usize,
    /// Most committed tokens plus drafted depth of one slot.
    pub context_len: usize,
    /// Form of the delta rule; `Walk`'s bits do not depend on how rows are grouped into rounds.
    pub variant: Variant,
    /// What the delta rule's rows are rounded to: f32 or, for CUDA's tensor-core design, bf16.
    pub rows: DType,
    /// Where the model runs.
    pub device: Device,
    /// Records passes that come again as CUDA graphs. The bits are the same without.
    pub graphs: bool,
}

impl ModelOptions {
    /// Rows of a slot in the pools of keys and values.
    pub(super) fn capacity(&self) -> usize {
        self.context_len + DraftTree::MAX_NODES
    }
}

#[derive(Debug)]
pub(super) enum Mixer {
    Gdn(GatedDeltaNet),
    Attention(GatedAttention),
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Tensor,
    pub(super) mixer: Mixer,
    pub(super) post_norm: Tensor,
    pub(super) mlp: Mlp,
}

/// A dense Qwen3.5 text model with the states of its slots.
#[derive(Debug)]
pub struct Qwen35 {
    pub(super) config: TargetConfig,
    pub(super) options: ModelOptions,
    pub(super) head: SharedHead,
    pub(super) layers: Vec<Layer>,
    /// The states of the Gated DeltaNet layers, in order.
    pub(super) recurrent: RecurrentPools,
    /// The keys and values of the attention layers, in order.
    pub(super) kv: KvPools,
    pub(super) norm: Tensor,
    pub(super) taps: Vec<usize>,
    pub(super) committed: Vec<usize>,
    /// Changes of each slot's committed state; a commit belongs to the state that its verify saw.
    pub(super) epochs: Vec<u64>,
    pub(super) pending: Option<Pending>,
    /// What the last walked pass read, and its nodes as far as the host knows them, when trees were built for it.
    pub(super) walked: Option<(Placed, Vec<u32>)>,
    /// Verify passes through the layers.
    pub(super) passes: Mutex<Passes<Pass>>,
}

/// Recordings that are kept.
const RECORDINGS: usize = 160;

/// One slot's states, saved.
#[derive(Debug)]
struct Saved {
    committed: usize,
    layers: Vec<(Tensor, Tensor)>,
}

impl Qwen35 {
    /// Loads the text model; tensors of the vision tower and of multi-token prediction are left alone.
    ///
    /// # Errors
    /// [`Error::Weights`] naming file, tensor, expected and got; [`Error::Config`] for impossible options.
    pub fn load(weights: &Weights, config: TargetConfig, options: ModelOptions) -> Result<Self> {
        check_options(&options)?;
        let prefix = weights.find_prefix(&PREFIXES, "embed_tokens.weight")?;
        let (device, hidden) = (&options.device, config.hidden_size);
        let is_gdn = |kind: &&LayerKind| matches!(kind, LayerKind::GatedDeltaNet);
        let recurrent = config.layers.iter().filter(is_gdn).count();
        let kv_dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
        let sizes = (options.slots, options.capacity());
        let kv = KvPools::new(config.layers.len() - recurrent, sizes, config.attn, kv_dtype, device)?;
        let recurrent = RecurrentPools::new(recurrent, options.slots, config.gdn, device)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        let (mut gdn_layers, mut attention_layers) = (0.., 0..);
        for (index, kind) in config.layers.iter().enumerate() {
            let name = format!("{prefix}layers.{index}.");
            let norm = |part: &str| weights.f32(&format!("{name}{part}.weight"), &[hidden], device);
            layers.push(Layer {
                input_norm: norm("input_layernorm")?,
                mixer: match kind {
                    LayerKind::GatedDeltaNet => {
                        let pool = recurrent.layer(gdn_layers.next().unwrap_or_default())?;
                        Mixer::Gdn(GatedDeltaNet::load(weights, &name, &config, &options, pool)?)
                    }
                    LayerKind::Attention => {
                        let pool = kv.layer(attention_layers.next().unwrap_or_default())?;
                        Mixer::Attention(GatedAttention::load(weights, &name, &config, pool, device)?)
                    }
                },
                post_norm: norm("post_attention_layernorm")?,
                mlp: Mlp::load(weights, &name, hidden, config.intermediate_size, device)?,
            });
        }
        Ok(Self {
            head: SharedHead::load(weights, prefix, &config, device)?,
            norm: weights.f32(&format!("{prefix}norm.weight"), &[hidden], device)?,
            layers,
            recurrent,
            kv,
            taps: Vec::new(),
            committed: vec![0; options.slots],
            epochs: vec![0; options.slots],
            pending: None,
            walked: None,
            passes: Mutex::new(recorded(&options)?),
            config,
            options,
        })
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Records passes from now on, or never again; counts start anew, and a verify pass that waits for its commit is forgotten.
    ///
    /// # Errors
    /// From the driver.
    pub fn set_graphs(&mut self, graphs: bool) -> Result<()> {
        self.options.graphs = graphs;
        (self.pending, self.walked) = (None, None);
        self.passes = Mutex::new(recorded(&self.options)?);
        Ok(())
    }

    /// A handle to the embedding table and the head.
    pub fn head(&self) -> SharedHead {
        self.head.clone()
    }

    /// The final norm of residual-stream rows `[N, hidden]`; the head's input.
    pub fn final_norm(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(hidden, &self.norm, self.config.rms_norm_eps as f32, NormKind::UnitOffset)?)
    }

    /// Copies of a slot's committed states: `layer{i}.state` `[Hv, Dv, Dk]` and `layer{i}.conv_state` `[3, C]` of
    /// Gated DeltaNet layers, `layer{i}.k` and `layer{i}.v` `[tokens, Hkv, D]` of attention layers.
    pub fn state_tensors(&self, slot: usize) -> Result<Vec<(String, Tensor)>> {
        self.check_slot(slot)?;
        let mut named = Vec::with_capacity(2 * self.layers.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let (first, second) = layer.save(slot, self.committed[slot])?;
            let (a, b) = match layer.mixer {
                Mixer::Gdn(_) => ("state", "conv_state"),
                Mixer::Attention(_) => ("k", "v"),
            };
            named.push((format!("layer{index}.{a}"), first));
            named.push((format!("layer{index}.{b}"), second));
        }
        Ok(named)
    }

    pub(super) fn check_slot(&self, slot: usize) -> Result<()> {
        if slot < self.options.slots {
            return Ok(());
        }
        let expected = format!("below the model's {} slots", self.options.slots);
        Err(Error::Request { field: "slot", expected, got: slot.to_string() })
    }

    pub(super) fn reset_slot(&mut self, slot: usize) -> Result<()> {
        self.check_slot(slot)?;
        for layer in &self.layers {
            if let Mixer::Gdn(mixer) = &layer.mixer {
                mixer.pool.reset(slot)?;
            }
        }
        self.set_committed(slot, 0);
        Ok(())
    }

    pub(super) fn set_committed(&mut self, slot: usize, committed: usize) {
        self.committed[slot] = committed;
        self.epochs[slot] += 1;
    }

    pub(super) fn save_slot(&self, slot: usize) -> Result<crate::target::Snapshot> {
        self.check_slot(slot)?;
        let committed = self.committed[slot];
        let layers =
            self.layers.iter().map(|layer| layer.save(slot, committed)).collect::<Result<Vec<_>>>()?;
        let bytes = crate::target::tensor_bytes(&layers);
        Ok(crate::target::Snapshot::new(Saved { committed, layers }, bytes))
    }

    pub(super) fn load_slot(&mut self, slot: usize, snapshot: &crate::target::Snapshot) -> Result<()> {
        self.check_slot(slot)?;
        let saved = snapshot.get::<Saved>().filter(|saved| self.fits(saved));
        let saved = saved.ok_or_else(|| {
            let expected = "a snapshot of a model of this shape, within the context".into();
            Error::Request { field: "snapshot", expected, got: "another".into() }
        })?;
        for (layer, state) in self.layers.iter().zip(&saved.layers) {
            match &layer.mixer {
                Mixer::Gdn(mixer) => mixer.pool.load(slot, state)?,
                Mixer::Attention(mixer) => mixer.pool.load(slot, state)?,
            }
        }
        self.set_committed(slot, saved.committed);
        Ok(())
    }

    fn fits(&self, saved: &Saved) -> bool {
        let (gdn, attn) = (self.config.gdn, self.config.attn);
        let state = ([gdn.v_heads, gdn.dv, gdn.dk], [ConvDims::STATE_ROWS, gdn.qkv_width()]);
        let rows = [saved.committed, attn.kv_heads, attn.head_dim];
        let fits = |layer: &Layer, (first, second): &(Tensor, Tensor)| match layer.mixer {
            Mixer::Gdn(_) => first.dims() == state.0 && second.dims() == state.1,
            Mixer::Attention(_) => first.dims() == rows && second.dims() == rows,
        };
        saved.committed <= self.options.context_len
            && saved.layers.len() == self.layers.len()
            && self.layers.iter().zip(&saved.layers).all(|(layer, state)| fits(layer, state))
    }
}

impl Layer {
    fn save(&self, slot: usize, committed: usize) -> Result<(Tensor, Tensor)> {
        match &self.mixer {
            Mixer::Gdn(mixer) => mixer.pool.save(slot),
            Mixer::Attention(mixer) => mixer.pool.save(slot, committed),
        }
    }

    /// The mixer over the rows of a prefill pass.
    pub(super) fn read_mixer(&self, chunks: &Chunks, x: &Tensor) -> Result<Tensor> {
        match &self.mixer {
            Mixer::Gdn(mixer) => mixer.read(chunks, x),
            Mixer::Attention(mixer) => mixer.read(chunks, x),
        }
    }

    pub(super) fn verify_mixer(
        &self,
        round: &Round<'_>,
        variant: Variant,
        x: &Tensor,
    ) -> Result<(Tensor, Option<super::gated_delta_net::Tape>)> {
        match &self.mixer {
            Mixer::Gdn(mixer) => mixer.verify(round, variant, x).map(|(out, tape)| (out, Some(tape))),
            Mixer::Attention(mixer) => Ok((mixer.verify(round, x)?, None)),
        }
    }
}

fn recorded(options: &ModelOptions) -> Result<Passes<Pass>> {
    if options.graphs { Ok(Passes::recorded(&options.device, RECORDINGS)?) } else { Ok(Passes::plain()) }
}

/// What a mutex holds; a pass that panicked has left nothing half done in it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check_options(options: &ModelOptions) -> Result<()> {
    for (key, value) in [("slots", options.slots), ("context_len", options.context_len)] {
        if value == 0 {
            let message = "expected at least 1, got 0".into();
            return Err(Error::Config { what: "model options".into(), key: key.into(), message });
        }
    }
    Ok(())
}
