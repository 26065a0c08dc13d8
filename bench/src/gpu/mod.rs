//! Measurements on a CUDA device.

mod accuracy;
mod crossover;
mod drift;
mod gdn;
mod launches;
mod memory;
mod op;
mod order;
mod rows;
mod shapes;
mod sweep;
mod timer;
mod variant;

pub use accuracy::{AccuracyArgs, run as accuracy};
pub use crossover::{CrossoverArgs, run as crossover};
pub use drift::{DriftArgs, run as drift};
pub use memory::{MemoryArgs, run as memory};
pub use op::run as op;
pub use order::{OrderArgs, run as order};
pub use sweep::{SweepArgs, run as sweep};
