//! `canopy logits`: a model's logits and states, files in and files out.

/// Writes a model's logits for token ids, and for a draft tree after them, to a safetensors file.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<()> {
    Ok(())
}
