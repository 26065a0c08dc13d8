//! CPU storages as the f32 slices that the kernels take, and back.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Error, Layout, Result, Storage, StorageRef, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::check::Arg;

/// The argument's values in f32: a borrow when it is contiguous f32, otherwise one widened row-major copy.
pub(crate) fn values<'a>(arg: Arg, storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    match storage {
        CpuStorage::F32(data) => Ok(typed(data, layout)),
        CpuStorage::BF16(data) => Ok(Cow::Owned(widened(data, layout))),
        CpuStorage::F16(data) => Ok(Cow::Owned(widened(data, layout))),
        other => arg.float(other.dtype()).map(|()| Cow::Owned(Vec::new())),
    }
}

/// An f32 pool, borrowed: whole, contiguous, never copied.
pub(crate) fn pool<'a>(arg: Arg, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    arg.contiguous(layout)?;
    arg.dtype(storage.dtype(), DType::F32)?;
    let start = layout.start_offset();
    Ok(&storage.as_slice::<f32>()?[start..start + layout.shape().elem_count()])
}

/// An f32 destination, borrowed for writing.
pub(crate) fn pool_mut<'a>(arg: Arg, storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    arg.contiguous(layout)?;
    arg.dtype(storage.dtype(), DType::F32)?;
    let start = layout.start_offset();
    match storage {
        CpuStorage::F32(data) => Ok(&mut data[start..start + layout.shape().elem_count()]),
        _ => Err(Error::UnsupportedDTypeForOp(storage.dtype(), arg.op).bt()),
    }
}

/// f32 results in the dtype that the caller's tensors have.
pub(crate) fn storage_from(values: Vec<f32>, dtype: DType) -> CpuStorage {
    match dtype {
        DType::BF16 => CpuStorage::BF16(narrowed(&values, bf16::ZERO)),
        DType::F16 => CpuStorage::F16(narrowed(&values, f16::ZERO)),
        _ => CpuStorage::F32(values),
    }
}

/// A tensor that an op carries besides its operands, locked for reading while the op runs.
pub(crate) struct Carried<'a> {
    guard: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Carried<'a> {
    /// Locks `tensor` for reading.
    pub fn new(tensor: &'a Tensor) -> Self {
        let (guard, layout) = tensor.storage_and_layout();
        Self { guard, layout }
    }

    /// Its layout.
    pub fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        self.guard.dtype()
    }

    /// Its CPU storage; the op has checked the device before.
    pub fn cpu(&self, arg: Arg) -> Result<&CpuStorage> {
        match &*self.guard {
            Storage::Cpu(storage) => Ok(storage),
            other => arg.refuse(format_args!("a tensor on the CPU"), format_args!("{:?}", other.device())),
        }
    }

    /// Its CUDA storage; the op has checked the device before.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self, arg: Arg) -> Result<&candle_core::CudaStorage> {
        match &*self.guard {
            Storage::Cuda(storage) => Ok(storage),
            other => arg.refuse(format_args!("a tensor on CUDA"), format_args!("{:?}", other.device())),
        }
    }

    /// Its CPU storage and its layout.
    pub fn cpu_source(&self, arg: Arg) -> Result<(&CpuStorage, &Layout)> {
        Ok((self.cpu(arg)?, self.layout))
    }

    /// Its CUDA storage and its layout.
    #[cfg(feature = "cuda")]
    pub fn cuda_source(&self, arg: Arg) -> Result<crate::cuda::gdn::Source<'_>> {
        Ok((self.cuda(arg)?, self.layout))
    }

    /// Its values on the device when they are contiguous f32.
    #[cfg(feature = "cuda")]
    pub fn cuda_values(
        &self,
        arg: Arg,
    ) -> Result<candle_core::cuda_backend::cudarc::driver::CudaView<'_, f32>> {
        crate::cuda::glue::whole(arg, self.cuda(arg)?, self.layout)
    }

    /// Its values in f32.
    pub fn values(&self, arg: Arg) -> Result<Cow<'_, [f32]>> {
        values(arg, self.cpu(arg)?, self.layout)
    }

    /// Its values when they are bf16.
    pub fn bf16s(&self, arg: Arg) -> Result<Cow<'_, [bf16]>> {
        match self.cpu(arg)? {
            CpuStorage::BF16(data) => Ok(typed(data, self.layout)),
            other => arg.refuse(format_args!("BF16"), format_args!("{:?}", other.dtype())),
        }
    }
}

