//! `canopy goldens`: the stored vectors of torch and transformers against this build on any device.
//!
//! What a device has no kernel for (the random models' small heads on CUDA) is told as not run; the embedded pair's vectors
//! must run everywhere.

mod report;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use canopy_e2e::draft::{DFlash, DraftRequest, Drafter};
use canopy_e2e::embedded;
use canopy_e2e::files::ModelFiles;
use canopy_e2e::loader::{LoadOptions, RowPrecision, WeightDtype, load_drafter, load_target};
use canopy_e2e::model::Qwen35;
use canopy_e2e::target::{LogitRows, Target, VerifyStream};
use canopy_kernels::DraftTree;
use serde_json::{Value, json};

use self::report::{Golden, Report, floats, get, ids};
use crate::engine_args::Rows;
use crate::record;

const EXAMPLE: &str = "\
A line per set: largest absolute difference, relative distance |got - golden| / |golden|, its bound, and for rows of logits how many best tokens
differ (and by how much the golden's two best were apart there at most). Bounds: 1e-4 on the CPU; on CUDA, where keys and values are bf16, 4e-3
with --rows f32 and 1.2e-2 with --rows bf16.

Examples:
  canopy goldens e2e/tests/golden
  canopy goldens e2e/tests/golden --device cuda --rows bf16 --json goldens.jsonl";

/// Compares the stored vectors of other implementations
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    /// The directory of the golden sets
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// `cpu`, `cuda` or `cuda:N`
    #[arg(long, default_value = "cpu")]
    device: String,
    /// What rows are rounded to before products and the delta rule on CUDA; the CPU takes them in f32
    #[arg(long, value_enum, default_value_t = Rows::F32)]
    rows: Rows,
    /// Appends one JSON line a set
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<()> {
    canopy_e2e::threads::pool(None)?.install(|| goldens(&args))
}

fn goldens(args: &Args) -> Result<()> {
    let bound = match (args.device.as_str(), args.rows) {
        ("cpu", _) => 1e-4,
        (_, Rows::F32) => 4e-3,
        (_, Rows::Bf16) => 1.2e-2,
    };
    let mut failed = Vec::new();
    for (name, set) in SETS {
        let found = set(&Place { args });
        let line = match &found {
            Ok(report) => {
                if report.relative > bound {
                    failed.push(*name);
                }
                report.line(bound)
            }
            Err(error)
                if format!("{error:#}").contains("no kernel for") && !name.starts_with("canopy-tiny") =>
            {
                let message = format!("{error:#}");
                format!("not run: {}", message.lines().next().unwrap_or_default())
            }
            Err(error) => {
                failed.push(*name);
                format!("FAILED: {error:#}")
            }
        };
        canopy_e2e::say!("{name:<28} {line}");
        if let Some(path) = &args.json {
            let line = json(args, name, found.as_ref().ok(), &line, bound);
            let written = record::open(path).and_then(|mut file| writeln!(file, "{line}"));
            written.with_context(|| path.display().to_string())?;
        }
    }
    ensure!(failed.is_empty(), "outside their bounds: {}", failed.join(", "));
    Ok(())
}

fn json(args: &Args, name: &str, report: Option<&Report>, line: &str, bound: f64) -> Value {
    let (commit, dirty) = record::commit();
    json!({
        "schema": 1,
        "case": "e2e.golden",
        "set": name,
        "device": args.device,
        "rows": format!("{:?}", args.rows),
        "max_abs": report.map(|report| report.largest),
        "relative_distance": report.map(|report| report.relative),
        "bound": bound,
        "logit_rows": report.map(|report| report.rows),
        "other_best": report.map(|report| report.others),
        "widest_tie": report.map(|report| report.widest),
        "line": line,
        "machine": record::machine(),
        "commit": commit,
        "dirty": dirty,
        "time": record::unix_time(),
        "command": record::command(),
    })
}

type Set = fn(&Place<'_>) -> Result<Report>;
const SETS: &[(&str, Set)] = &[
    ("canopy-tiny logits", tiny_logits),
    ("canopy-tiny greedy texts", tiny_texts),
    ("canopy-tiny draft", golden_draft),
    ("canopy-tiny shipped draft", shipped_draft),
    ("qwen35-random logits", random_logits),
    ("qwen35-random rounds", random_rounds),
    ("dflash-random-old drafts", |place| drafts(place, "dflash-random-old")),
    ("dflash-random-new drafts", |place| drafts(place, "dflash-random-new")),
    ("rounds-random chain", |place| whole_rounds(place, "chain")),
    ("rounds-random tree", |place| whole_rounds(place, "tree")),
];

const SLOT: usize = 0;

struct Place<'a> {
    args: &'a Args,
}

impl Place<'_> {
    fn golden(&self, file: &str) -> Result<Golden> {
        let path = self.args.dir.join(file);
        candle_core::safetensors::load(&path, &Device::Cpu).with_context(|| path.display().to_string())
    }

    fn options(&self, context: usize) -> LoadOptions {
        LoadOptions {
            slots: 1,
            drafter_dtype: Some(WeightDtype::Stored),
            context_len: Some(context),
            device: self.args.device.clone(),
            rows: RowPrecision::from(self.args.rows),
            ..LoadOptions::default()
        }
    }

    fn device(&self) -> Result<Device> {
        Ok(canopy_e2e::device::parse(&self.args.device)?)
    }

    fn target(&self, files: &ModelFiles) -> Result<Qwen35> {
        Ok(load_target(files, &self.options(512))?)
    }

    fn random(&self) -> ModelFiles {
        self.directory("qwen35-random")
    }

    fn directory(&self, set: &str) -> ModelFiles {
        let dir: &Path = &self.args.dir;
        ModelFiles::Directory(dir.join(set))
    }

    fn pair(&self, target: &ModelFiles, drafter: &ModelFiles) -> Result<(Qwen35, DFlash)> {
        let mut target = self.target(target)?;
        let drafter = load_drafter(drafter, &mut target, &self.options(512))?;
        Ok((target, drafter))
    }
}

