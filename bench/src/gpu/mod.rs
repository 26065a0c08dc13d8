//! Measurements on a CUDA device.

mod crossover;
mod drift;
mod gdn;
mod memory;
mod shapes;
mod sweep;
mod timer;
mod variant;

pub use crossover::{CrossoverArgs, run as crossover};
pub use drift::{DriftArgs, run as drift};
pub use memory::{MemoryArgs, run as memory};
pub use sweep::{SweepArgs, run as sweep};
