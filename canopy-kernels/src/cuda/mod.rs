//! The CUDA half: loaded kernels, trees and paths on a device.

pub(crate) mod early;
mod module;
mod tree;

#[cfg(feature = "controls")]
pub(crate) use module::controls;
pub use module::{BUILT_ARCHS, Kernels, has_driver};
pub use tree::{PathsOnDevice, TreeOnDevice};
