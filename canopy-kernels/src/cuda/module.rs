//! The fatbins compiled into this crate, loaded once per context.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};
use cudarc::nvrtc::Ptx;

use crate::archs::runs_on;
use crate::{Error, Result};

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// The architectures this crate has machine code for, as `80,90,...`.
pub const BUILT_ARCHS: &str = env!("CANOPY_BUILT_ARCHS");

/// True when a CUDA driver can be loaded on this machine and lists a device. Without a driver the first call into it
/// panics, so ask here first.
pub fn has_driver() -> bool {
    std::panic::catch_unwind(CudaContext::device_count)
        .is_ok_and(|count| count.is_ok_and(|devices| devices > 0))
}

/// Loaded kernels of one context.
#[derive(Debug)]
pub struct Kernels {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    shared_limit: i32,
    multiprocessors: i32,
    sm: u32,
    functions: Mutex<HashMap<&'static str, CudaFunction>>,
}

fn registry() -> &'static Mutex<HashMap<usize, Arc<Kernels>>> {
    static REGISTRY: OnceLock<Mutex<HashMap<usize, Arc<Kernels>>>> = OnceLock::new();
    REGISTRY.get_or_init(Mutex::default)
}

impl Kernels {
    /// The kernels on `context`, loaded at the first call.
    ///
    /// # Errors
    /// [`Error::UnsupportedArch`] when no image of this build runs on the device; [`Error::Driver`] from the driver.
    pub fn on(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        let driver = |source| Error::Driver { op: "load kernels", source };
        let key = context.cu_ctx() as usize;
        if let Some(kernels) = registry().lock().expect("no holder of this lock panics").get(&key) {
            return Ok(kernels.clone());
        }
        let (major, minor) = context.compute_capability().map_err(driver)?;
        let sm = (major * 10 + minor) as u32;
        if !runs_on(sm, BUILT_ARCHS) {
            return Err(Error::UnsupportedArch { sm, built: BUILT_ARCHS });
        }
        let kernels = Arc::new(Self::load(context, sm, FATBINS)?);
        registry().lock().expect("no holder of this lock panics").insert(key, kernels.clone());
        Ok(kernels)
    }

    fn load(context: &Arc<CudaContext>, sm: u32, images: &[(&'static str, &[u8])]) -> Result<Self> {
        let driver = |source| Error::Driver { op: "load kernels", source };
        let load = |(name, image): &(&'static str, &[u8])| {
            Ok((*name, context.load_module(Ptx::from_binary(image.to_vec())).map_err(driver)?))
        };
        let runs_here = |(name, _): &&(&'static str, &[u8])| !name.ends_with("_sm90a") || sm == 90;
        let modules = images.iter().filter(runs_here).map(load).collect::<Result<HashMap<_, _>>>()?;
        let limit = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_limit = context.attribute(limit).map_err(driver)?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count).map_err(driver)?;
        Ok(Self { modules, shared_limit, multiprocessors, sm, functions: Mutex::default() })
    }

    /// The entry point `symbol` of `image` (room/file), allowed all the shared memory that a block of this device may have. The
    /// allowance belongs to the function, which every stream and thread shares, so it is set once.
    pub fn function(&self, op: &'static str, image: &str, symbol: &'static str) -> Result<CudaFunction> {
        super::profile::mark(symbol)?;
        let mut functions = self.functions.lock().expect("no holder of this lock panics");
        if let Some(function) = functions.get(symbol) {
            return Ok(function.clone());
        }
        let unsupported = || Error::Unsupported { op, wanted: symbol.into(), built: BUILT_ARCHS };
        let module = self.modules.get(image).ok_or_else(unsupported)?;
        let function = module.load_function(symbol).map_err(|_| unsupported())?;
        let attribute = |which| function.get_attribute(which).map_err(|source| Error::Driver { op, source });
        let fixed = attribute(sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        function
            .set_attribute(
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.shared_limit - fixed,
            )
            .map_err(|source| Error::Driver { op, source })?;
        functions.insert(symbol, function.clone());
        Ok(function)
    }

    /// Registers of a thread of the entry point `symbol`, once it was launched.
    pub fn registers(&self, symbol: &str) -> Option<i32> {
        let functions = self.functions.lock().expect("no holder of this lock panics");
        let registers = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS;
        functions.get(symbol)?.get_attribute(registers).ok()
    }

    /// Whether a launch may begin before the kernel ahead of it has ended.
    pub(crate) fn overlaps(&self) -> bool {
        self.sm >= 90
    }

    /// Compute capability of the device, 90 for 9.0.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Whether this build has `image` (room/file) for this device; files named `_sm90a` are for compute capability 9.0 alone.
    pub fn has(&self, image: &str) -> bool {
        self.modules.contains_key(image)
    }

    /// Multiprocessors of the device.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.multiprocessors as usize
    }

    /// Bytes of shared memory that a block of this device may have.
    pub fn shared_limit(&self) -> usize {
        self.shared_limit as usize
    }
}

#[cfg(feature = "controls")]
pub(crate) mod controls;