/// A tensor as a device's kernels read it: the CPU forwards walk any layout, others take row-major rows.
pub(crate) fn row_major(tensor: &Tensor) -> Result<Tensor> {
    match tensor.device().is_cpu() {
        true => Ok(tensor.clone()),
        false => tensor.contiguous(),
    }
}

/// (rows, width, elements from row to row) of a layout whose every row, an index of the first dimension, lies in one piece; one row
/// below two dimensions.
pub(crate) fn matrix(layout: &Layout) -> Option<(usize, usize, usize)> {
    let (rows, inner, strides) = match (layout.dims(), layout.stride()) {
        ([rows, inner @ ..], [stride, strides @ ..]) if !inner.is_empty() => {
            ((*rows, *stride), inner, strides)
        }
        (dims, strides) => ((1, 0), dims, strides),
    };
    let mut width = 1;
    for (&size, &stride) in inner.iter().zip(strides).rev() {
        if size > 1 && stride != width {
            return None;
        }
        width *= size;
    }
    let (rows, stride) = if rows.0 > 1 { rows } else { (rows.0, width) };
    (stride >= width).then_some((rows, width, stride))
}

/// As [`row_major`] for kernels that read rows at any distance from each other: columns of a wider matrix are left in place.
pub(crate) fn row_pieces(tensor: &Tensor) -> Result<Tensor> {
    match tensor.device().is_cpu() || matrix(tensor.layout()).is_some() {
        true => Ok(tensor.clone()),
        false => tensor.contiguous(),
    }
}

/// Refuses two tensors over one allocation: an in-place op locks its destination for writing.
pub(crate) fn expect_distinct(arg: Arg, source: &Tensor, destination: &Tensor) -> Result<()> {
    let address = |tensor: &Tensor| {
        let (guard, _) = tensor.storage_and_layout();
        std::ptr::from_ref::<Storage>(&guard).addr()
    };
    if address(source) != address(destination) {
        return Ok(());
    }
    arg.refuse(format_args!("storage of its own"), format_args!("the destination's storage"))
}

/// Widens a 16-bit argument to a row-major f32 copy.
fn widened<T>(data: &[T], layout: &Layout) -> Vec<f32>
where
    T: Copy,
    [T]: HalfFloatSliceExt,
{
    let data = typed(data, layout);
    let mut out = vec![0f32; data.len()];
    data.convert_to_f32_slice(&mut out);
    out
}

fn narrowed<T: Copy>(values: &[f32], zero: T) -> Vec<T>
where
    [T]: HalfFloatSliceExt,
{
    let mut out = vec![zero; values.len()];
    out.convert_from_f32_slice(values);
    out
}

/// A typed argument: a borrow when it is contiguous, otherwise a row-major copy.
pub(crate) fn typed<'a, T: Copy>(data: &'a [T], layout: &Layout) -> Cow<'a, [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Cow::Borrowed(&data[start..end]),
        None => Cow::Owned(gathered(data, layout)),
    }
}

/// A row-major copy of a strided argument.
fn gathered<T: Copy>(data: &[T], layout: &Layout) -> Vec<T> {
    let mut out = Vec::with_capacity(layout.shape().elem_count());
    gather(data, layout.dims(), layout.stride(), layout.start_offset(), &mut out);
    out
}

fn gather<T: Copy>(data: &[T], dims: &[usize], strides: &[usize], offset: usize, out: &mut Vec<T>) {
    match (dims, strides) {
        ([n], [1]) => out.extend_from_slice(&data[offset..offset + n]),
        ([n, dims @ ..], [stride, strides @ ..]) => {
            for i in 0..*n {
                gather(data, dims, strides, offset + i * stride, out);
            }
        }
        _ => out.push(data[offset]),
    }
}

/// Writes f32 values into a 16-bit or f32 storage from element `start` on.
pub(crate) fn write_back(storage: &mut CpuStorage, start: usize, values: &[f32]) {
    let end = start + values.len();
    match storage {
        CpuStorage::F32(data) => data[start..end].copy_from_slice(values),
        CpuStorage::BF16(data) => data[start..end].convert_from_f32_slice(values),
        CpuStorage::F16(data) => data[start..end].convert_from_f32_slice(values),
        _ => {}
    }
}