fn verify(target: &mut Qwen35, tokens: &[u32], tree: DraftTree) -> Result<(Tensor, Option<Tensor>)> {
    let stream = VerifyStream { slot: SLOT, tokens: tokens.to_vec(), tree, logits: LogitRows::All };
    let verified = target.verify(&[stream])?;
    Ok((verified.logits.context("the target returned no logits")?, verified.features))
}

/// Commits `tokens`; logits of all of them, and features.
fn read(target: &mut Qwen35, tokens: &[u32]) -> Result<(Tensor, Option<Tensor>)> {
    let verified = verify(target, tokens, DraftTree::chain(tokens.len())?)?;
    target.commit(&[(0..tokens.len()).collect()])?;
    Ok(verified)
}

fn tiny_logits(place: &Place<'_>) -> Result<Report> {
    let golden = place.golden("canopy-tiny/golden.safetensors")?;
    let (mut target, mut report) = (place.target(&embedded::target())?, Report::default());
    for prompt in 0..5 {
        target.reset(SLOT)?;
        let tokens: Vec<u32> = ids(&golden, &format!("p{prompt}.ids"))?;
        let (logits, _) = read(&mut target, &tokens)?;
        match golden.get(&format!("p{prompt}.logits")) {
            Some(want) => report.compare_logits(&logits, want)?,
            None => {
                let last = logits.narrow(0, tokens.len() - 4, 4)?;
                report.compare_logits(&last, get(&golden, &format!("p{prompt}.logits_last4"))?)?;
            }
        }
    }
    Ok(report)
}

/// Greedy texts, each up to where it leaves the stored one; a leap over a clear margin is an error.
fn tiny_texts(place: &Place<'_>) -> Result<Report> {
    const NEAR_TIE: f32 = 0.1;
    let golden = place.golden("canopy-tiny/golden.safetensors")?;
    let (mut target, mut report) = (place.target(&embedded::target())?, Report::default());
    for prompt in 0..5 {
        target.reset(SLOT)?;
        let stored: Vec<u32> = ids(&golden, &format!("p{prompt}.greedy"))?;
        let margins = floats(get(&golden, &format!("p{prompt}.greedy_margin"))?)?;
        let mut tokens: Vec<u32> = ids(&golden, &format!("p{prompt}.ids"))?;
        for (&token, &margin) in stored.iter().zip(&margins) {
            let (logits, _) = read(&mut target, &tokens)?;
            let row = floats(&logits.get(logits.dim(0)? - 1)?)?;
            let own = canopy_e2e::sampling::argmax(&row).context("a row that is not finite")?.0;
            report.rows += 1;
            if own != token {
                report.others += 1;
                report.widest = report.widest.max(f64::from(margin));
                ensure!(
                    margin < NEAR_TIE,
                    "prompt {prompt}: expected token {token}, ahead by {margin}, got {own}"
                );
                break;
            }
            tokens = vec![token];
        }
    }
    Ok(report)
}

/// The drafter that the set was made with, kept beside it.
fn golden_draft(place: &Place<'_>) -> Result<Report> {
    tiny_draft(place, &place.directory("dflash-tiny"), "canopy-tiny/golden.safetensors")
}

fn shipped_draft(place: &Place<'_>) -> Result<Report> {
    tiny_draft(place, &embedded::drafter(), "canopy-tiny/shipped-draft.safetensors")
}

fn tiny_draft(place: &Place<'_>, files: &ModelFiles, golden: &str) -> Result<Report> {
    let golden = place.golden(golden)?;
    let (_, mut drafter) = place.pair(&embedded::target(), files)?;
    let anchor = ids::<usize>(&golden, "draft.anchor")?[0];
    let root = ids::<u32>(&golden, "draft.ids")?[anchor];
    let features = get(&golden, "draft.features")?.to_device(&place.device()?)?;
    drafter.extend(SLOT, &features)?;
    let horizon = drafter.block_size() - 1;
    let logits = drafter.draft(&[DraftRequest { slot: SLOT, root, horizon }])?.remove(0);
    let mut report = Report::default();
    report.compare_logits(&logits, &get(&golden, "draft.logits")?.narrow(0, 1, horizon)?)?;
    Ok(report)
}

