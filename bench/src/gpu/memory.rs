//! `canopy-bench memory`: what verify leaves for commit, allocated both ways and read off the device's free memory.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cudarc::driver::{CudaStream, result};
use serde_json::json;

use super::{gdn, timer};
use crate::lines::Lines;

/// What to allocate.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  canopy-bench memory --nodes 128 --batch 1,16 --json memory.jsonl")]
pub struct MemoryArgs {
    /// Nodes of every tree
    #[arg(long, default_value_t = 128)]
    nodes: usize,
    /// Sequences of a batch
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    batch: Vec<usize>,
    /// Layers, all of which hold theirs until the path is accepted
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Appends one JSON line a way and batch size to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Bytes that the device's free memory falls by while `layers` times these buffers are allocated.
fn measured(stream: &Arc<CudaStream>, buffers: &[usize], layers: usize) -> Result<usize> {
    stream.context().bind_to_thread()?;
    let (before, _) = result::mem_get_info()?;
    let mut held = Vec::new();
    let mut outcome = Ok(());
    for _ in 0..layers {
        for &bytes in buffers {
            // SAFETY: nothing reads the memory.
            match unsafe { result::malloc_sync(bytes) } {
                Ok(pointer) => held.push(pointer),
                Err(error) => outcome = Err(error),
            }
        }
    }
    let (after, _) = result::mem_get_info()?;
    for pointer in held {
        // SAFETY: allocated above, freed once.
        unsafe { result::free_sync(pointer) }?;
    }
    outcome.with_context(|| format!("{layers} layers of {buffers:?} bytes"))?;
    ensure!(before >= after, "the device's free memory grew meanwhile");
    Ok(before - after)
}

/// Measures both ways and prints a line each; rows go to `--json`.
///
/// # Errors
/// From the driver, out of memory included.
pub fn run(args: &MemoryArgs) -> Result<()> {
    let stream = timer::stream().context("a CUDA device")?;
    let (dims, mut lines) = (gdn::dims()?, Lines::open(args.json.as_deref())?);
    canopy_e2e::say!(
        "{:>10} {:>6} {:>14} {:>14} {:>16}",
        "way",
        "batch",
        "needed bytes",
        "one layer",
        "all layers"
    );
    for &batch in &args.batch {
        let rows = batch * args.nodes;
        let tape = vec![4 * rows * dims.v_heads * dims.dv, 4 * rows * dims.v_heads];
        for (way, buffers) in [("tape", tape), ("snapshots", vec![4 * rows * dims.state_len()])] {
            let (needed, one) = (buffers.iter().sum::<usize>(), measured(&stream, &buffers, 1)?);
            let all = measured(&stream, &buffers, args.layers)?;
            canopy_e2e::say!("{way:>10} {batch:>6} {needed:>14} {one:>14} {all:>16}");
            lines.write(json!({"schema": 1, "case": "tree_gdn.scratch", "variant": way, "batch": batch, "nodes": args.nodes,
                "needed_bytes": needed, "bytes": one, "megabytes": one as f64 / 1e6, "layers": args.layers, "bytes_all_layers": all}))?;
        }
    }
    lines.finish()
}
