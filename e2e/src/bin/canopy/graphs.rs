//! `canopy graphs`: whether passes that run as CUDA graphs give the bits of the same passes launched kernel by kernel.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use canopy_candle::{PassCounts, TreeDraft, top_tokens};
use canopy_e2e::draft::{DFlash, DraftRequest, Drafter};
use canopy_e2e::loader::{LoadOptions, load_drafter, load_target, resolve, resolve_drafter};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{DraftedTokens, DraftedTrees, LogitRows, Target, VerifyStream};
use canopy_e2e::tree::{BuildOptions, Marginals, ddtree_from};
use canopy_kernels::DraftTree;

use crate::engine_args::{EngineArgs, report_passes};

const EXAMPLE: &str = "\
Rounds of one and several streams, of single rows, chains and trees of changing shapes, with their commits, and the drafter's blocks, over short
contexts and longer ones, run twice from the same start: kernel by kernel and as graphs. Logits, features and the states at the end are compared bit by bit; any difference fails
the run. So does one between trees of a draft that are built on the host and where the draft is. Columns of the second part: milliseconds a round (verify, best tokens read, commit) and of it in the host's calls of verify and
commit, kernel by kernel and as graphs.

Examples:
  canopy graphs --device cuda
  canopy graphs --model ./Qwen3.5-9B --random-weights 1 --device cuda --context 4096";

/// Compares CUDA graphs with the launches that they record
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// Rounds of every kind
    #[arg(long, default_value = "6", value_name = "N")]
    rounds: NonZeroUsize,
    /// Timed rounds of every kind
    #[arg(long, default_value = "20", value_name = "N")]
    repeats: NonZeroUsize,
}

/// Slots that the streams of a round are spread over.
const SLOTS: usize = 4;
/// Tokens that every slot gets half way, at most, and in one round.
const MOST_LENGTHENED: usize = 1024;
const LENGTHENED_BY: usize = 64;
/// Budgets of trees that are built on the host and where the draft is.
const BUDGETS: [usize; 2] = [16, 63];
/// Rounds before the first timed one.
const WARM_UP: usize = 3;

/// A kind of round: its name, and its trees in the given round.
type Kind = (&'static str, fn(u64) -> canopy_kernels::Result<Vec<DraftTree>>);

const KINDS: [Kind; 6] = [
    ("one row", |_| Ok(vec![DraftTree::chain(1)?])),
    ("chain of 16", |_| Ok(vec![DraftTree::chain(16)?])),
    ("tree of 33", |round| Ok(vec![DraftTree::random(33, round % 3)?])),
    ("tree of 64", |round| Ok(vec![DraftTree::bole(64, round % 2)?])),
    ("four rows", |_| (0..4).map(|_| DraftTree::chain(1)).collect()),
    ("row, tree, chain", |round| {
        Ok(vec![DraftTree::chain(1)?, DraftTree::bole(20, round % 2)?, DraftTree::chain(16)?])
    }),
];

pub fn run(args: Args) -> Result<()> {
    // Why a pass could not be recorded is a warning.
    _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::WARN)
        .try_init();
    args.engine.pool()?.install(|| compare(&args))
}

fn compare(args: &Args) -> Result<()> {
    let options = LoadOptions { slots: SLOTS, graphs: true, ..args.engine.options() };
    let mut target = load_target(&resolve(&options.target, options.offline)?, &options)?;
    let drafter = match resolve_drafter(&options)? {
        Some(files) => Some(load_drafter(&files, &mut target, &options)?),
        None => None,
    };
    let mut pair = Pair { target, drafter };
    let (plain, plain_times) = pair.play(args, false)?;
    let (recorded, times) = pair.play(args, true)?;
    let counts = pair.counts();
    for ((kind, _), (plain, recorded)) in KINDS.iter().zip(plain_times.iter().zip(&times)) {
        canopy_e2e::say!(
            "{kind:18} {:8.3} ms (host {:.3})  graphs {:8.3} ms (host {:.3})",
            plain.0,
            plain.1,
            recorded.0,
            recorded.1
        );
    }
    report_passes(counts);
    let differ: Vec<_> = plain.iter().zip(&recorded).filter(|(a, b)| a != b).collect();
    for (a, _) in differ.iter().take(20) {
        canopy_e2e::say!("differs: {}", a.0);
    }
    ensure!(plain.len() == recorded.len(), "{} tensors against {}", plain.len(), recorded.len());
    ensure!(
        differ.is_empty(),
        "{} of {} tensors differ between graphs and launches",
        differ.len(),
        plain.len()
    );
    canopy_e2e::say!("{} tensors equal bit by bit", plain.len());
    ensure!(args.engine.device == "cpu" || counts.replayed > 0, "no pass ran as a graph");
    Ok(())
}

