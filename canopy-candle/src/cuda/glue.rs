//! f32 arguments of the row-wise steps.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::{CudaStorage, DType, Layout, Result};
use canopy_kernels::glue::launch::{Norm, Rows};

use crate::check::Arg;
use crate::glue::NormKind;
use crate::slices::matrix;

/// Rows at any distance from each other.
pub(crate) struct RowsView<'a> {
    pub view: CudaView<'a, f32>,
    pub stride: usize,
}

impl RowsView<'_> {
    /// As the launches take them.
    pub fn rows(&self) -> Rows<'_> {
        Rows { data: &self.view, stride: self.stride }
    }
}

/// An argument whose rows (indices of the first dimension) lie in one piece each.
pub(crate) fn rows<'a>(arg: Arg, storage: &'a CudaStorage, layout: &Layout) -> Result<RowsView<'a>> {
    arg.dtype(storage.dtype(), DType::F32)?;
    let Some((rows, width, stride)) = matrix(layout) else {
        let strides = format_args!("strides {:?} for {:?}", layout.stride(), layout.dims());
        return arg.refuse(format_args!("rows in one piece each"), strides);
    };
    let len = if rows * width == 0 { 0 } else { (rows - 1) * stride + width };
    let start = layout.start_offset();
    Ok(RowsView { view: storage.as_cuda_slice::<f32>()?.slice(start..start + len), stride })
}

/// A contiguous argument at any offset.
pub(crate) fn whole<'a>(arg: Arg, storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, f32>> {
    arg.contiguous(layout)?;
    arg.dtype(storage.dtype(), DType::F32)?;
    let start = layout.start_offset();
    Ok(storage.as_cuda_slice::<f32>()?.slice(start..start + layout.shape().elem_count()))
}

/// An RMSNorm over a weight on the device.
pub(crate) fn norm<'a>(kind: NormKind, weight: &'a CudaView<'a, f32>, eps: f32) -> Norm<'a> {
    Norm { weight, eps, unit_offset: kind == NormKind::UnitOffset }
}
