//! The product over packed weights.

use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor,
};
use canopy_kernels::linear::launch::{self, Rounding, WeightOnDevice, WeightShape};

use super::{lists, memory, output, storage, view};
use crate::List;
use crate::check::{Arg, arg};
use crate::planes;
use crate::slices::Carried;
use crate::wrap::WrapKernelErr;

const OP: &str = "packed-linear";

/// Whether the kernel takes such weights.
pub(crate) fn takes(dtype: DType, inputs: usize, parts: usize) -> bool {
    dtype == DType::BF16 && inputs.is_multiple_of(4) && (1..=8).contains(&parts)
}

/// A packed weight; launches over it follow one another on its device's stream.
#[derive(Debug)]
pub(crate) struct Weight(Mutex<WeightOnDevice>, CudaDevice);

impl Weight {
    /// Packs bf16 matrices that lie on the CPU.
    pub(crate) fn new(
        arg: Arg,
        inputs: usize,
        outputs: &[usize],
        parts: &[Tensor],
        device: &CudaDevice,
    ) -> Result<Self> {
        let carried = parts.iter().map(Carried::new).collect::<Vec<_>>();
        let slices = carried.iter().map(|part| part.bf16s(arg)).collect::<Result<Vec<_>>>()?;
        let slices = slices.iter().map(AsRef::as_ref).collect::<Vec<_>>();
        let shape = WeightShape::new(inputs, outputs).wrap()?;
        let packed = device.clone_htod(&shape.pack(&slices).wrap()?)?;
        Ok(Self::of(WeightOnDevice::new(&device.cuda_stream(), shape, packed).wrap()?, device))
    }

    /// A weight from a seed, made on the device.
    pub(crate) fn random(
        inputs: usize,
        outputs: &[usize],
        (seed, scale): (u64, f32),
        device: &CudaDevice,
    ) -> Result<Self> {
        let shape = WeightShape::new(inputs, outputs).wrap()?;
        Ok(Self::of(WeightOnDevice::random(&device.cuda_stream(), shape, seed, scale).wrap()?, device))
    }

    fn of(weight: WeightOnDevice, device: &CudaDevice) -> Self {
        Self(Mutex::new(weight), device.clone())
    }

    /// The same in int8, made on the device.
    pub(crate) fn to_int8(&self) -> Result<Self> {
        Ok(Self::of(self.lock().to_int8(&self.1.cuda_stream()).wrap()?, &self.1))
    }

    /// Whether its product takes bf16 rows as they are.
    pub(crate) fn takes_bf16(&self) -> Result<bool> {
        self.lock().takes_bf16(&self.1.cuda_stream()).wrap()
    }

    /// Rows of the stacked matrix by index, `[ids, in]` f32; `ids` are below the number of outputs.
    pub(crate) fn lookup(&self, ids: &[u32], device: &CudaDevice) -> Result<Tensor> {
        let most = ids.iter().copied().max().unwrap_or(0);
        let list: Vec<i32> = ids.iter().map(|id| id.cast_signed()).collect();
        let on_device = lists::on_device(device, List::Ids, &list)?;
        let weight = self.lock();
        let shape = (ids.len(), weight.shape().inputs());
        let len = shape.0 * shape.1;
        let mut y = output::<f32>(device, len)?;
        launch::lookup(&device.cuda_stream(), &weight, on_device.bits(ids.len()), most, y.slice_mut(..len))
            .wrap()?;
        let (storage, shape) = storage(device, y, shape);
        memory::kept(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, WeightOnDevice> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// All outputs as planes of one allocation, in f32. Rows may be bf16 where [`Weight::takes_bf16`].
pub(crate) struct Product<'a> {
    pub weight: &'a Weight,
    pub rounding: Rounding,
    pub outputs: &'a [usize],
}

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        arg(OP, "x").cuda_only()
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (device, rows, name) = (x.device(), layout.dims()[0], arg(OP, "x"));
        let lens = self.outputs.iter().map(|out| rows * out).collect::<Vec<_>>();
        let count = planes::elem_count(&lens);
        let mut weight = self.weight.lock();
        let len = match self.rounding {
            Rounding::Whole => weight.scratch_len_whole(&device.cuda_stream(), rows).wrap()?,
            _ => weight.scratch_len(rows),
        };
        let mut scratch = output::<f32>(device, len.max(1))?;
        let mut pack = output::<f32>(device, count)?;
        let starts = planes::starts(&lens);
        let (y, stream) = (pack.as_view_mut(), device.cuda_stream());
        if x.dtype() == DType::BF16 {
            let x = view::<half::bf16>(name, x, layout)?;
            launch::forward_bf16(&stream, &mut weight, self.rounding, x, &mut scratch, &starts, y).wrap()?;
        } else {
            let x = view::<f32>(name, x, layout)?;
            launch::forward(&stream, &mut weight, self.rounding, x, &mut scratch, &starts, y).wrap()?;
        }
        memory::keep(scratch);
        Ok(storage(device, pack, count))
    }
}
