//! A stream that has some of a device's multiprocessors to itself and no others (a green context): what a smaller device, or a smaller
//! share of one, would run.

use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};

use crate::{Error, Result};

const OP: &str = "partition";

/// Some multiprocessors of a device, with a stream whose launches run on those alone. Kernels, buffers and graphs are the context's own.
#[derive(Debug)]
pub struct Partition {
    stream: Arc<CudaStream>,
    multiprocessors: usize,
}

impl Partition {
    /// At least `least` multiprocessors of the context's device: as few as the driver gives out (8 at a time on compute capability 9.0).
    ///
    /// # Errors
    /// [`Error::Driver`] from a driver or device that cannot split multiprocessors, or has fewer.
    pub fn new(context: &Arc<CudaContext>, least: usize) -> Result<Self> {
        let driver = |source| Error::Driver { op: OP, source };
        context.bind_to_thread().map_err(driver)?;
        let device = context.cu_device();
        let (mut all, mut some): (MaybeUninit<sys::CUdevResource>, MaybeUninit<sys::CUdevResource>) =
            (MaybeUninit::zeroed(), MaybeUninit::zeroed());
        let (mut groups, mut green, mut stream) = (1, null_mut(), null_mut());
        // SAFETY: out-parameters of the driver's own types, each written before it is read (checked call by call).
        let multiprocessors = unsafe {
            let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
            sys::cuDeviceGetDevResource(device, all.as_mut_ptr(), kind).result().map_err(driver)?;
            let (first, of) = (some.as_mut_ptr(), all.as_ptr());
            sys::cuDevSmResourceSplitByCount(first, &raw mut groups, of, null_mut(), 0, least as u32)
                .result()
                .map_err(driver)?;
            let mut description: sys::CUdevResourceDesc = zeroed();
            sys::cuDevResourceGenerateDesc(&raw mut description, first, 1).result().map_err(driver)?;
            let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
            sys::cuGreenCtxCreate(&raw mut green, description, device, flags).result().map_err(driver)?;
            some.assume_init().__bindgen_anon_1.sm.smCount as usize
        };
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the green context was just made.
        let made = unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, green, flags, 0) };
        if let Err(source) = made.result() {
            // SAFETY: nothing uses it yet.
            unsafe { sys::cuGreenCtxDestroy(green) };
            return Err(driver(source));
        }
        // SAFETY: the stream belongs to the device's primary context and is never destroyed, as what was made from it may outlive this value.
        let stream = unsafe { context.wrap_borrowed_stream(stream) };
        Ok(Self { stream, multiprocessors })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// How many multiprocessors its launches have.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }
}
