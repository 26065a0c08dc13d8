//! `canopy sizes`: what a pair takes of memory, from its configurations.

use anyhow::Result;
use canopy_e2e::config::{DraftConfig, TargetConfig};
use canopy_e2e::loader::{LoadOptions, ModelSource, resolve, resolve_drafter};
use canopy_e2e::sizes::Sizes;

use crate::engine_args::Dtype;

const EXAMPLE: &str = "\
Weights, keys and values as on CUDA: bf16 unless --dtype says otherwise, drafts through int8. Not in it: what a pass itself needs (logits of its rows, scratch of the attention), and what the driver takes.

Example:
  canopy sizes --model e2e/models/qwen3.5-9b --drafter e2e/models/qwen3.5-9b/drafter --slots 1,4,16 --contexts 2048,32768";

/// Prints what a pair takes of memory, without loading it
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    /// `embedded`, a directory in Hugging Face layout, or owner/name on the hub
    #[arg(long, default_value = "embedded", value_name = "MODEL")]
    model: ModelSource,
    /// The drafter, named like the model
    #[arg(long, value_name = "MODEL")]
    drafter: Option<ModelSource>,
    /// How weights are kept
    #[arg(long, value_enum, default_value_t = Dtype::Stored)]
    dtype: Dtype,
    /// How the drafter's are, and the head's that drafts go through
    #[arg(long, value_enum, default_value_t = Dtype::Int8)]
    drafter_dtype: Dtype,
    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "1,4,16", value_name = "STREAMS")]
    slots: Vec<usize>,
    /// Tokens of every stream's context
    #[arg(long, value_delimiter = ',', default_value = "2048,8192,32768", value_name = "TOKENS")]
    contexts: Vec<usize>,
    /// Uses only what the hub's cache already holds
    #[arg(long)]
    offline: bool,
}

pub fn run(args: Args) -> Result<()> {
    let options = LoadOptions {
        target: args.model,
        drafter: args.drafter,
        offline: args.offline,
        ..LoadOptions::default()
    };
    let files = resolve(&options.target, options.offline)?;
    let what = files.path("config.json").display().to_string();
    let target = TargetConfig::from_json(&what, &files.require("config.json")?)?;
    let drafter = match resolve_drafter(&options)? {
        Some(files) => {
            let what = files.path("config.json").display().to_string();
            Some(DraftConfig::from_json(&what, &files.require("config.json")?, &target)?)
        }
        None => None,
    };
    let sizes = Sizes::new(&target, drafter.as_ref(), 2).kept(args.dtype.into(), args.drafter_dtype.into());
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    canopy_e2e::say!(
        "weights             {:10.3} GiB ({} parameters)",
        gib(sizes.target_weights()),
        sizes.target.count()
    );
    canopy_e2e::say!(
        "drafter             {:10.3} GiB ({} parameters)",
        gib(sizes.drafter_weights()),
        sizes.drafter.count()
    );
    canopy_e2e::say!("states of a slot    {:10.2} MiB", mib(sizes.state));
    canopy_e2e::say!(
        "1,000 tokens        {:10.2} MiB (target {:.2}, drafter {:.2})",
        mib(1000 * sizes.token()),
        mib(1000 * sizes.target_token),
        mib(1000 * sizes.drafter_token)
    );
    canopy_e2e::say!("logits of 64 rows   {:10.2} MiB", mib(64 * sizes.logits_row));
    for context in args.contexts {
        canopy_e2e::say!("a slot of {context:6} tokens {:7.1} MiB", mib(sizes.slot(context)));
        for &slots in &args.slots {
            canopy_e2e::say!(
                "{slots:3} slots of {context:6}   {:10.3} GiB with the weights",
                gib(sizes.weights() + slots * sizes.slot(context))
            );
        }
    }
    Ok(())
}
