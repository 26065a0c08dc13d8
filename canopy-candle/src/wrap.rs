//! Kernel errors as candle errors.

use candle_core::{Error, Result};

/// Carries a kernel's error through candle with its text unchanged.
pub(crate) trait WrapKernelErr<T> {
    /// The same result in candle's type.
    fn wrap(self) -> Result<T>;
}

impl<T> WrapKernelErr<T> for canopy_kernels::Result<T> {
    fn wrap(self) -> Result<T> {
        self.map_err(Error::wrap)
    }
}
