//! The Qwen3.5 text model as a [`Target`](crate::target::Target): layers of Gated DeltaNet or gated attention,
//! each followed by an MLP, over pools that hold every slot's states.

mod accept;
mod attention;
mod gated_delta_net;
pub mod head;
mod mlp;
mod prefill;
mod qwen35;
mod verify;

pub use head::SharedHead;
pub use qwen35::{ModelOptions, Qwen35};

use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use canopy_candle::{DeviceTree, PassInputs, Passes, Placed};

use crate::{Result, pool};

/// What every layer of one verify pass reads.
#[derive(Debug)]
struct Round<'a> {
    tree: &'a DeviceTree,
    /// Absolute position of every packed row: committed length + depth.
    positions: &'a [i32],
    /// Committed length of every sequence.
    prefix_lens: &'a [i32],
}

/// Runs a pass where its device wants it: the CPU's in the thread pool, another device's in the caller's thread, which has only launches to
/// make.
pub(crate) fn run_pass<T: Send>(device: &Device, work: impl FnOnce() -> T + Send) -> T {
    if device.is_cpu() { pool::run(work) } else { work() }
}

/// Runs a pass through `passes`, or without a recording. What it gives is the pass's until the next one through the same `passes`,
/// as are the inputs beside it.
pub(crate) fn run_recorded<T>(
    passes: Option<&Mutex<Passes<T>>>,
    inputs: &PassInputs,
    work: impl Fn(&Placed) -> Result<T>,
) -> Result<(Arc<T>, Placed)> {
    let ran = match passes {
        Some(passes) => qwen35::lock(passes).run(inputs, work)?,
        None => Passes::plain().run(inputs, work)?,
    };
    if let Some(reason) = &ran.refused {
        tracing::warn!(reason, "a pass could not be recorded as a CUDA graph and runs kernel by kernel");
    }
    Ok((ran.value, ran.placed))
}

/// The outputs of a packed product as an array.
pub(crate) fn outputs<const N: usize>(parts: Vec<Tensor>) -> Result<[Tensor; N]> {
    parts.try_into().map_err(|parts: Vec<Tensor>| {
        canopy_kernels::Error::Shape {
            op: "packed linear",
            arg: "outputs",
            expected: Box::new([N]),
            got: Box::new([parts.len()]),
        }
        .into()
    })
}
