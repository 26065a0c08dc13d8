//! bf16 widened to f32 in memory that a recorded pass keeps, as that of candle's own cast is not.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{WrapErr, kernels};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape};
use half::bf16;

use super::{output, storage, view};
use crate::check::arg;

const OP: &str = "to-f32";

/// candle's kernel over a contiguous bf16 tensor.
pub(crate) struct ToF32;

impl CustomOp1 for ToF32 {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        arg(OP, "x").cuda_only()
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (device, len) = (x.device(), layout.shape().elem_count());
        let x = view::<bf16>(arg(OP, "x"), x, layout)?;
        let mut out = output::<f32>(device, len)?;
        let function = device.get_or_load_func("cast_bf16_f32", &kernels::CAST)?;
        let mut launch = function.builder();
        // One dimension, and no sizes and strides, since it is contiguous.
        let (dims, layout_of) = (1usize, 0usize);
        launch.arg(&len).arg(&dims).arg(&layout_of).arg(&x).arg(&mut out);
        // SAFETY: both have `len` elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(len as u32)) }.w()?;
        Ok(storage(device, out, layout.shape().clone()))
    }
}