struct Pair {
    target: Qwen35,
    drafter: Option<DFlash>,
}

/// What a run showed: names and hashes of tensors.
type Trace = Vec<(String, u64)>;

impl Pair {
    fn counts(&self) -> PassCounts {
        let mut counts = self.target.pass_counts();
        if let Some(drafter) = &self.drafter {
            counts += drafter.pass_counts();
        }
        counts
    }

    /// All rounds from empty slots, then the timed ones: milliseconds a round and in the host's calls, of every kind.
    fn play(&mut self, args: &Args, graphs: bool) -> Result<(Trace, Vec<(f64, f64)>)> {
        self.target.set_graphs(graphs)?;
        if let Some(drafter) = &mut self.drafter {
            drafter.set_graphs(graphs)?;
        }
        let mut trace = Trace::new();
        for slot in 0..SLOTS {
            self.target.reset(slot)?;
            if let Some(drafter) = &mut self.drafter {
                drafter.reset(slot)?;
            }
            self.round(&[slot], vec![DraftTree::chain(40 + slot)?], 0, &mut trace)?;
        }
        for round in 0..args.rounds.get() as u64 {
            if round == args.rounds.get() as u64 / 2 {
                self.lengthen(&mut trace)?;
            }
            for (kind, (name, trees)) in KINDS.iter().enumerate() {
                let trees = trees(round)?;
                let first = round as usize + kind;
                let slots: Vec<usize> = (0..trees.len()).map(|stream| (first + stream) % SLOTS).collect();
                let seen = trace.len();
                self.round(&slots, trees, round * 8 + kind as u64, &mut trace)?;
                trace[seen..]
                    .iter_mut()
                    .for_each(|(what, _)| *what = format!("{name}, round {round}: {what}"));
            }
        }
        if args.engine.device != "cpu" {
            for (slot, root) in (0..SLOTS).flat_map(|slot| (7..11).map(move |root| (slot, root))) {
                self.build(slot, root)?;
            }
        }
        for slot in 0..SLOTS {
            for (name, state) in self.target.state_tensors(slot)? {
                trace.push((format!("slot {slot}: {name}"), hash(&state)?));
            }
        }
        let timed = KINDS.iter().map(|(_, trees)| self.time(trees(0)?, args.repeats.get()));
        let times = timed.collect::<Result<Vec<_>>>()?;
        Ok((trace, times))
    }

    /// Commits a quarter of the context to every slot: recordings run over any lengths.
    fn lengthen(&mut self, trace: &mut Trace) -> Result<()> {
        let tokens = (self.target.context_len() / 4).min(MOST_LENGTHENED);
        for slot in 0..SLOTS {
            for chunk in 0..tokens / LENGTHENED_BY {
                // Half of a path is committed.
                self.round(&[slot], vec![DraftTree::chain(2 * LENGTHENED_BY)?], chunk as u64, trace)?;
            }
        }
        Ok(())
    }

    /// A draft, a verify pass of other trees, and a commit of half of each tree's deepest path.
    fn round(&mut self, slots: &[usize], trees: Vec<DraftTree>, seed: u64, trace: &mut Trace) -> Result<()> {
        let drafted: Vec<_> = slots.iter().filter(|&&slot| self.target.committed(slot) > 0).collect();
        if let (Some(drafter), false) = (&mut self.drafter, drafted.is_empty()) {
            let horizon = drafter.block_size() - 1;
            let root =
                |&&slot: &&usize| DraftRequest { slot, root: 7 + slot as u32 + seed as u32 % 91, horizon };
            for logits in drafter.draft(&drafted.iter().map(root).collect::<Vec<_>>())? {
                trace.push(("drafter's logits".into(), hash(&logits)?));
            }
        }
        let streams = streams(&self.target, slots, trees, seed);
        let verified = self.target.verify(&streams)?;
        trace.push(("logits".into(), hash(verified.logits.as_ref().context("no logits")?)?));
        let paths: Vec<Vec<usize>> = streams.iter().map(|stream| half_of_deepest(&stream.tree)).collect();
        self.target.commit(&paths)?;
        let Some(features) = verified.features else { return Ok(()) };
        trace.push(("features".into(), hash(&features)?));
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        for ((stream, path), &first) in streams.iter().zip(&paths).zip(verified.batch.cu_nodes()) {
            let rows: Vec<u32> = path.iter().map(|&node| first as u32 + node as u32).collect();
            let rows = Tensor::new(rows, features.device())?;
            drafter.extend(stream.slot, &features.index_select(&rows, 0)?)?;
        }
        Ok(())
    }

