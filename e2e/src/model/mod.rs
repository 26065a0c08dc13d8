//! The Qwen3.5 text model as a [`Target`](crate::target::Target): layers of Gated DeltaNet or gated attention,
//! each followed by an MLP, over pools that hold every slot's states.

mod attention;
mod gated_delta_net;
pub mod head;
mod mlp;
mod qwen35;
mod verify;

pub use head::SharedHead;
pub use qwen35::{ModelOptions, Qwen35};

use candle_core::Tensor;
use canopy_candle::DeviceTree;

use crate::Result;

/// What every layer of one verify pass reads.
#[derive(Debug)]
struct Round {
    tree: DeviceTree,
    /// Absolute position of every packed row: committed length + depth.
    positions: Vec<i32>,
    /// Committed length of every sequence.
    prefix_lens: Vec<i32>,
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
