//! Measurements on a CUDA device.

mod gdn;
mod sweep;
mod timer;

pub use sweep::{SweepArgs, run};
