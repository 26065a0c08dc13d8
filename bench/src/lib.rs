//! Measurements and checks of canopy's kernels: ops on files, the machine record, the kernel contract.

pub mod contract;
pub mod machine;
pub mod op;
