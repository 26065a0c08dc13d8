//! Launches that may begin before the kernel ahead of them has ended (programmatic dependent launch, from sm_90 on).

use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, sys};

use crate::cuda::Kernels;

/// Launches `function`, whose kernel reads nothing that earlier kernels write, and writes nothing, before its own
/// `griddepcontrol.wait`. On older devices it is a plain launch.
///
/// # Safety
/// As any launch: `params` point to what the kernel takes, in order, and every buffer is as long as it reads or writes; and the kernel waits as
/// said above.
pub(crate) unsafe fn launch(
    stream: &Arc<CudaStream>,
    kernels: &Kernels,
    function: &CudaFunction,
    config: LaunchConfig,
    params: &mut [*mut c_void],
) -> Result<(), DriverError> {
    // SAFETY: a plain struct with a union of integers, for which zero is a value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    let config = sys::CUlaunchConfig {
        gridDimX: config.grid_dim.0,
        gridDimY: config.grid_dim.1,
        gridDimZ: config.grid_dim.2,
        blockDimX: config.block_dim.0,
        blockDimY: config.block_dim.1,
        blockDimZ: config.block_dim.2,
        sharedMemBytes: config.shared_mem_bytes,
        hStream: stream.cu_stream(),
        attrs: &raw mut attribute,
        numAttrs: u32::from(kernels.overlaps()),
    };
    stream.context().bind_to_thread()?;
    // SAFETY: the caller's promise; the configuration outlives the call.
    unsafe {
        sys::cuLaunchKernelEx(&raw const config, function.cu_function(), params.as_mut_ptr(), null_mut())
    }
    .result()
}
