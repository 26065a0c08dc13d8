//! The CUDA half: loaded kernels, trees and paths on a device.

mod chains;
pub(crate) mod early;
mod module;
mod partition;
pub mod profile;
mod tree;
mod words;

pub use chains::ChainsOnDevice;
#[cfg(feature = "controls")]
pub(crate) use module::controls;
pub use module::{BUILT_ARCHS, Kernels, has_driver};
pub use partition::Partition;
pub use tree::{Needs, PathsLayout, PathsOnDevice, TreeLayout, TreeOnDevice};
pub use words::{DeviceList, Place, Word, Words};
