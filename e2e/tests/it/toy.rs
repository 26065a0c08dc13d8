//! A toy target, drafter and vocabulary that implement the engine's traits in a few lines each.
//!
//! The target's logits are any function of the tokens before a position, computed per node from the slot's committed
//! tokens and the node's own root path. The drafter keeps the tokens that reach it as features, and refuses to draft
//! when they are not exactly the slot's committed tokens: a feature that is lost, doubled or out of order ends the test.

use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use canopy_e2e::draft::{DraftRequest, Drafter};
use canopy_e2e::engine::{Engine, EngineConfig, TextDecoder, TokenText};
use canopy_e2e::target::{LogitRows, Snapshot, Target, Verified, VerifyStream};
use canopy_e2e::{Error, Result};
use canopy_kernels::TreeBatch;

/// Logits after a history.
pub type Model = Arc<dyn Fn(&[u32]) -> Vec<f32> + Send + Sync>;
/// Logits of the drafter: history with the root, and the depth from 1.
pub type DraftModel = Arc<dyn Fn(&[u32], usize) -> Vec<f32> + Send + Sync>;

/// What happened inside the pair, for tests to look at.
#[derive(Default)]
pub struct Log {
    /// Committed tokens of every slot.
    pub committed: Vec<Vec<u32>>,
    /// Every non-empty committed path: slot and tokens.
    pub commits: Vec<(usize, Vec<u32>)>,
    /// Rows of every verify pass.
    pub passes: Vec<usize>,
    /// Draft requests drawn, one entry per call.
    pub drafts: Vec<usize>,
    /// Slots that were emptied.
    pub resets: Vec<usize>,
    /// When true, the next verify pass fails.
    pub fail_next_verify: bool,
}

pub type SharedLog = Arc<Mutex<Log>>;

pub struct ToyTarget {
    model: Model,
    vocab: usize,
    context: usize,
    log: SharedLog,
    last: Vec<VerifyStream>,
}

impl Target for ToyTarget {
    fn vocab_size(&self) -> usize {
        self.vocab
    }

    fn context_len(&self) -> usize {
        self.context
    }

    fn slots(&self) -> usize {
        self.log.lock().unwrap().committed.len()
    }

    fn committed(&self, slot: usize) -> usize {
        self.log.lock().unwrap().committed[slot].len()
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        let mut log = self.log.lock().unwrap();
        log.committed[slot].clear();
        log.resets.push(slot);
        Ok(())
    }

    fn set_taps(&mut self, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn verify(&mut self, streams: &[VerifyStream]) -> Result<Verified> {
        let mut log = self.log.lock().unwrap();
        if std::mem::take(&mut log.fail_next_verify) {
            return Err(Error::Round("the toy target was told to fail".into()));
        }
        let trees = streams.iter().map(|s| s.tree.clone()).collect();
        let slots = streams.iter().map(|s| s.slot as i32).collect();
        let (mut logits, mut logit_rows, mut features) = (Vec::new(), vec![0], Vec::new());
        for stream in streams {
            let committed = &log.committed[stream.slot];
            let deepest = committed.len() + stream.tree.max_depth();
            assert!(deepest < self.context, "a node at position {deepest} of a context of {}", self.context);
            let wanted = match stream.logits {
                LogitRows::None => 0..0,
                LogitRows::Last => stream.tree.len() - 1..stream.tree.len(),
                LogitRows::All => 0..stream.tree.len(),
            };
            for node in wanted.clone() {
                let path = stream.tree.path(node);
                let history = committed.iter().copied().chain(path.iter().map(|&n| stream.tokens[n]));
                logits.extend((self.model)(&history.collect::<Vec<_>>()));
            }
            logit_rows.push(logit_rows[logit_rows.len() - 1] + wanted.len());
            features.extend(stream.tokens.iter().map(|&token| token as f32));
        }
        log.passes.push(features.len());
        let (rows, count) = (features.len(), logit_rows[streams.len()]);
        let logits = match count {
            0 => None,
            _ => Some(Tensor::from_vec(logits, (count, self.vocab), &Device::Cpu)?),
        };
        let features = Some(Tensor::from_vec(features, (rows, 1), &Device::Cpu)?);
        self.last = streams.to_vec();
        Ok(Verified { batch: TreeBatch::new(trees, slots)?, logits, logit_rows, features })
    }

    fn commit(&mut self, paths: &[Vec<usize>]) -> Result<()> {
        let mut log = self.log.lock().unwrap();
        assert_eq!(paths.len(), self.last.len());
        for (stream, path) in self.last.drain(..).zip(paths) {
            for (entry, &node) in path.iter().enumerate() {
                assert_eq!(stream.tree.parent(node), entry.checked_sub(1).map(|e| path[e]));
            }
            let tokens: Vec<u32> = path.iter().map(|&node| stream.tokens[node]).collect();
            if !tokens.is_empty() {
                log.committed[stream.slot].extend(&tokens);
                log.commits.push((stream.slot, tokens));
            }
        }
        Ok(())
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        let tokens = self.log.lock().unwrap().committed[slot].clone();
        let bytes = 4 * tokens.len() + 1000;
        Ok(Snapshot::new(tokens, bytes))
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        let tokens = snapshot.get::<Vec<u32>>().unwrap();
        self.log.lock().unwrap().committed[slot].clone_from(tokens);
        Ok(())
    }
}

pub struct ToyDrafter {
    model: DraftModel,
    block_size: usize,
    context: Vec<Vec<u32>>,
    log: SharedLog,
}

impl Drafter for ToyDrafter {
    fn block_size(&self) -> usize {
        self.block_size
    }

