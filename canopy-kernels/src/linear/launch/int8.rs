//! int8 weights on a device.

use std::sync::Arc;

use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};

use super::{BLOCK, CHUNK, Packed, THREADS, TILE, WeightOnDevice, WeightShape};
use crate::cuda::Kernels;
use crate::{Error, Result};

pub(super) const IMAGE: &str = "linear/linear_int8";
/// Bytes of a tile's chunk: its values, and a bf16 scale for each of its outputs.
const TILE_BYTES: usize = TILE * CHUNK + 2 * TILE;
/// Bytes of a block's chunk in shared memory, where rows start on 1,024-byte boundaries.
pub(super) const STAGE_BYTES: usize = (BLOCK / TILE * TILE_BYTES).next_multiple_of(1024);
const OP: &str = "int8 weight";

impl WeightShape {
    /// Bytes of the weight in int8, scales included.
    pub fn int8_len(&self) -> usize {
        self.tiles() * self.chunks() * TILE_BYTES
    }
}

impl WeightOnDevice {
    /// The same weight in int8 ([`int8`](crate::linear::int8)), made on the device; one that is int8 already, again.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn to_int8(&self, stream: &Arc<CudaStream>) -> Result<Self> {
        let driver = |source| Error::Driver { op: OP, source };
        let packed = match &self.packed {
            Packed::Int8(packed) => packed.try_clone().map_err(driver)?,
            Packed::Bf16(weight) => {
                // SAFETY: the kernel below writes every byte.
                let mut packed = unsafe { stream.alloc::<u8>(self.shape.int8_len()) }.map_err(driver)?;
                let function = Kernels::on(stream.context())?.function(OP, IMAGE, "linear_quantise")?;
                let config = LaunchConfig {
                    grid_dim: (self.shape.chunks() as u32, self.shape.tiles() as u32, 1),
                    block_dim: (THREADS as u32, 1, 1),
                    shared_mem_bytes: 0,
                };
                let args = self.shape.args();
                let mut launch = stream.launch_builder(&function);
                launch.arg(&args).arg(weight).arg(&mut packed);
                // SAFETY: a CTA reads and writes its own tile's chunk, within the two lengths above.
                unsafe { launch.launch(config) }.map_err(driver)?;
                packed
            }
        };
        // A product reads its weight before it waits for the kernels ahead.
        stream.synchronize().map_err(driver)?;
        Self::of(stream, self.shape.clone(), Packed::Int8(packed))
    }
}
