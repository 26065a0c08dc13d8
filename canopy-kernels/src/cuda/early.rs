//! Launches that may begin before the kernel ahead of them has ended (programmatic dependent launch, from sm_90 on).

use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, SyncOnDrop, sys,
};

use crate::cuda::Kernels;
use crate::{Error, Result};

#[derive(Clone, Copy)]
enum Param {
    Value(*mut c_void),
    Address(sys::CUdeviceptr),
}

/// One launch of a kernel that reads nothing that earlier kernels write, and writes nothing, before its own
/// `wait_for_kernels_ahead`; but for the lists of a [`super::TreeOnDevice`], as `tree_build`, which writes them, lets nobody begin early, and
/// the slots of a [`super::PathsOnDevice`], which come from the host. On older devices it is a plain launch.
pub(crate) struct Launch<'a> {
    stream: &'a Arc<CudaStream>,
    op: &'static str,
    function: CudaFunction,
    overlaps: bool,
    /// Blocks that have a multiprocessor each, and the shared memory that keeps others away from it.
    alone: (usize, usize),
    params: Vec<Param>,
    used: Vec<SyncOnDrop<'a>>,
}

impl<'a> Launch<'a> {
    /// Of entry point `symbol` of `image` (room/file).
    pub(crate) fn new(
        stream: &'a Arc<CudaStream>,
        op: &'static str,
        image: &str,
        symbol: &'static str,
    ) -> Result<Self> {
        let kernels = Kernels::on(stream.context())?;
        let function = kernels.function(op, image, symbol)?;
        Ok(Self::of(stream, op, &kernels, function))
    }

    /// Of a function of `kernels`.
    pub(crate) fn of(
        stream: &'a Arc<CudaStream>,
        op: &'static str,
        kernels: &Kernels,
        function: CudaFunction,
    ) -> Self {
        let (params, used) = (Vec::with_capacity(16), Vec::with_capacity(16));
        let alone = (kernels.multiprocessors(), kernels.shared_limit() / 2 + 1024);
        Self { stream, op, function, overlaps: kernels.overlaps(), alone, params, used }
    }

    /// The next parameter, by value.
    pub(crate) fn value<T: DeviceRepr>(&mut self, value: &'a T) -> &mut Self {
        self.params.push(Param::Value((&raw const *value).cast_mut().cast()));
        self
    }

    /// The next parameter, a buffer that is read.
    pub(crate) fn read<T>(&mut self, buffer: &'a impl DevicePtr<T>) -> &mut Self {
        let (address, used) = buffer.device_ptr(self.stream);
        self.params.push(Param::Address(address));
        self.used.push(used);
        self
    }

    /// The next parameter, a buffer that is written.
    pub(crate) fn write<T>(&mut self, buffer: &'a mut impl DevicePtrMut<T>) -> &mut Self {
        let (address, used) = buffer.device_ptr_mut(self.stream);
        self.params.push(Param::Address(address));
        self.used.push(used);
        self
    }

    /// The next parameter, a buffer that this launch has no use for.
    pub(crate) fn absent(&mut self) -> &mut Self {
        self.params.push(Param::Address(0));
        self
    }

    /// `config` with a multiprocessor for every block where there are enough: blocks that begin early would share one while others are about to
    /// be free, and the launch would take as long as those two.
    pub(crate) fn spread(&self, mut config: LaunchConfig) -> Result<LaunchConfig> {
        let (x, y, z) = config.grid_dim;
        let (multiprocessors, bytes) = self.alone;
        if self.overlaps && (x * y * z) as usize <= multiprocessors {
            let fixed = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let fixed =
                self.function.get_attribute(fixed).map_err(|source| Error::Driver { op: self.op, source })?;
            config.shared_mem_bytes = config.shared_mem_bytes.max(bytes as u32 - fixed as u32);
        }
        Ok(config)
    }

    /// Launches it.
    ///
    /// # Safety
    /// As any launch: the parameters are what the kernel takes, in order, and every buffer is as long as it reads or writes; and the kernel
    /// waits as said above.
    pub(crate) unsafe fn launch(mut self, config: LaunchConfig) -> Result<()> {
        let driver = |source| Error::Driver { op: self.op, source };
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
            hStream: self.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.overlaps),
        };
        let in_place = |param: &mut Param| match param {
            Param::Value(value) => *value,
            Param::Address(address) => (&raw mut *address).cast(),
        };
        let mut params = self.params.iter_mut().map(in_place).collect::<Vec<*mut c_void>>();
        self.stream.context().bind_to_thread().map_err(driver)?;
        // SAFETY: the caller's promise; configuration and parameters outlive the call.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                params.as_mut_ptr(),
                null_mut(),
            )
        }
        .result()
        .map_err(driver)
    }
}