    fn taps(&self) -> &[usize] {
        &[0]
    }

    fn context_len(&self, slot: usize) -> usize {
        self.context[slot].len()
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        self.context[slot].clear();
        Ok(())
    }

    fn extend(&mut self, slot: usize, features: &Tensor) -> Result<()> {
        let tokens = features.flatten_all()?.to_vec1::<f32>()?;
        self.context[slot].extend(tokens.iter().map(|&token| token as u32));
        Ok(())
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Tensor>> {
        let mut log = self.log.lock().unwrap();
        log.drafts.push(requests.len());
        requests
            .iter()
            .map(|request| {
                assert!((1..self.block_size).contains(&request.horizon), "horizon {}", request.horizon);
                let mut history = self.context[request.slot].clone();
                assert_eq!(history, log.committed[request.slot], "features of slot {}", request.slot);
                history.push(request.root);
                let rows: Vec<f32> =
                    (1..=request.horizon).flat_map(|depth| (self.model)(&history, depth)).collect();
                let vocab = rows.len() / request.horizon;
                Ok(Tensor::from_vec(rows, (request.horizon, vocab), &Device::Cpu)?)
            })
            .collect()
    }

    fn snapshot(&self, slot: usize) -> Result<Snapshot> {
        let tokens = self.context[slot].clone();
        let bytes = 4 * tokens.len();
        Ok(Snapshot::new(tokens, bytes))
    }

    fn restore(&mut self, slot: usize, snapshot: &Snapshot) -> Result<()> {
        self.context[slot].clone_from(snapshot.get::<Vec<u32>>().unwrap());
        Ok(())
    }
}

/// Token ids as byte strings; a decoder gives whole characters.
pub struct ToyText {
    pub pieces: Vec<Vec<u8>>,
    pub stop_tokens: Vec<u32>,
}

struct ToyDecoder {
    text: Arc<ToyText>,
    open: Vec<u8>,
}

impl TokenText for ToyText {
    fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    fn decoder(self: Arc<Self>) -> Box<dyn TextDecoder> {
        Box::new(ToyDecoder { text: self, open: Vec::new() })
    }
}

impl TextDecoder for ToyDecoder {
    fn push(&mut self, token: u32) -> String {
        self.open.extend(&self.text.pieces[token as usize]);
        let whole = match std::str::from_utf8(&self.open) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let rest = self.open.split_off(whole);
        String::from_utf8(std::mem::replace(&mut self.open, rest)).unwrap()
    }