fn random_logits(place: &Place<'_>) -> Result<Report> {
    let golden = place.golden("qwen35-random/reference.safetensors")?;
    let mut report = Report::default();
    let (logits, _) = read(&mut place.target(&place.random())?, &ids::<u32>(&golden, "input_ids")?)?;
    report.compare_logits(&logits, &get(&golden, "logits")?.squeeze(0)?)?;
    let tree = DraftTree::new(ids(&golden, "tree_parents")?)?;
    let (logits, _) =
        verify(&mut place.target(&place.random())?, &ids::<u32>(&golden, "tree_tokens")?, tree)?;
    report.compare_logits(&logits, get(&golden, "tree_logits")?)?;
    Ok(report)
}

fn random_rounds(place: &Place<'_>) -> Result<Report> {
    let golden = place.golden("qwen35-random/spec_rounds.safetensors")?;
    let (mut target, mut report) = (place.target(&place.random())?, Report::default());
    read(&mut target, &ids::<u32>(&golden, "prompt")?)?;
    for round in 0..3 {
        let tree = DraftTree::new(ids(&golden, &format!("r{round}_parents"))?)?;
        let (logits, _) = verify(&mut target, &ids::<u32>(&golden, &format!("r{round}_tokens"))?, tree)?;
        report.compare_logits(&logits, get(&golden, &format!("r{round}_logits"))?)?;
        target.commit(&[ids(&golden, &format!("r{round}_path"))?])?;
    }
    report.compare_states(&target, &golden, "final_")?;
    Ok(report)
}

/// Four drafts in a row from stored tap outputs.
fn drafts(place: &Place<'_>, set: &str) -> Result<Report> {
    let golden = place.golden(&format!("{set}/reference.safetensors"))?;
    let (_, mut drafter) = place.pair(&place.random(), &place.directory(set))?;
    let mut report = Report::default();
    for round in 0..4 {
        let name = |part: &str| format!("r{round}_{part}");
        let taps = get(&golden, &name("tap_hidden"))?.transpose(0, 1)?.contiguous()?.flatten_from(1)?;
        let taps = taps.to_device(&place.device()?)?;
        report.compare(&drafter.context_features(&taps)?, get(&golden, &name("ctx_features"))?)?;
        drafter.extend(SLOT, &taps)?;
        let block: Vec<u32> = ids(&golden, &name("block_ids"))?;
        let request = DraftRequest { slot: SLOT, root: block[0], horizon: block.len() - 1 };
        let logits = drafter.draft(&[request])?.remove(0);
        report.compare_logits(&logits, get(&golden, &name("logits"))?)?;
    }
    for (layer, (keys, values)) in drafter.context_tensors(SLOT)?.iter().enumerate() {
        report.compare(keys, get(&golden, &format!("final_layer{layer}_k"))?)?;
        report.compare(values, get(&golden, &format!("final_layer{layer}_v"))?)?;
    }
    Ok(report)
}

/// Six whole rounds of a pair: every draft, every verified tree, and the state after them.
fn whole_rounds(place: &Place<'_>, kind: &str) -> Result<Report> {
    let golden = place.golden(&format!("rounds-random/{kind}.safetensors"))?;
    let (mut target, mut drafter) = place.pair(&place.random(), &place.directory("dflash-random-new"))?;
    let mut report = Report::default();
    let (_, features) = read(&mut target, &ids::<u32>(&golden, "prompt")?)?;
    drafter.extend(SLOT, &features.context("the target returned no features")?)?;
    for round in 0..6 {
        let name = |part: &str| format!("r{round}_{part}");
        let root = ids::<u32>(&golden, &name("anchor"))?[0];
        let want = get(&golden, &name("draft_logits"))?;
        let request = DraftRequest { slot: SLOT, root, horizon: want.dim(0)? };
        report.compare_logits(&drafter.draft(&[request])?.remove(0), want)?;
        let tree = DraftTree::new(ids(&golden, &name("parents"))?)?;
        let (logits, features) = verify(&mut target, &ids::<u32>(&golden, &name("tokens"))?, tree)?;
        report.compare_logits(&logits, get(&golden, &name("target_logits"))?)?;
        let path: Vec<usize> = ids(&golden, &name("path"))?;
        let features = features.context("the target returned no features")?;
        let rows: Vec<u32> = path.iter().map(|&node| node as u32).collect();
        drafter.extend(SLOT, &features.index_select(&Tensor::new(rows, features.device())?, 0)?)?;
        target.commit(&[path])?;
    }
    report.compare_states(&target, &golden, "final_")?;
    Ok(report)
}
