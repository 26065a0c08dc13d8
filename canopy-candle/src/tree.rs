//! Trees and paths on a device, prepared once per round.

use candle_core::{Device, Result};
use canopy_kernels::{AcceptedPaths, TreeBatch};

/// A [`TreeBatch`] ready for a device's kernels.
#[derive(Clone, Debug)]
pub struct DeviceTree {
    host: TreeBatch,
}

impl DeviceTree {
    /// Copies what the device's kernels read.
    pub fn new(batch: TreeBatch, device: &Device) -> Result<Self> {
        let _ = device;
        Ok(Self { host: batch })
    }

    /// The trees themselves.
    pub fn host(&self) -> &TreeBatch {
        &self.host
    }
}

/// [`AcceptedPaths`] ready for a device's kernels.
#[derive(Clone, Debug)]
pub struct DevicePaths {
    host: AcceptedPaths,
}

impl DevicePaths {
    /// Copies what the device's kernels read.
    pub fn new(paths: AcceptedPaths, device: &Device) -> Result<Self> {
        let _ = device;
        Ok(Self { host: paths })
    }

    /// The paths themselves.
    pub fn host(&self) -> &AcceptedPaths {
        &self.host
    }
}
