//! The CUDA half: loaded kernels, trees and paths on a device.

pub(crate) mod early;
mod module;
mod tree;

pub use module::{BUILT_ARCHS, Kernels, has_driver};
pub use tree::{PathsOnDevice, TreeOnDevice};