    fn finish(&mut self) -> String {
        // As the tokenizer's own decoder: a character that was cut short is dropped.
        self.open.clear();
        String::new()
    }
}

/// Everything a toy engine is made of.
pub struct Toy {
    pub model: Model,
    pub draft_model: DraftModel,
    pub text: ToyText,
    pub slots: usize,
    pub context: usize,
    pub block_size: usize,
    pub config: EngineConfig,
}

impl Toy {
    /// Tokens `a, b, c, ...` without a stop token, one slot, block 8, a target that hashes the last two tokens, and a
    /// drafter that knows it up to some noise.
    pub fn new(vocab: usize) -> Self {
        let model: Model = Arc::new(move |history| hashed(history, vocab));
        let target = model.clone();
        // Follows the target's argmax, wrong about every third time, more often at depth.
        let draft_model: DraftModel = Arc::new(move |history, depth| {
            let mut history = history.to_vec();
            let mut logits = target(&history);
            for _ in 1..depth {
                history.push(best(&logits));
                logits = target(&history);
            }
            let mut noise = hash(&history, depth as u64 + 77);
            for logit in &mut logits {
                noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *logit += 1.5 * ((noise >> 40) as f32 / (1u64 << 24) as f32 - 0.5);
            }
            logits
        });
        let pieces = (0..vocab).map(|id| vec![b'a' + id as u8]).collect();
        let text = ToyText { pieces, stop_tokens: Vec::new() };
        Self {
            model,
            draft_model,
            text,
            slots: 1,
            context: 256,
            block_size: 8,
            config: EngineConfig::default(),
        }
    }

    /// A target that continues `script` from its first position on whatever it is given, then repeats token 0, with a
    /// drafter that knows the script. Prompts must be one token long.
    pub fn scripted(pieces: &[&[u8]], script: &[u32]) -> Self {
        let (script, vocab) = (script.to_vec(), pieces.len());
        let at = move |position: usize| {
            let mut logits: Vec<f32> = (0..vocab).map(|id| id as f32 * 0.01).collect();
            logits[script.get(position - 1).copied().unwrap_or(0) as usize] = 9.0;
            logits
        };
        let draft = at.clone();
        let mut toy = Self::new(vocab);
        toy.model = Arc::new(move |history| at(history.len()));
        toy.draft_model = Arc::new(move |history, depth| draft(history.len() + depth - 1));
        toy.text.pieces = pieces.iter().map(|piece| piece.to_vec()).collect();
        toy
    }

    pub fn engine(self) -> (Engine, SharedLog) {
        self.try_engine().unwrap()
    }

    pub fn try_engine(self) -> Result<(Engine, SharedLog)> {
        let log: SharedLog = Arc::default();
        log.lock().unwrap().committed = vec![Vec::new(); self.slots];
        let vocab = self.text.pieces.len();
        let target =
            ToyTarget { model: self.model, vocab, context: self.context, log: log.clone(), last: Vec::new() };
        let context = vec![Vec::new(); self.slots];
        let drafter =
            ToyDrafter { model: self.draft_model, block_size: self.block_size, context, log: log.clone() };
        let engine =
            Engine::with_text(Box::new(target), Some(Box::new(drafter)), Arc::new(self.text), self.config)?;
        // What the calibration did is of no interest.
        let mut seen = log.lock().unwrap();
        assert!(seen.committed.iter().all(Vec::is_empty), "the calibration left tokens behind");
        (seen.commits, seen.passes, seen.drafts, seen.resets) = Default::default();
        drop(seen);
        Ok((engine, log))
    }
}

fn hash(history: &[u32], salt: u64) -> u64 {
    let mut hash = 0x9E37_79B9_7F4A_7C15u64 ^ salt;
    for &token in &history[history.len().saturating_sub(2)..] {
        hash =
            (hash ^ u64::from(token).wrapping_add(0xD6E8_FEB8_6659_FD93)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        hash ^= hash >> 32;
    }
    hash
}

/// Logits in [0, 2) from the last two tokens.
pub fn hashed(history: &[u32], vocab: usize) -> Vec<f32> {
    (0..vocab as u64).map(|id| (hash(history, id * 0x1234_5677) >> 40) as f32 / (1u64 << 23) as f32).collect()
}

/// The argmax, ties to the lower id.
pub fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap() as u32
}