    /// Verifies the trees of a draft, built on the host and where the draft is: the same logits and features bit by bit, or an error.
    fn build(&mut self, slot: usize, root: u32) -> Result<()> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let horizon = drafter.block_size() - 1;
        let logits = drafter.draft_packed(&[DraftRequest { slot, root, horizon }], horizon + 1, false)?;
        for budget in BUDGETS {
            let options = BuildOptions { budget, ..BuildOptions::default() };
            let tree = ddtree_from(&Marginals::from_tensor(&logits, options)?, root, options)?;
            let stream = |tokens, tree| VerifyStream { slot, tokens, tree, logits: LogitRows::All };
            let seen = self.target.verify(&[stream(tree.tokens().to_vec(), tree.tree().clone())])?;
            let drafted = DraftedTokens {
                best: top_tokens(&logits, budget)?,
                sources: vec![-1; budget + 1],
                trees: Some(DraftedTrees {
                    drafts: vec![Some(TreeDraft { first: 0, depths: horizon })],
                    nodes: vec![0; budget + 1],
                    stated: None,
                }),
            };
            let room = stream(vec![root; budget + 1], DraftTree::broom(budget + 1, horizon)?);
            let built = self.target.verify_drafted(&[room], &drafted)?;
            let pairs = [("logits", seen.logits, built.logits), ("features", seen.features, built.features)];
            for (what, seen, built) in pairs {
                let (Some(seen), Some(built)) = (seen, built) else { continue };
                let same = hash(&seen)? == hash(&built)?;
                ensure!(
                    same,
                    "slot {slot}, root {root}: {what} of {budget} nodes built where the draft is differ"
                );
            }
        }
        Ok(())
    }

    /// Median milliseconds of a round of the target, and of it in the host's calls.
    fn time(&mut self, trees: Vec<DraftTree>, repeats: usize) -> Result<(f64, f64)> {
        let slots: Vec<usize> = (0..trees.len()).collect();
        let (mut rounds, mut host) = (Vec::new(), Vec::new());
        for round in 0..repeats + WARM_UP {
            let streams = streams(&self.target, &slots, trees.clone(), round as u64);
            let started = Instant::now();
            let verified = self.target.verify(&streams)?;
            let launched = started.elapsed();
            top_tokens(&verified.logits.context("no logits")?.to_dtype(DType::F32)?, 1)?.to_vec2::<u32>()?;
            let read = Instant::now();
            self.target.commit(&vec![vec![0]; slots.len()])?;
            if round >= WARM_UP {
                rounds.push(started.elapsed().as_secs_f64());
                host.push((launched + read.elapsed()).as_secs_f64());
            }
        }
        let median = |mut seconds: Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            1e3 * seconds[seconds.len() / 2]
        };
        Ok((median(rounds), median(host)))
    }
}

fn streams(target: &Qwen35, slots: &[usize], trees: Vec<DraftTree>, seed: u64) -> Vec<VerifyStream> {
    let vocab = target.vocab_size() as u64;
    let token =
        |slot: usize, node: usize| ((node as u64 * 7919 + seed * 104_729 + slot as u64 * 31) % vocab) as u32;
    let stream = |(&slot, tree): (&usize, DraftTree)| {
        let tokens = (0..tree.len()).map(|node| token(slot, node)).collect();
        VerifyStream { slot, tokens, tree, logits: LogitRows::All }
    };
    slots.iter().zip(trees).map(stream).collect()
}

fn half_of_deepest(tree: &DraftTree) -> Vec<usize> {
    let deepest = (0..tree.len()).max_by_key(|&node| tree.depths()[node]).unwrap_or(0);
    let path = tree.path(deepest);
    path[..path.len().div_ceil(2)].to_vec()
}

/// A hash of a tensor's f32 bits.
fn hash(tensor: &Tensor) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    for value in tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()? {
        value.to_bits().hash(&mut hasher);
    }
    Ok(hasher.finish())
}
