//! Measurements and checks of canopy's kernels: ops on files, the machine record, the kernel contract.

pub mod compare;
pub mod contract;
pub mod dispatch;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod lines;
pub mod machine;
pub mod op;
