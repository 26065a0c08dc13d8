//! CUDA storages as the views that the kernels take, and results back. Each op's launch is a file here.

pub(crate) mod attention;
pub(crate) mod cast;
pub(crate) mod gdn;
pub(crate) mod glue;
pub(crate) mod graph;
pub(crate) mod inputs;
pub(crate) mod linear;
pub(crate) mod lists;
pub(crate) mod memory;
pub(crate) mod parts;
pub(crate) mod passes;
pub(crate) mod walk;

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr};
use candle_core::{CudaDevice, CudaStorage, Device, Layout, Result, Shape, WithDType};

use crate::check::Arg;
use crate::wrap::WrapKernelErr;

/// Bytes that the kernels' vector loads need a row to be aligned to.
const ALIGN: usize = 16;

/// A contiguous argument of one dtype that starts on a 16-byte boundary.
pub(crate) fn view<'a, T>(arg: Arg, storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>>
where
    T: CudaDType + WithDType,
{
    let range = range::<T>(arg, storage, layout)?;
    Ok(storage.as_cuda_slice::<T>()?.slice(range))
}

/// A destination, as [`view`].
pub(crate) fn view_mut<'a, T>(
    arg: Arg,
    storage: &'a mut CudaStorage,
    layout: &Layout,
) -> Result<CudaViewMut<'a, T>>
where
    T: CudaDType + WithDType,
{
    let range = range::<T>(arg, storage, layout)?;
    Ok(storage.as_cuda_slice_mut::<T>()?.slice_mut(range))
}

/// Layers of `len` elements that lie one after another.
pub(crate) fn layers<T>(mut all: CudaViewMut<'_, T>, len: usize) -> Vec<CudaViewMut<'_, T>> {
    let count = all.len() / len.max(1);
    let layer = |at: usize| {
        let view = all.slice_mut(at * len..(at + 1) * len);
        // SAFETY: only the lifetime changes, to that of `all`, which nobody uses behind this call; the ranges do not overlap.
        unsafe { std::mem::transmute::<CudaViewMut<'_, T>, CudaViewMut<'_, T>>(view) }
    };
    (0..count).map(layer).collect()
}

/// Pieces of a view, in ascending order.
pub(crate) fn pieces<'a, T, const P: usize>(
    mut all: CudaViewMut<'a, T>,
    ranges: &[std::ops::Range<usize>; P],
) -> [CudaViewMut<'a, T>; P] {
    debug_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    ranges.each_ref().map(|range| {
        let view = all.slice_mut(range.clone());
        // SAFETY: only the lifetime changes, to that of `all`, which nobody uses behind this call; the ranges do not overlap.
        unsafe { std::mem::transmute::<CudaViewMut<'_, T>, CudaViewMut<'a, T>>(view) }
    })
}

fn range<T: WithDType>(arg: Arg, storage: &CudaStorage, layout: &Layout) -> Result<std::ops::Range<usize>> {
    arg.contiguous(layout)?;
    arg.dtype(storage.dtype(), T::DTYPE)?;
    let start = layout.start_offset();
    if !(start * size_of::<T>()).is_multiple_of(ALIGN) {
        let got = format_args!("element {start} of {} bytes each", size_of::<T>());
        return arg.refuse(format_args!("a tensor that starts on a {ALIGN}-byte boundary"), got);
    }
    Ok(start..start + layout.shape().elem_count())
}

/// An output that the kernel writes whole, of at least one element, since no device buffer is empty; where it is a pack, no view shows the gaps between its planes.
pub(crate) fn output<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    if let Some(slice) = memory::take(device, len.max(1))? {
        return Ok(slice);
    }
    // SAFETY: the caller's kernel writes every element before anything reads one.
    unsafe { device.alloc::<T>(len.max(1)) }
}

/// A finished output.
pub(crate) fn storage<T: CudaDType>(
    device: &CudaDevice,
    slice: CudaSlice<T>,
    shape: impl Into<Shape>,
) -> (CudaStorage, Shape) {
    (CudaStorage::wrap_cuda_slice(slice, device.clone()), shape.into())
}

/// What `make` uploads on a CUDA device's stream; nothing on the CPU.
pub(crate) fn upload<T>(
    device: &Device,
    make: impl FnOnce(&Arc<CudaStream>) -> canopy_kernels::Result<T>,
) -> Result<Option<Arc<T>>> {
    match device {
        Device::Cuda(cuda) => Ok(Some(Arc::new(make(&cuda.cuda_stream()).wrap()?))),
        _ => Ok(None),
    }
}

/// [`crate::profiled`] on CUDA.
pub(crate) fn profiled<T, E: From<candle_core::Error>>(
    device: &CudaDevice,
    work: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<(T, Vec<crate::KernelTime>), E> {
    use canopy_kernels::cuda::profile;

    // the kernels' errors do not become the caller's: its own are carried beside
    let mut value = None;
    let ran = profile::profiled(&device.cuda_stream(), || {
        value = Some(work());
        Ok::<_, canopy_kernels::Error>(())
    });
    let ((), times) = ran.wrap()?;
    let time = |profile::KernelTime { symbol, launches, us }| crate::KernelTime { symbol, launches, us };
    match value {
        Some(value) => Ok((value?, times.into_iter().map(time).collect())),
        None => Err(candle_core::Error::Msg("profile: the work did not run".into()).into()),
    }
}
