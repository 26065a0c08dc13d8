//! Where a model runs, from its name.

use candle_core::Device;

use crate::{Error, Result};

/// The device called `cpu`, `cuda` or `cuda:N`.
///
/// # Errors
/// [`Error::Config`] for another name, and for a CUDA device in a build without the feature `cuda`.
pub fn parse(name: &str) -> Result<Device> {
    let error = |message: String| Error::Config { what: "device".into(), key: name.into(), message };
    if name == "cpu" {
        return Ok(Device::Cpu);
    }
    let ordinal = match name.strip_prefix("cuda") {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|ordinal| ordinal.parse().ok()),
        None => None,
    };
    let ordinal = ordinal.ok_or_else(|| error("expected cpu, cuda or cuda:N".into()))?;
    cuda(ordinal).map_err(error)
}

/// Free and total bytes of a device's memory; `None` for the CPU. What a pool keeps for later counts as used.
///
/// # Errors
/// From the driver.
pub fn memory(device: &Device) -> Result<Option<(usize, usize)>> {
    memory_of(device).map_err(|message| Error::Config {
        what: "device".into(),
        key: "memory".into(),
        message,
    })
}

#[cfg(feature = "cuda")]
fn memory_of(device: &Device) -> std::result::Result<Option<(usize, usize)>, String> {
    match device {
        Device::Cuda(cuda) => {
            cuda.cuda_stream().context().mem_get_info().map(Some).map_err(|source| source.to_string())
        }
        _ => Ok(None),
    }
}

#[cfg(not(feature = "cuda"))]
fn memory_of(_: &Device) -> std::result::Result<Option<(usize, usize)>, String> {
    Ok(None)
}

/// One candle device per ordinal: a target and its drafter must share theirs.
#[cfg(feature = "cuda")]
fn cuda(ordinal: usize) -> std::result::Result<Device, String> {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    static OPEN: Mutex<Option<HashMap<usize, Device>>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let open = open.get_or_insert_default();
    if let Some(device) = open.get(&ordinal) {
        return Ok(device.clone());
    }
    // A stream of its own: the per-thread default stream would be another one in the thread that runs the engine.
    let device = Device::new_cuda_with_stream(ordinal).map_err(|source| source.to_string())?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: this is the ordinal's only device, and a candle device allocates, uses and frees on its one stream.
        unsafe { cuda.disable_event_tracking() };
        keep_freed_memory(cuda).map_err(|source| source.to_string())?;
    }
    open.insert(ordinal, device.clone());
    Ok(device)
}

/// Memory that a round frees stays in the device's pool for the next round; by default every wait for the device returns it
/// to the system, and the next allocations map it anew.
#[cfg(feature = "cuda")]
fn keep_freed_memory(
    cuda: &candle_core::CudaDevice,
) -> std::result::Result<(), candle_core::cuda_backend::cudarc::driver::DriverError> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};

    let stream = cuda.cuda_stream();
    let mut threshold = u64::MAX;
    // SAFETY: the device and its default pool exist as long as the context does; the attribute is a u64.
    unsafe {
        let pool = result::device::get_default_mem_pool(stream.context().cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> std::result::Result<Device, String> {
    Err("expected a build with --features cuda, got one without".into())
}
